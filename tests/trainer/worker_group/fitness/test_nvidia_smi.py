"""What is read from `nvidia-smi`: faults, features that a GPU does not have, and drivers that do not answer."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

import pytest

from spotune.errors import InfrastructureError
from spotune_trainer.worker_group.fitness.nvidia_smi import gpu_states

HEALTHY = "0, NVIDIA H100 80GB HBM3, 0, No, No, No, Not Active, Not Active, Not Active"


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (HEALTHY, ""),
        ("1, Tesla T4, [N/A], [N/A], [N/A], [N/A], [N/A], [N/A], [N/A]", ""),
        ("0, NVIDIA A10G, [Not Supported], N/A, N/A, N/A, Not Active, Not Active, Not Active", ""),
        (HEALTHY.replace("3, 0, No", "3, 7, No"), "7 uncorrected ECC errors"),
        ("0, A100, 0, Yes, No, No, Not Active, Not Active, Not Active", "are to be retired"),
        ("0, A100, 0, No, Yes, No, Not Active, Not Active, Not Active", "are to be remapped"),
        ("0, A100, 0, No, No, 1, Not Active, Not Active, Not Active", "could not be remapped"),
        ("0, A100, 0, No, No, No, Active, Not Active, Active", "it is too hot"),
        ("0, A100, 0, No, No, No, Not Active, Not Active, Active", "its hardware slows it down"),
    ],
)
def test_faults_are_named(line: str, problem: str) -> None:
    (state,) = gpu_states(lambda _: (0, f"{line}\n")) or []
    assert len(state.problems) == bool(problem)
    assert problem in "".join(state.problems)


def test_older_drivers_have_other_names_for_the_reasons() -> None:
    asked = []

    def run(command: Sequence[str]) -> tuple[int, str]:
        asked.append(command[1])
        is_new = "clocks_event_reasons" in command[1]
        message = 'Field "clocks_event_reasons.hw_thermal_slowdown" is not a valid field to query.'
        return (2, message) if is_new else (0, HEALTHY)

    assert [state.problems for state in gpu_states(run) or []] == [()]
    assert "clocks_throttle_reasons.hw_slowdown" in asked[1]


def test_lost_gpu_and_a_silent_driver_are_errors_and_a_missing_program_is_not() -> None:
    lost = "Unable to determine the device handle for GPU0000:3B:00.0: GPU is lost.  Reboot the system to recover"
    with pytest.raises(InfrastructureError, match="GPU is lost"):
        gpu_states(lambda _: (15, lost))

    def hang(command: Sequence[str]) -> tuple[int, str]:
        raise subprocess.TimeoutExpired(list(command), 15.0)

    with pytest.raises(InfrastructureError, match="has not answered"):
        gpu_states(hang)

    def missing(command: Sequence[str]) -> tuple[int, str]:
        raise FileNotFoundError(command[0])

    assert gpu_states(missing) is None
