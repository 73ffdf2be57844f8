"""Peak operations and memory bandwidth of the GPUs that `spotune plan` knows."""

from __future__ import annotations

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


# NVIDIA's data sheets; float32 without TF32, as is torch's default. The peaks are those of the trainer's MFU.
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


def gpu_speed(name: str, dtype: str) -> GpuSpeed | None:
    """The speed of a GPU of `spotune.plan.devices` in `model.dtype`; None if its peak is not known."""
    sheet = _DATA_SHEETS.get(name.lower())
    peak = getattr(sheet, dtype) if sheet else None
    return GpuSpeed(peak, sheet.bandwidth) if sheet and peak else None
