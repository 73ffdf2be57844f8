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
from torch._inductor import config as inductor_config

REFUSED = "does not have a deterministic implementation"
"""What PyTorch says of an operation that has no such kernel."""
_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_REPRODUCIBLE = (":4096:8", ":16:8")
"""What cuBLAS says makes it come to the same bits."""


def use_deterministic_kernels(*, wanted: bool) -> None:
    """From here on compute with kernels of that kind only, or with the fastest; to be called before the first one.

    An operation that has none raises a `RuntimeError` then, which says `REFUSED`.
    """
    if wanted:
        if os.environ.get(_CUBLAS) not in _REPRODUCIBLE:
            os.environ[_CUBLAS] = _REPRODUCIBLE[0]
        os.environ["FLASH_ATTENTION_DETERMINISTIC"] = "1"  # read by transformers for `attention: flash_attention_2`
        settings: Any = torch.utils.deterministic
        settings.fill_uninitialized_memory = False  # finds mistakes, and takes time
    torch.use_deterministic_algorithms(wanted)
    inductor_config.deterministic = wanted  # which newer versions of PyTorch have just done


@contextmanager
def any_kernels() -> Iterator[None]:
    """Kernels of any kind, for what no later step depends on."""
    wanted = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(wanted)
