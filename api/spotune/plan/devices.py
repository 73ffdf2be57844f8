"""Memory of a device, by the name of a GPU, from a size on the command line, or of this machine; and its precisions."""

from __future__ import annotations

import difflib
import os
import re
from dataclasses import dataclass
from pathlib import Path

from spotune.errors import UsageError
from spotune.job.execution import Precision

GIB = 1024**3

DEVICE_MEMORY_BYTES = {
    "t4": int(14.56 * GIB),
    "v100-16gb": int(15.77 * GIB),
    "v100-32gb": int(31.73 * GIB),
    "a10g": int(22.06 * GIB),
    "l4": int(22.03 * GIB),
    "rtx4090": int(23.52 * GIB),
    "a100-40gb": int(39.39 * GIB),
    "l40s": int(44.40 * GIB),
    "a100-80gb": int(79.15 * GIB),
    "h100-80gb": int(79.10 * GIB),
    "h200": int(139.72 * GIB),
    "b200": int(178.35 * GIB),
}
"""Memory in bytes as `torch.cuda.get_device_properties` reports it, slightly less than the nominal size."""

Capability = tuple[int, int]
"""CUDA's compute capability of a GPU, as (major, minor)."""

DEVICE_CAPABILITIES: dict[str, Capability] = {
    "t4": (7, 5),
    "v100-16gb": (7, 0),
    "v100-32gb": (7, 0),
    "a10g": (8, 6),
    "l4": (8, 9),
    "rtx4090": (8, 9),
    "a100-40gb": (8, 0),
    "l40s": (8, 9),
    "a100-80gb": (8, 0),
    "h100-80gb": (9, 0),
    "h200": (9, 0),
    "b200": (10, 0),
}
"""Compute capability of each known GPU, from https://developer.nvidia.com/cuda-gpus."""
FP8_CAPABILITIES: dict[Precision, tuple[Capability, str]] = {
    "fp8": ((8, 9), "L4, L40S, H100 or newer"),
    "fp8-rowwise": ((9, 0), "H100 or newer"),
}
"""Lowest compute capability whose tensor cores have a precision's products, and GPUs that have it."""

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)
_MEMINFO = Path("/proc/meminfo")
_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


@dataclass(frozen=True)
class CgroupMemory:
    """Files that show the memory of a control group.

    Attributes:
        limit: bytes that it may use, or a word or a huge number without a limit.
        usage: bytes that it uses, page cache included.
        statistics: bytes by kind.
        cache: the kind of page cache that the kernel gives up first.
    """

    limit: Path
    usage: Path
    statistics: Path
    cache: str

    def free_bytes(self) -> int | None:
        """What is left of the limit; None without a limit."""
        if not self.limit.is_file() or not (limit := self.limit.read_text().strip()).isdigit():
            return None
        kinds = dict(line.split() for line in self.statistics.read_text().splitlines())
        return int(limit) - int(self.usage.read_text()) + int(kinds.get(self.cache, 0))


_V1, _V2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
_CGROUPS = (
    CgroupMemory(_V2 / "memory.max", _V2 / "memory.current", _V2 / "memory.stat", "inactive_file"),
    CgroupMemory(
        _V1 / "memory.limit_in_bytes", _V1 / "memory.usage_in_bytes", _V1 / "memory.stat", "total_inactive_file"
    ),
)


def device_memory_bytes(name: str) -> int:
    """Memory in bytes of the GPU called `name`. Raises UsageError with the known names if it is unknown."""
    memory = DEVICE_MEMORY_BYTES.get(name.lower())
    if memory is None:
        close = difflib.get_close_matches(name.lower(), DEVICE_MEMORY_BYTES, n=1)
        raise UsageError(
            f"--device {name}: unknown device{f', did you mean {close[0]}?' if close else ''}. Known devices: "
            f"{', '.join(DEVICE_MEMORY_BYTES)}. For any other, set its memory, such as --device-memory 80GB."
        )
    return memory


def device_of_gpu_type(gpu_type: str) -> str | None:
    """The known device that a label of a node names, such as ``nvidia-l4`` or ``NVIDIA-A100-SXM4-80GB``.

    Of a type that exists with several sizes of memory, and names none, it is the smallest. None for a type that is not
    known, and for a part of a GPU (MIG).
    """
    parts = re.split(r"[-_ .]+", gpu_type.lower().replace("rtx-4090", "rtx4090"))
    family = next((part for part in parts if any(part == name.partition("-")[0] for name in DEVICE_MEMORY_BYTES)), None)
    sizes = [part for part in parts if re.fullmatch(r"\d+gb", part)]
    if family is None or "mig" in parts:
        return None
    known = [name for name in DEVICE_MEMORY_BYTES if name.partition("-")[0] == family]
    if sizes and len(known) > 1:
        return next((name for name in known if name == f"{family}-{sizes[0]}"), None)
    return min(known, key=DEVICE_MEMORY_BYTES.__getitem__)


def missing_capability(precision: Precision, device: str, capability: Capability) -> str | None:
    """Why a GPU cannot compute in `execution.precision`, and what to do; None if it can."""
    needed, devices = FP8_CAPABILITIES.get(precision, ((0, 0), ""))
    if capability >= needed:
        return None
    has, needs = (".".join(map(str, each)) for each in (capability, needed))
    return (
        f"execution.precision: {precision} needs a GPU of compute capability {needs} or higher, and {device} has "
        f"{has}: use {devices}, or set it to auto."
    )


def parse_bytes(text: str, option: str) -> int:
    """Bytes of a size such as `80GB`, `79.1GiB`, `16Gi` or a bare number of bytes.

    Raises:
        UsageError: the text is not a size; the message names `option`.
    """
    match = _SIZE.fullmatch(text.strip())
    size = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if size < 1:
        raise UsageError(f"{option} {text}: expected a size such as 80GB (10^9 bytes) or 79GiB (2^30 bytes).")
    return size


def machine_memory_bytes(limit_files: tuple[Path, ...] = _CGROUP_LIMITS) -> int:
    """Memory that processes on this machine may use: the physical memory, or the container's limit if that is lower."""
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [int(text) for file in limit_files if file.is_file() and (text := file.read_text().strip()).isdigit()]
    return min([physical, *limits])


def free_memory_bytes(meminfo: Path = _MEMINFO, groups: tuple[CgroupMemory, ...] = _CGROUPS) -> int:
    """Memory that processes on this machine can still get: of the machine, or of the container if that is less."""
    (available,) = (line.split()[1] for line in meminfo.read_text().splitlines() if line.startswith("MemAvailable:"))
    return min([int(available) * 1024, *(free for group in groups if (free := group.free_bytes()) is not None)])
