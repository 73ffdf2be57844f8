"""Kernels that come to the same bits whenever they are run, for `execution.deterministic`.

Most kernels do in any case. Not so the backward pass of fused attention on GPUs: its blocks add to one gradient in the
order in which they happen to end, and sums of floating-point numbers depend on their order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

REFUSED = "does not have a deterministic implementation"
"""What PyTorch says of an operation that has no such kernel."""


def use_deterministic_kernels(wanted: bool) -> None:
    """From here on compute with kernels of that kind only, or with the fastest; to be called before the first one.

    An operation that has none raises a `RuntimeError` then, which says `REFUSED`.
    """
    if wanted:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # one of two settings that cuBLAS says are reproducible
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # read by transformers for `attention: flash_attention_2`
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # finds mistakes, and takes time
    torch.use_deterministic_algorithms(wanted)


@contextmanager
def any_kernels() -> Iterator[None]:
    """Kernels of any kind, for what no later step depends on."""
    wanted = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(wanted)
