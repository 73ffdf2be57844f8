"""A copy of a rank's fragments in host memory, taken while the device goes on computing.

The state that a checkpoint holds is changed by optimizer steps alone. On a GPU with room to spare it is first copied
within the device, which takes milliseconds; the next step may then change it. The way to the host is taken beside the
next steps, by whoever asks for the copy. Without that room ``protect`` keeps the optimizer waiting for the end of it.

Copies between device and host overlap with kernels only from page-locked memory (CUDA C++ Programming Guide,
"Asynchronous Concurrent Execution"), so the buffer is registered once and used for all commits. A GPU's engine for
copies to the host works off one after the other: in pieces, so that what the training loop reads from the device (the
loss, the norm of the gradient) does not wait for gigabytes.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spotune_trainer.checkpoint.fragment import STATES, Elements, Fragment, HeldFragment

_SPARE_FRACTION = 0.1
"""Part of a device's memory that stays free of copies: a batch longer than those so far may need more."""
_PIECE_ELEMENTS = 1 << 24
"""64 MiB, some 2 ms on a PCIe 5.0 bus."""


class Snapshot:
    """The host copy of one rank; its memory is taken once and used again and again."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.float32)
        self._copy: list[Fragment] = []
        self._sources: list[Elements] = []
        self._stream: Any = None
        self._are_originals = False
        self._read = threading.Event()

    def reserve(self, fragments: Sequence[HeldFragment]) -> None:
        """Take the memory for these fragments now; the first ``take`` would, while training waits."""
        elements = sum(state.numel() for state in _states(fragments))
        if self._buffer.numel() == elements:
            return
        self._buffer = torch.empty(elements, dtype=torch.float32)
        device = next((state.device for state in _states(fragments)), None)
        if device is not None and device.type == "cuda":
            with torch.cuda.device(device):  # a thread of its own begins with the first device
                _lock_pages(self._buffer)
                self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def take(self, fragments: Sequence[HeldFragment]) -> None:
        """Take the fragments as they are now; before they are changed, ``protect`` has to be called."""
        self.reserve(fragments)
        self._read.clear()
        self._copy = _cut(fragments, self._buffer)
        self._sources = _states(fragments)
        if self._stream is None:
            self._copy_to_host()
            self._release()
            return
        staged = self._room()
        self._are_originals = staged is None
        if staged is not None:
            for place, piece in _pieces(self._sources, staged):
                place.copy_(piece, non_blocking=True)
            self._sources = [staged]
        self._stream.wait_stream(torch.cuda.current_stream())

    def protect(self) -> None:
        """Wait until the fragments themselves are not read any more."""
        if self._are_originals:
            self._read.wait()

    def fragments(self) -> list[Fragment]:
        """The copy, once it is complete; from any thread. Where the copying fails, ``protect`` waits for it no more."""
        if not self._read.is_set():
            try:
                with torch.cuda.stream(self._stream):  # and on its device: a thread begins with the first one
                    self._copy_to_host()
            finally:  # a copy that has failed reads no more than one that is complete
                self._release()
        return self._copy

    def _copy_to_host(self) -> None:
        for place, piece in _pieces(self._sources, self._buffer):
            place.copy_(piece, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()

    def _release(self) -> None:
        """Nothing is read any more: the fragments may change."""
        self._sources = []
        self._are_originals = False
        self._read.set()

    def _room(self) -> Tensor | None:
        """Memory on the device for a copy of everything; None where that would leave little.

        What the allocator keeps for itself has been needed by a step, and will be again.
        """
        free, total = torch.cuda.mem_get_info()
        if free - self._buffer.nbytes < _SPARE_FRACTION * total:
            return None
        return torch.empty(self._buffer.numel(), dtype=torch.float32, device="cuda")


def _states(fragments: Sequence[HeldFragment]) -> list[Elements]:
    """All states of fragments, in the order in which a buffer holds them."""
    return [fragment.states[state] for fragment in fragments for state in STATES]


def _pieces(sources: Iterable[Elements], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Each piece of the sources, after its place within a buffer that holds all their elements."""
    start = 0
    for source in sources:
        for piece in source.split(_PIECE_ELEMENTS):
            yield buffer[start : start + piece.numel()], piece
            start += piece.numel()


def _cut(fragments: Sequence[HeldFragment], buffer: Tensor) -> list[Fragment]:
    """Fragments of the same places within a buffer that holds all their elements."""
    found, start = [], 0
    for fragment in fragments:
        states = {}
        for state in STATES:
            length = fragment.states[state].numel()
            states[state] = buffer[start : start + length]
            start += length
        found.append(Fragment(fragment.parameter, fragment.offset, states))
    return found


def _lock_pages(buffer: Tensor) -> None:
    """Register memory with CUDA as it is: PyTorch's own pinned memory comes in powers of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
    if size:
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 0)))
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)
