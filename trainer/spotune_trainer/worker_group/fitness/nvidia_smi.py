"""What `nvidia-smi` says about the GPUs of this node: errors of their memory, and whether the hardware slows them down.

The program comes with NVIDIA's driver and is mounted into pods that have GPUs. It reads the counters of NVML, which
need no rights. Where there is no such program, nothing is known, and nothing is wrong.
"""

from __future__ import annotations

import csv
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from spotune.errors import InfrastructureError

PROGRAM: Final = "nvidia-smi"
LIMIT_SECONDS: Final = 15.0
"""It may have to load the driver, which takes seconds."""
_IDENTITY: Final = ("index", "name")
_ERRORS: Final = {
    "ecc.errors.uncorrected.volatile.total": "{} uncorrected ECC errors since the driver was loaded",
    "retired_pages.pending": "memory pages are to be retired: reset the GPU, or reboot the node",
    "remapped_rows.pending": "memory rows are to be remapped: reset the GPU, or reboot the node",
    "remapped_rows.failure": "memory rows could not be remapped: the GPU has to be replaced",
}
"""What is wrong if a field is not zero, by the field."""
_SLOWDOWNS: Final = {
    "hw_thermal_slowdown": "it is too hot, and its hardware slows it down",
    "hw_power_brake_slowdown": "its power supply makes its hardware slow it down",
    "hw_slowdown": "its hardware slows it down",
}
"""What is wrong if a reason is active; the last one includes the others."""
_PREFIXES: Final = ("clocks_event_reasons", "clocks_throttle_reasons")
"""Of the reasons: of newer drivers (from 535), and of older ones."""
_GOOD: Final = frozenset({"0", "no", "not active"})


@dataclass(frozen=True)
class GpuState:
    """A GPU as the driver sees it.

    Attributes:
        index: on this node.
        name: its type.
        problems: what is wrong with it.
    """

    index: int
    name: str
    problems: tuple[str, ...]


def _run(command: Sequence[str]) -> tuple[int, str]:
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_SECONDS, check=False)
    return done.returncode, done.stdout if done.returncode == 0 else done.stdout + done.stderr


def gpu_states(run: Callable[[Sequence[str]], tuple[int, str]] = _run) -> list[GpuState] | None:
    """The GPUs that this process may use; None if the program does not exist.

    Args:
        run: runs a command; returns its exit status and its output.

    Raises:
        InfrastructureError: the driver does not answer, or has lost a GPU.
    """
    output = ""
    for prefix in _PREFIXES:
        reasons = [f"{prefix}.{reason}" for reason in _SLOWDOWNS]
        query = ",".join([*_IDENTITY, *_ERRORS, *reasons])
        try:
            status, output = run([PROGRAM, f"--query-gpu={query}", "--format=csv,noheader,nounits"])
        except (FileNotFoundError, PermissionError):
            return None
        except subprocess.TimeoutExpired as error:
            raise InfrastructureError(f"{PROGRAM} has not answered for {LIMIT_SECONDS:.0f} s") from error
        if status == 0:
            return [_state(row) for row in csv.reader(output.splitlines(), skipinitialspace=True) if row]
        if "not a valid field" not in output:
            break
    lines = output.strip().splitlines() or ["no output"]
    raise InfrastructureError(f"{PROGRAM} failed: {lines[-1]}")


def _state(row: Sequence[str]) -> GpuState:
    index, name, *values = row
    errors, reasons = values[: len(_ERRORS)], values[len(_ERRORS) :]
    problems = [text.format(value) for text, value in zip(_ERRORS.values(), errors, strict=True) if _is_bad(value)]
    active = [text for text, value in zip(_SLOWDOWNS.values(), reasons, strict=True) if _is_bad(value)]
    return GpuState(int(index), name, (*problems, *active[:1]))


def _is_bad(value: str) -> bool:
    """Whether a field reports a fault. A GPU without the feature answers [N/A] or [Not Supported]."""
    text = value.strip().lower()
    return text not in _GOOD and not text.startswith(("[", "n/a"))
