"""The check of a node, in a process of its own: a GPU with a fault may break the CUDA context of whoever uses it.

Memory. Patterns fill the free memory in chunks, each with a value of its own, so that a wrong address line shows as
well as a stuck bit; then each chunk is compared, inverted, and compared again. A limit of time holds.

Arithmetic. Two matrices of small integers are multiplied twice. All partial sums are integers below 2^24, so they are
exact in fp32 in any order, and the product is the exact one rounded once. Both runs must give the same bits, and some
of its rows those of the exact product, which the processor computes.

Speed. The same product is repeated for a fraction of a second, under which the driver's slowdowns show, too.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, Final

from spotune.errors import InfrastructureError
from spotune_trainer.worker_group.fitness.measurements import DeviceMeasurement, NodeMeasurement
from spotune_trainer.worker_group.fitness.nvidia_smi import GpuState, gpu_states

if TYPE_CHECKING:
    from torch import Tensor

_START_SECONDS: Final = 300.0
"""For the first process on a node, which waits for the imports of the fork server."""
_LIMIT_SECONDS: Final = 60.0
"""A GPU that has not been checked within this time hangs."""
_FREE_SHARE: Final = 0.9
"""Of the free memory, since the matrices and the libraries need some."""
_REFERENCE_ROWS: Final = 32
_PATTERN: Final = 0x5A5A_5A5A_5A5A_5A5A
_SPREAD: Final = 0x9E37_79B9_7F4A_7C15
"""Makes different numbers of the chunks differ in many bits (the multiplier of Fibonacci hashing)."""


@dataclass(frozen=True)
class Extent:
    """How much is checked.

    Attributes:
        memory_bytes: limit of the memory that is filled.
        memory_seconds: limit of the time for it.
        chunk_bytes: of the memory with one pattern.
        matrix: rows and columns of the matrices.
        speed_seconds: how long the product is repeated.
    """

    memory_bytes: int
    memory_seconds: float
    chunk_bytes: int
    matrix: int
    speed_seconds: float


OF_GPU: Final = Extent(1 << 40, 2.0, 1 << 28, 4096, 0.5)
OF_CPU: Final = Extent(64 << 20, 0.1, 8 << 20, 256, 0.02)
"""A worker without GPUs is a pod with some processors of a node that other pods use, too."""


def measure_in_process(context: Any, gpus: bool, extent: Extent | None = None) -> NodeMeasurement:
    """Check this node in a process forked from the fork server.

    Args:
        context: of multiprocessing, with the fork server.
        gpus: whether its ranks train on GPUs.
        extent: of the check; None: that of the devices.
    """
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure_and_send, args=(sender, gpus, extent))
    process.start()
    sender.close()
    try:
        if not receiver.poll(_START_SECONDS):
            raise InfrastructureError(f"no process could be started on the node within {_START_SECONDS:.0f} s")
        receiver.recv()
        if not receiver.poll(_LIMIT_SECONDS):
            return NodeMeasurement(problems=(f"its check has not ended within {_LIMIT_SECONDS:.0f} s",))
        measured: NodeMeasurement = receiver.recv()
        return measured
    except EOFError:
        return NodeMeasurement(problems=("the process of its check was killed",) if gpus else ())
    finally:
        process.kill()  # a process that hangs in the driver does not end by itself
        process.join(1.0)


def _measure_and_send(sender: Connection, gpus: bool, extent: Extent | None) -> None:
    sender.send(None)
    sender.send(measure(gpus, extent))
    os._exit(0)  # at once: the CUDA context may be broken


def measure(gpus: bool, extent: Extent | None = None) -> NodeMeasurement:
    """Check the devices of this node in this process; as `measure_in_process`."""
    import torch

    started = time.monotonic()
    if not gpus:
        devices = [check_device(torch.device("cpu"), 0, "cpu", extent or OF_CPU)]
    elif not torch.cuda.is_available():
        return NodeMeasurement(problems=("CUDA finds no GPU that it can use",))
    else:
        count = torch.cuda.device_count()
        with ThreadPoolExecutor(count) as pool:
            devices = list(pool.map(lambda index: _check_gpu(index, extent or OF_GPU), range(count)))
    problems: tuple[str, ...] = ()
    try:
        devices = with_states(devices, gpu_states() or [])
    except InfrastructureError as error:
        problems = (str(error),) if gpus else ()
    return NodeMeasurement(tuple(devices), problems, time.monotonic() - started)


def with_states(devices: list[DeviceMeasurement], states: list[GpuState]) -> list[DeviceMeasurement]:
    """The devices, with what the driver says about them; without CUDA devices, GPUs with faults are added."""
    if not any(device.kind == "cuda" for device in devices):
        found = [DeviceMeasurement(each.index, "cuda", each.name, problems=each.problems) for each in states]
        return [*devices, *(each for each in found if each.problems)]
    of_index = {state.index: state.problems for state in states}
    return [replace(each, problems=each.problems + of_index.get(each.index, ())) for each in devices]


def _check_gpu(index: int, extent: Extent) -> DeviceMeasurement:
    import torch

    torch.cuda.set_device(index)
    return check_device(torch.device("cuda", index), index, torch.cuda.get_device_name(index), extent)


def check_device(device: Any, index: int, name: str, extent: Extent) -> DeviceMeasurement:
    """Check one device; an error of its driver is a problem as well."""
    measured = DeviceMeasurement(index, device.type, name)
    try:
        checked, problems = check_memory(device, extent)
        tflops, of_products = check_products(device, extent)
        return replace(measured, checked_bytes=checked, tflops=tflops, problems=(*problems, *of_products))
    except RuntimeError as error:  # such as: CUDA error: uncorrectable ECC error encountered
        return replace(measured, problems=(str(error).strip().splitlines()[0],))


def check_memory(
    device: Any, extent: Extent, corrupt: Callable[[list[Tensor]], None] = lambda _: None
) -> tuple[int, list[str]]:
    """Fill free memory with patterns, and read them back.

    Args:
        device: to check.
        extent: of the check.
        corrupt: changes the chunks after they were written, for tests.

    Returns:
        The number of bytes that were checked, and what is wrong.
    """
    import torch

    limit = extent.memory_bytes
    if device.type == "cuda":
        limit = min(limit, int(torch.cuda.mem_get_info(device)[0] * _FREE_SHARE))
    chunks: list[Tensor] = []
    deadline = time.monotonic() + extent.memory_seconds / 3  # filling, and reading back twice
    while (len(chunks) + 1) * extent.chunk_bytes <= limit and (not chunks or time.monotonic() < deadline):
        try:
            chunks.append(torch.empty(extent.chunk_bytes // 8, dtype=torch.int64, device=device))
        except torch.OutOfMemoryError:
            break
        chunks[-1].fill_(_pattern(len(chunks) - 1))
        _synchronize(device)
    corrupt(chunks)
    wrong = 0
    for inverted in (False, True):
        for number, chunk in enumerate(chunks):
            expected = ~_pattern(number) if inverted else _pattern(number)
            wrong += int((chunk != expected).sum())
            chunk.bitwise_not_()
    problems = [f"{wrong} words of its memory do not keep what is written to them"] if wrong else []
    return len(chunks) * extent.chunk_bytes, problems


def _pattern(number: int) -> int:
    """A signed word of 64 bits for a chunk."""
    word = (_PATTERN ^ (number * _SPREAD)) & (2**64 - 1)
    return word - 2**64 if word >= 2**63 else word


def check_products(
    device: Any, extent: Extent, corrupt: Callable[[Tensor], None] = lambda _: None
) -> tuple[float, list[str]]:
    """Multiply matrices, and compare; returns TFLOP/s and what is wrong. `corrupt` changes a product, for tests."""
    import torch

    size = extent.matrix
    dtype = torch.float32
    if device.type == "cuda":
        dtype = torch.bfloat16 if torch.cuda.get_device_capability(device)[0] >= 8 else torch.float16
        # Sums in half precision are not exact.
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction = False
    generator = torch.Generator().manual_seed(size)
    left, right = (torch.randint(-2, 3, (size, size), generator=generator).to(dtype) for _ in range(2))
    a, b = left.to(device), right.to(device)
    first = a @ b
    corrupt(first)
    second = a @ b
    problems = []
    if not torch.equal(first, second):
        problems.append("the same matrix product gives different bits")
    rows = torch.randperm(size, generator=generator)[:_REFERENCE_ROWS]
    exact = (left[rows].double() @ right.double()).to(dtype)
    if not torch.equal(first[rows.to(device)].cpu(), exact):
        problems.append("a matrix product is wrong")
    return _tflops(device, lambda: torch.mm(a, b, out=second), size, extent.speed_seconds), problems


def _tflops(device: Any, multiply: Callable[[], object], size: int, seconds: float) -> float:
    """TFLOP/s of a product of square matrices, repeated for some time. Times of a batch include its launches."""
    _synchronize(device)
    products, started = 0, time.perf_counter()
    while products == 0 or time.perf_counter() - started < seconds:
        for _ in range(8):
            multiply()
        _synchronize(device)
        products += 8
    return 2.0 * size**3 * products / (time.perf_counter() - started) / 1e12


def _synchronize(device: Any) -> None:
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
