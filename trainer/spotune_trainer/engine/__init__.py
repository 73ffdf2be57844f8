"""The training engine: a transformers model wrapped by DeepSpeed, with AdamW and ZeRO stages 0 to 3.

This folder is the only one that knows DeepSpeed's internals: private attributes, patched methods and memory layouts,
all of DeepSpeed 0.19 (`zero_state.check_version`). Exceptions elsewhere are small. `export/universal.py` writes the
files of DeepSpeed's universal checkpoints. `training/flops_profiler.py` runs its FLOPS profiler, and reads the size of
a partitioned parameter from `ds_numel`. `worker_group/forkserver_preload.py` imports its modules ahead of time.

Patches are made by functions named `install_...` and by `limit_run_ahead` and `skip_gradient_reduction`, which they
call. All are installed in `build.build_engine`. A module that patches lists what it replaces in its first lines.
"""
