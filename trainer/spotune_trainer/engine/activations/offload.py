"""Activation offload: what recomputed layers save waits in page-locked host memory for the backward pass.

The copies run on streams of their own, one for each direction, and overlap with computation: while a layer is computed,
the forward pass copies what the layer before it has saved, and the backward pass fetches what it needs next. At most
two layers' tensors are on the GPU at any time (double buffering). A copy changes no bit. Rajbhandari et al.,
"ZeRO-Infinity" (2021), section 5.1, move checkpoints of activations in this way.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from spotune_trainer.checkpoint.snapshot import lock_pages

SMALLEST_BYTES = 1 << 20
"""Smaller tensors stay on the device: each copy has a latency, and they need little memory."""


class ActivationOffload:
    """Moves what the layers of a model save to host memory, and back. On a CPU it copies within its memory.

    Args:
        smallest_bytes: size from which tensors are moved.
    """

    def __init__(self, smallest_bytes: int = SMALLEST_BYTES) -> None:
        self._smallest_bytes = smallest_bytes
        self._transfers = _Transfers()
        self._last: weakref.ref[_LayerTensors] | None = None

    def wrap(self, layer: nn.Module, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The `forward` of a layer, with what it saves moved.

        Weights and buffers stay, and so do its arguments from the second on: they are the same tensors for all layers.
        """

        def offloaded(*args: Any, **kwargs: Any) -> Any:
            if not (layer.training and torch.is_grad_enabled()):
                return forward(*args, **kwargs)
            arguments = [each for each in pytree.tree_leaves((args[1:], kwargs)) if isinstance(each, Tensor)]
            staying = {_address(tensor) for tensor in [*layer.parameters(), *layer.buffers(), *arguments]}
            tensors = self._begin_layer()
            with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, tensors, staying), _unpack):
                return forward(*args, **kwargs)

        return offloaded

    def _begin_layer(self) -> _LayerTensors:
        """Of three layers in a row, the first one's tensors leave the device before the third one is computed."""
        previous = self._last() if self._last is not None else None
        if previous is not None and (first := previous.before()) is not None:
            first.leave_device()
        tensors = _LayerTensors(self._transfers, previous)
        self._last = weakref.ref(tensors)
        return tensors

    def _pack(self, tensors: _LayerTensors, staying: set[int], tensor: Tensor) -> Tensor | tuple[_LayerTensors, int]:
        if tensor.nbytes < self._smallest_bytes or _address(tensor) in staying or not _fills_its_memory(tensor):
            return tensor
        return tensors, tensors.add(tensor.detach())


def _unpack(packed: Tensor | tuple[_LayerTensors, int]) -> Tensor:
    if isinstance(packed, Tensor):
        return packed
    tensors, index = packed
    return tensors.get(index)


@dataclass(frozen=True)
class _Moved:
    """A tensor's layout, and the bytes of host memory that hold its content."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    host: Tensor

    def on_host(self) -> Tensor:
        return self.host.view(self.dtype).as_strided(self.size, self.stride)

    def empty(self) -> Tensor:
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


class _LayerTensors:
    """What one layer has saved in one forward pass. The autograd graph owns it.

    Args:
        transfers: copies tensors.
        previous: of the layer before this one.
    """

    def __init__(self, transfers: _Transfers, previous: _LayerTensors | None) -> None:
        self._transfers = transfers
        self._before = weakref.ref(previous) if previous is not None else None
        self._moved = list[_Moved]()
        self._on_device: list[Tensor] | None = []
        self._is_done: Any = None

    def before(self) -> _LayerTensors | None:
        """Of the layer before this one, unless its backward pass is over."""
        return self._before() if self._before is not None else None

    def add(self, tensor: Tensor) -> int:
        """Begin to move a tensor to the host; returns its index."""
        assert self._on_device is not None, "the layer is still being computed"
        moved, self._is_done = self._transfers.to_host(tensor)
        self._moved.append(moved)
        self._on_device.append(tensor)
        return len(self._moved) - 1

    def leave_device(self) -> None:
        """Free the device's copy, once the host has it: later kernels wait for that."""
        if self._moved:
            self._transfers.wait(self._is_done)
            self._on_device = None

    def get(self, index: int) -> Tensor:
        """A tensor on the device again; begins to fetch those of the layer before this one."""
        self.fetch()
        self._transfers.wait(self._is_done)
        before = self.before()
        if before is not None:
            before.fetch()
        assert self._on_device is not None, "fetched above"
        return self._on_device[index]

    def fetch(self) -> None:
        """Begin to move all tensors to the device, unless they still are there. Gives the host memory back."""
        if self._on_device is None:
            self._on_device, self._is_done = self._transfers.to_device(self._moved)
        for moved in self._moved:
            self._transfers.give_back(moved.host, self._is_done)
        self._moved.clear()


class _Transfers:
    """Copies between device and host, one stream for each direction, and the host memory for them.

    Host memory is reused for tensors of the same size. Pages are locked once, which takes as long as many copies.
    """

    def __init__(self) -> None:
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._free = defaultdict[int, list[tuple[Tensor, Any]]](list)

    def to_host(self, tensor: Tensor) -> tuple[_Moved, Any]:
        """Begin to copy a tensor; returns the copy, and an event after it (None on a CPU)."""
        host, last_use = self._take(tensor.nbytes, is_locked=tensor.is_cuda)
        moved = _Moved(tuple(tensor.size()), tensor.stride(), tensor.dtype, tensor.device, host)
        if not tensor.is_cuda:
            moved.on_host().copy_(tensor)
            return moved, None
        outward, _ = self._both_streams()
        outward.wait_stream(torch.cuda.current_stream())
        if last_use is not None:
            outward.wait_event(last_use)
        with torch.cuda.stream(outward):
            moved.on_host().copy_(tensor, non_blocking=True)
        return moved, outward.record_event()

    def to_device(self, moved: list[_Moved]) -> tuple[list[Tensor], Any]:
        """Begin to copy tensors; returns them, and an event after all copies (None on a CPU).

        Their memory comes from the stream that computes. It is free for other tensors of that stream afterwards.
        """
        tensors = [each.empty() for each in moved]
        if not any(tensor.is_cuda for tensor in tensors):
            for each, tensor in zip(moved, tensors, strict=True):
                tensor.copy_(each.on_host())
            return tensors, None
        _, inward = self._both_streams()
        inward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(inward):
            for each, tensor in zip(moved, tensors, strict=True):
                tensor.copy_(each.on_host(), non_blocking=True)
        return tensors, inward.record_event()

    def give_back(self, host: Tensor, last_use: Any) -> None:
        """Host memory that may be written to again after an event."""
        self._free[host.numel()].append((host, last_use))

    def wait(self, event: Any) -> None:
        """Let the stream that computes wait for an event."""
        if event is not None:
            torch.cuda.current_stream().wait_event(event)

    def _take(self, size_bytes: int, *, is_locked: bool) -> tuple[Tensor, Any]:
        if self._free[size_bytes]:
            return self._free[size_bytes].pop()
        host = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
        if is_locked:
            lock_pages(host)
        return host, None

    def _both_streams(self) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
        if self._streams is None:
            new_stream: Any = torch.cuda.Stream
            self._streams = new_stream(), new_stream()
        return self._streams


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _fills_its_memory(tensor: Tensor) -> bool:
    """Whether a tensor owns all of its memory: then a copy can replace it."""
    return tensor.untyped_storage().nbytes() == tensor.nbytes
