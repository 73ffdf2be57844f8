"""Peaks of the plan are those of the trainer's MFU."""

import pytest

from spotune.plan.devices import DEVICE_MEMORY_BYTES
from spotune.plan.speed.gpus import gpu_speed
from spotune_trainer.models.flops import peak_flops

# As torch.cuda.get_device_name() has it.
NAMES = {
    "t4": "Tesla T4",
    "v100-16gb": "Tesla V100-SXM2-16GB",
    "v100-32gb": "Tesla V100-SXM2-32GB",
    "a10g": "NVIDIA A10G",
    "l4": "NVIDIA L4",
    "rtx4090": "NVIDIA GeForce RTX 4090",
    "a100-40gb": "NVIDIA A100-SXM4-40GB",
    "l40s": "NVIDIA L40S",
    "a100-80gb": "NVIDIA A100-SXM4-80GB",
    "h100-80gb": "NVIDIA H100 80GB HBM3",
    "h200": "NVIDIA H200",
    "b200": "NVIDIA B200",
}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("name", DEVICE_MEMORY_BYTES)
def test_peak_is_that_of_the_trainer(name: str, dtype: str) -> None:
    speed = gpu_speed(name, dtype)
    assert (speed.peak_flops if speed else None) == peak_flops(NAMES[name], dtype)


def test_a_newer_gpu_of_a_family_has_no_less_bandwidth() -> None:
    h100, h200 = gpu_speed("h100-80gb", "bfloat16"), gpu_speed("H200", "bfloat16")
    assert h100 is not None
    assert h200 is not None
    assert h100.memory_bytes_per_second < h200.memory_bytes_per_second
