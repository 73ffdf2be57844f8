"""Streams pieces of optimizer states from host memory through the device, which updates them.

    stream    piece 1        piece 2        piece 3
    --------  -------------  -------------  -------------
    inward    host>device    host>device    host>device
    compute                  update         update         update
    outward                                 device>host    device>host    device>host

A PCIe bus carries both directions at once, so a step takes about as long as one copy of all states. The kernels are
those of states in device memory: a step changes the same bits. ZeRO-Offload (Ren et al. 2021, section 4) instead copies
gradients to the host, where the processor does the step: fewer bytes, but the processor is slower than the bus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from spotune.plan.memory import STREAM_ELEMENT_BYTES, STREAM_ELEMENTS, STREAM_SLOTS
from spotune_trainer.checkpoint.snapshot import lock_pages

_ALIGNMENT = 512
"""Bytes: kernels read aligned tensors with wide loads."""
_PAGE_BYTES = 4096


class StateStream:
    """Copies pieces of states to the device and back, in a few buffers that take turns.

    Args:
        device: computes. On a CPU the copies are within its memory.
        piece_elements: most elements of a piece, a multiple of the block of 8-bit moments.

    Attributes:
        device: as given.
        piece_elements: as given.
    """

    def __init__(self, device: torch.device, piece_elements: int = STREAM_ELEMENTS) -> None:
        self.device, self.piece_elements = device, piece_elements
        self._locked = list[Tensor]()
        self._slots = list[_Slot]()
        self._next = 0
        self._streams: tuple[Any, Any] | None = None
        if device.type == "cuda":
            new_stream: Any = torch.cuda.Stream
            self._streams = new_stream(device), new_stream(device)

    @contextmanager
    def step(self) -> Iterator[None]:
        """Within it, pieces can be updated. The device memory for them is freed afterwards."""
        size_bytes = self.piece_elements * STREAM_ELEMENT_BYTES + 8 * _ALIGNMENT
        memory = [torch.empty(size_bytes, dtype=torch.uint8, device=self.device) for _ in range(STREAM_SLOTS)]
        self._slots, self._next = [_Slot(each) for each in memory], 0
        if self._streams is not None:
            inward, _ = self._streams
            inward.wait_stream(torch.cuda.current_stream())
        try:
            yield
        finally:
            self._slots = []
            if self._streams is not None:
                torch.cuda.current_stream().wait_stream(self._streams[1])

    @contextmanager
    def on_device(self, states: Sequence[Tensor]) -> Iterator[list[Tensor]]:
        """Within it, copies of the tensors on the device, which the caller updates; copied back afterwards.

        Args:
            states: contiguous, of at most `piece_elements` elements. Those on the device already are yielded
                themselves.
        """
        slot = self._slots[self._next]
        self._next = (self._next + 1) % len(self._slots)
        copies = slot.like(states)
        moved = [pair for pair in zip(states, copies, strict=True) if pair[0] is not pair[1]]
        if self._streams is None:
            _copy([(copy, state) for state, copy in moved])
            yield copies
            _copy(moved)
            return
        inward, outward = self._streams
        if slot.is_free is not None:
            inward.wait_event(slot.is_free)
        with torch.cuda.stream(inward):
            _copy([(copy, state) for state, copy in moved])
        torch.cuda.current_stream().wait_stream(inward)
        yield copies
        outward.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(outward):
            _copy(moved)
        slot.is_free = outward.record_event()

    def wait(self) -> None:
        """Let the host wait until it has all updated states."""
        if self._streams is not None:
            torch.cuda.current_stream().synchronize()  # it has waited for the copies at the end of the step

    def empty(self, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Host memory for states, one-dimensional; page-locked if the device is a GPU."""
        size_bytes = elements * dtype.itemsize
        # On pages of its own: a page that two tensors share cannot be locked twice.
        memory = torch.empty(size_bytes + 2 * _PAGE_BYTES, dtype=torch.uint8, device="cpu")
        start = -memory.data_ptr() % _PAGE_BYTES
        memory = memory[start : start + size_bytes]
        if self._streams is not None:
            lock_pages(memory)
            self._locked.append(memory)
        return memory.view(dtype)

    def zeros_like(self, state: Tensor) -> Tensor:
        """Host memory for a state of the size and type of another one, filled with zeros."""
        return self.empty(state.numel(), state.dtype).zero_()


def stream_of(optimizer: torch.optim.Optimizer) -> StateStream | None:
    """The stream of an optimizer whose states are in host memory; None for any other."""
    return getattr(optimizer, "state_stream", None)


class _Slot:
    """Device memory for one piece.

    Attributes:
        is_free: event after which it may be written to again.
    """

    def __init__(self, memory: Tensor) -> None:
        self._memory = memory
        self.is_free: Any = None

    def like(self, states: Sequence[Tensor]) -> list[Tensor]:
        """The states; for those in host memory, tensors of the same types and shapes within the slot."""
        copies, start = list[Tensor](), 0
        for state in states:
            if state.is_cuda:
                copies.append(state)
                continue
            copies.append(self._memory[start : start + state.nbytes].view(state.dtype).view(state.shape))
            start += -(-state.nbytes // _ALIGNMENT) * _ALIGNMENT
        return copies


def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for target, source in pairs:
        target.copy_(source, non_blocking=True)
