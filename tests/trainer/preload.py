"""What the fork server imports once, so that a rank starts in milliseconds."""
# ruff: noqa: F401

import gc
import os

os.environ["DS_ACCELERATOR"] = "cpu"

# Every engine above stage 0 imports it, and most of torch's compiler with it.
import deepspeed.runtime.zero.muon.original_muon
import deepspeed.runtime.zero.stage3
import deepspeed.runtime.zero.stage_1_and_2

import spotune_trainer.worker

# Collecting garbage in a rank would otherwise walk through all of the above, and copy the memory it is in.
gc.collect()
gc.freeze()
