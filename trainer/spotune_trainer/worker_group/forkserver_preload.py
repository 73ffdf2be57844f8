"""Imports of a node's fork server, so that every rank forked from it starts in milliseconds.

Nothing here may initialise CUDA: a forked process cannot use CUDA if its parent has initialised it.
"""
# ruff: noqa: E402, F401

import gc
import sys

# Objects of modules stay. To look through them again and again for garbage takes a tenth of the time of the imports.
gc.disable()

# transformers would import torchao, and that asks for the GPUs. A rank that computes in FP8 imports it itself.
# DeepSpeed's autotuner would import MLflow, and with it pandas and FastAPI: more than a second where it is installed.
_NOT_YET = ("mlflow", "torchao")
sys.modules |= dict.fromkeys(_NOT_YET)  # type: ignore[arg-type]

# Every engine above stage 0 imports it, and with it most of torch's compiler.
import deepspeed.runtime.zero.muon.original_muon
import deepspeed.runtime.zero.stage3
import deepspeed.runtime.zero.stage_1_and_2

import spotune_trainer.training.worker

for _name in _NOT_YET:
    del sys.modules[_name]

# Otherwise a garbage collection in a rank visits all objects of these modules and copies their memory pages.
gc.collect()
gc.freeze()
gc.enable()
