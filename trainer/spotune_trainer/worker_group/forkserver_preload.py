"""What the fork server of a node imports once, so that every rank forked from it starts in milliseconds.

Nothing here may touch a GPU: CUDA cannot be used in a process whose parent has begun to.
"""
# ruff: noqa: F401

import gc

# Every engine above stage 0 imports it, and most of torch's compiler with it.
import deepspeed.runtime.zero.muon.original_muon
import deepspeed.runtime.zero.stage3
import deepspeed.runtime.zero.stage_1_and_2

import spotune_trainer.training.worker

# Collecting garbage in a rank would otherwise walk through all of the above, and copy the memory it is in.
gc.collect()
gc.freeze()
