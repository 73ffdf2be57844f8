"""Peak operations and memory bandwidth of the GPUs that `spotune plan` knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class GpuSpeed:
    """What a GPU can do at most.

    Attributes:
        peak_flops: dense floating-point operations per second, without sparsity, in the job's `model.dtype`.
        memory_bytes_per_second: bandwidth of its memory.
    """

    peak_flops: float
    memory_bytes_per_second: float


@dataclass(frozen=True)
class _DataSheet:
    """Peaks by dtype (None: not supported or not published), in FLOP/s, and bandwidth in bytes per second."""

    bandwidth: float
    float32: float | None = None
    float16: float | None = None
    bfloat16: float | None = None


# NVIDIA's data sheets; float32 without TF32, as is torch's default. With sparsity, H100 and H200 have 1,979
# TFLOP/s of 16 bits, L4 242, and an HGX B200 36 PFLOP/s with 8 GPUs.
_DATA_SHEETS = {
    "t4": _DataSheet(320e9, 8.1e12, 65e12),
    "v100-16gb": _DataSheet(900e9, 15.7e12, 125e12),
    "v100-32gb": _DataSheet(900e9, 15.7e12, 125e12),
    "l4": _DataSheet(300e9, 30.3e12, 121e12, 121e12),
    "l40s": _DataSheet(864e9, 91.6e12, 362.05e12, 362.05e12),
    "a100-40gb": _DataSheet(1555e9, 19.5e12, 312e12, 312e12),
    "a100-80gb": _DataSheet(2039e9, 19.5e12, 312e12, 312e12),
    "h100-80gb": _DataSheet(3350e9, 66.9e12, 989.4e12, 989.4e12),
    "h200": _DataSheet(4800e9, 66.9e12, 989.4e12, 989.4e12),
    "b200": _DataSheet(8000e9, None, 2250e12, 2250e12),
}


def peaks(name: str) -> Mapping[str, float]:
    """Peak dense FLOP/s by dtype of a GPU of `spotune.plan.devices`; none of an unknown one."""
    sheet = _DATA_SHEETS.get(name.lower())
    by_dtype = {dtype: getattr(sheet, dtype, None) for dtype in ("float32", "float16", "bfloat16")}
    return {dtype: peak for dtype, peak in by_dtype.items() if peak}


def gpu_speed(name: str, dtype: str) -> GpuSpeed | None:
    """The speed of a GPU of `spotune.plan.devices` in `model.dtype`; None if its peak is not known."""
    peak = peaks(name).get(dtype)
    return GpuSpeed(peak, _DATA_SHEETS[name.lower()].bandwidth) if peak else None
