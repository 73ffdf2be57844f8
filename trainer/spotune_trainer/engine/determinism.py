"""Deterministic kernels, for `execution.deterministic`: the same input gives the same bits in every run.

Most kernels are deterministic in any case. The backward pass of fused attention on GPUs is not: its thread blocks add
to one gradient in the order in which they finish, and a floating-point sum depends on the order.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._inductor import config as inductor_config

NO_DETERMINISTIC_KERNEL = "does not have a deterministic implementation"
"""Part of PyTorch's error message for an operation without a deterministic kernel."""
_CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
_DETERMINISTIC_WORKSPACES = (":4096:8", ":16:8")
"""Values with which cuBLAS is deterministic, by its documentation."""


def use_deterministic_kernels(*, enabled: bool) -> None:
    """Use only deterministic kernels from now on, or the fastest ones. Call it before the first CUDA operation.

    If enabled, an operation without a deterministic kernel raises a `RuntimeError` with `NO_DETERMINISTIC_KERNEL`.
    """
    if enabled:
        if os.environ.get(_CUBLAS_WORKSPACE) not in _DETERMINISTIC_WORKSPACES:
            os.environ[_CUBLAS_WORKSPACE] = _DETERMINISTIC_WORKSPACES[0]
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # read by transformers for `attention: flash_attention_2`
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # a debugging aid that costs time
    torch.use_deterministic_algorithms(enabled)
    inductor_config.deterministic = enabled  # older versions of PyTorch do not set it in the call above


@contextmanager
def allow_nondeterministic_kernels() -> Iterator[None]:
    """Within it, operations that have no deterministic kernel may run; all others keep theirs.

    For evaluation and export: generation needs such operations. No weights depend on them, but the best checkpoint and
    early stopping depend on an evaluation.
    """
    was_enabled = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(was_enabled, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", f".*{NO_DETERMINISTIC_KERNEL}")
            yield
    finally:
        torch.use_deterministic_algorithms(was_enabled)
