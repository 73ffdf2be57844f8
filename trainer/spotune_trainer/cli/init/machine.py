"""The devices to plan for: those of this machine, or those that the options describe."""

from __future__ import annotations

from spotune.cli.plan import DEFAULT_DEVICE
from spotune.errors import UsageError
from spotune.plan.devices import device_memory_bytes, machine_memory_bytes, parse_bytes
from spotune_trainer.cli.init.profiles import MachineProfile

_BEFORE_AMPERE = ("t4", "v100-16gb", "v100-32gb")
"""GPUs without bfloat16 (compute capability below 8.0)."""
_BFLOAT16_CAPABILITY = (8, 0)


def find_machine(gpus: int | None, device: str, device_memory: str) -> MachineProfile:
    """The workers to plan for.

    Args:
        gpus: Number of GPUs; 0: a worker on the CPU; None: the GPUs of this machine, or else its CPU.
        device: Name of the GPU, as `spotune plan` takes it; empty: this machine's.
        device_memory: Memory of one worker; empty: the device's.

    Raises:
        UsageError: The options contradict each other, or name an unknown device.
    """
    import torch

    if device and device_memory:
        raise UsageError("--device and --device-memory: set only one of them.")
    local = torch.cuda.device_count()
    count = local if gpus is None else gpus
    if device and not count:
        raise UsageError(f"--device {device}: give the number of GPUs, too: --gpus 1")
    if device:
        bfloat16 = device.lower() not in _BEFORE_AMPERE
        return MachineProfile(count, device_memory_bytes(device), device, bfloat16, f" --device {device}")
    if device_memory:
        size = parse_bytes(device_memory, "--device-memory")
        return MachineProfile(count, size, f"{device_memory} each", plan_options=f" --device-memory {device_memory}")
    if not count:
        return MachineProfile(0, machine_memory_bytes(), "this machine's CPU and memory")
    if local:
        devices = [torch.cuda.get_device_properties(number) for number in range(local)]
        least = min(devices, key=lambda properties: properties.total_memory)
        bfloat16 = all((each.major, each.minor) >= _BFLOAT16_CAPABILITY for each in devices)
        options = f" --device-memory {least.total_memory}"
        return MachineProfile(count, least.total_memory, f"{least.name}, as in this machine", bfloat16, options)
    return MachineProfile(count, device_memory_bytes(DEFAULT_DEVICE), f"{DEFAULT_DEVICE}, assumed (--device)")
