"""Which of DeepSpeed's compiled operators are used: none on processors, since images have no compiler."""

from __future__ import annotations

import deepspeed.ops


def compile_no_operators() -> None:
    """Keep DeepSpeed from compiling its all-reduce in shared memory at first use, for almost a minute: gloo is enough.

    With the whole attribute set, DeepSpeed does not run compilers to find out which operators it could build.
    """
    vars(deepspeed.ops)["__compatible_ops__"] = {"deepspeed_shm_comm": False}
