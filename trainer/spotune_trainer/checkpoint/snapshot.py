"""Staging: copy a rank's fragments to host memory while the device goes on computing.

Only an optimizer step changes the state that a checkpoint holds. There are two ways to stage it from a GPU:

* With memory to spare on the device, ``take`` first makes a device-to-device copy, which takes milliseconds. The next
  optimizer step may then run at once. ``fragments`` copies from there to the host, in the thread that calls it.
* Otherwise the host copy reads the engine's own tensors, and ``wait_for_staging`` blocks the optimizer meanwhile.

Copies between device and host overlap with kernels only if the host memory is page-locked (CUDA C++ Programming
Guide, "Asynchronous Concurrent Execution"). The buffer is registered once and reused for all commits.

A GPU's copy engine works off its queue in order, so the copy goes in chunks. Small reads by the training loop (loss,
gradient norm) then wait for one chunk, not for gigabytes.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from spotune_trainer.checkpoint.fragment import Elements, Fragment, FragmentSource
from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry, file_label
from spotune_trainer.checkpoint.memory.host_buffer import Content, HostBuffer, PrivateBuffer, SharedBuffer
from spotune_trainer.checkpoint.memory.node_memory import RankMemory
from spotune_trainer.checkpoint.writer import file_header, tensor_sizes

_SPARE_FRACTION = 0.1
"""Share of the device's memory that a copy must leave free: a longer batch than any so far may need it."""
_CHUNK_ELEMENTS = 1 << 24
"""64 MiB, about 2 ms on a PCIe 5.0 bus."""
_MADV_POPULATE_WRITE = 23
"""Of `madvise`, in Linux since 5.14: provide all pages now, as if each had been written to."""
_POPULATED_BYTES = 1 << 24
"""Most bytes of one call of `madvise`: it holds a lock of the process that `mmap` in other threads waits for."""
_POPULATE_PAUSE_SECONDS = 0.001
"""Between two such calls, so that a thread that waits for the lock gets it."""


class Snapshot:
    """A host copy of one rank's fragments. Its memory is allocated once and reused.

    Args:
        memory: shared memory that keeps the copy for the next worker group; None: the copy ends with this process.
    """

    def __init__(self, memory: RankMemory | None = None) -> None:
        allocate = self._prepare_for_device
        self._host: HostBuffer = SharedBuffer(memory, allocate) if memory is not None else PrivateBuffer(allocate)
        self._buffer = torch.empty(0, dtype=torch.float32)
        self._copy: list[Fragment] = []
        self._sources: list[Elements] = []
        self._device: torch.device | None = None
        self._stream: Any = None
        self._reads_originals = False
        self._staged = threading.Event()

    def reserve(self, fragments: Sequence[FragmentSource]) -> None:
        """Allocate the host memory of the first snapshot now; otherwise ``take`` does, while training waits."""
        self._device = next((state.device for state in _states(fragments)), None)
        self._host.prepare(_content(fragments))

    def reserve_next(self) -> None:
        """Allocate the host memory of the snapshot after the last one, if that is other memory."""
        self._host.prepare(_content(self._copy))

    def complete(self, name: CheckpointName, entry: FileEntry) -> None:
        """The last snapshot was written to this file of a checkpoint. Shared memory keeps it from now on."""
        self._host.complete(file_label(name, entry))

    def take(self, fragments: Sequence[FragmentSource]) -> None:
        """Take a snapshot of the fragments as they are now. Call ``wait_for_staging`` before they are changed."""
        self._device = next((state.device for state in _states(fragments)), None)
        self._buffer = self._host.begin(_content(fragments))
        self._staged.clear()
        self._copy = _views(fragments, self._buffer)
        self._sources = _states(fragments)
        if self._stream is None:
            self._copy_to_host()
            self._release_sources()
            return
        device_copy = self._allocate_on_device()
        self._reads_originals = device_copy is None
        if device_copy is not None:
            for target, chunk in _chunks(self._sources, device_copy):
                target.copy_(chunk, non_blocking=True)
            self._sources = [device_copy]
        self._stream.wait_stream(torch.cuda.current_stream())

    def wait_for_staging(self) -> None:
        """Wait until the fragments themselves are no longer read and may be changed."""
        if self._reads_originals:
            self._staged.wait()

    def fragments(self) -> list[Fragment]:
        """Complete the host copy and return it; may be called from any thread.

        If copying fails, ``wait_for_staging`` stops blocking and the error is raised here.
        """
        if not self._staged.is_set():
            try:
                with torch.cuda.stream(self._stream):  # sets its device, too: a new thread starts on device 0
                    self._copy_to_host()
            finally:  # a failed copy no longer reads its sources either
                self._release_sources()
        return self._copy

    def _prepare_for_device(self, buffer: Tensor) -> None:
        """Lock the pages of new host memory, if copies come from a GPU."""
        if self._device is not None and self._device.type == "cuda":
            with torch.cuda.device(self._device):  # a new thread starts on device 0
                populate_pages(buffer)
                lock_pages(buffer)
                self._stream = self._stream or torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def _copy_to_host(self) -> None:
        for target, chunk in _chunks(self._sources, self._buffer):
            target.copy_(chunk, non_blocking=True)
            if self._stream is not None:
                self._stream.synchronize()

    def _release_sources(self) -> None:
        self._sources = []
        self._reads_originals = False
        self._staged.set()

    def _allocate_on_device(self) -> Tensor | None:
        """Device memory for a copy of all elements, or None if too little would be left.

        Only memory that is free outside PyTorch's allocator counts: a step has needed what the allocator caches, and
        will need it again.
        """
        free, total = torch.cuda.mem_get_info()
        if free - self._buffer.nbytes < _SPARE_FRACTION * total:
            return None
        return torch.empty(self._buffer.numel(), dtype=torch.float32, device="cuda")


def _states(fragments: Sequence[FragmentSource]) -> list[Elements]:
    """All states of the fragments, in the order of the buffer."""
    return [state for fragment in fragments for state in fragment.states.values()]


def _content(fragments: Sequence[FragmentSource]) -> Content:
    """The file of these fragments."""
    sizes = tensor_sizes(fragments)
    return Content(file_header(sizes), sum(elements for _, elements in sizes))


def _chunks(sources: Iterable[Elements], buffer: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """(slice of the buffer, chunk of a source) for all elements of the sources, laid out one after another."""
    start = 0
    for source in sources:
        for chunk in source.split(_CHUNK_ELEMENTS):
            yield buffer[start : start + chunk.numel()], chunk
            start += chunk.numel()


def _views(fragments: Sequence[FragmentSource], buffer: Tensor) -> list[Fragment]:
    """The same fragments as views into a buffer that holds all their elements."""
    views, start = [], 0
    for fragment in fragments:
        states = {}
        for state, elements in fragment.states.items():
            length = elements.numel()
            states[state] = buffer[start : start + length]
            start += length
        views.append(Fragment(fragment.parameter, fragment.offset, states))
    return views


def populate_pages(buffer: Tensor) -> None:
    """Let Linux provide the pages of new memory, whose content stays as it is. An older Linux does nothing.

    Otherwise `lock_pages` lets it do so, two gigabytes or so per second. Meanwhile CUDA keeps a lock for which training
    waits as soon as it allocates anything.
    """
    address, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
    libc = ctypes.CDLL(None)
    for start in range(address - address % mmap.PAGESIZE, address + size, _POPULATED_BYTES):
        length = min(_POPULATED_BYTES, address + size - start)
        if libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_POPULATE_WRITE) != 0:
            return
        time.sleep(_POPULATE_PAUSE_SECONDS)


def lock_pages(buffer: Tensor) -> None:
    """Register the memory with CUDA in place: PyTorch's own pinned allocations are rounded up to powers of two."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    address, size = buffer.data_ptr(), buffer.numel() * buffer.element_size()
    if size:
        torch.cuda.check_error(int(runtime.cudaHostRegister(address, size, 0)))
        weakref.finalize(buffer, runtime.cudaHostUnregister, address)
