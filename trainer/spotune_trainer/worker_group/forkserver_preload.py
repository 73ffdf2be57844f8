"""Imports of a node's fork server, so that every rank forked from it starts in milliseconds.

Nothing here may initialise CUDA: a forked process cannot use CUDA if its parent has initialised it.
"""
# ruff: noqa: E402, F401

import gc
import sys

# transformers would import torchao, and that asks for the GPUs. A rank that computes in FP8 imports it itself.
sys.modules["torchao"] = None  # type: ignore[assignment]

# Every engine above stage 0 imports it, and with it most of torch's compiler.
import deepspeed.runtime.zero.muon.original_muon
import deepspeed.runtime.zero.stage3
import deepspeed.runtime.zero.stage_1_and_2

import spotune_trainer.training.worker

del sys.modules["torchao"]

# Otherwise a garbage collection in a rank visits all objects of these modules and copies their memory pages.
gc.collect()
gc.freeze()
