"""How a replica with a part of a GPU waits for it. The effect is measured by `benchmarks.serving_replicas`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_DRIVER = """
static int steps[3], count;
int cuInit(unsigned flags) { steps[count++] = 1; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = 7; steps[count++] = 2; return 0; }
int cuDevicePrimaryCtxSetFlags_v2(int device, unsigned flags) {
  return device == 7 && flags == 4 && steps[0] == 1 && steps[1] == 2 ? RESULT : 1;
}
"""


def _report(driver: str) -> str:
    """What a new process returns and logs: a CUDA context belongs to a process."""
    program = (
        "import logging, sys; logging.basicConfig(); "
        "from spotune_serve.engine.gpu_waits import sleep_during_gpu_waits; print(sleep_during_gpu_waits(sys.argv[1]))"
    )
    run = subprocess.run([sys.executable, "-c", program, driver], capture_output=True, text=True, check=True)
    return run.stdout + run.stderr


@pytest.mark.parametrize(("code", "expected"), [(0, "True"), (201, "False")])
def test_the_flag_is_set_for_the_first_device(tmp_path: Path, code: int, expected: str) -> None:
    source, library = tmp_path / "driver.c", tmp_path / "driver.so"
    source.write_text(_DRIVER)
    subprocess.run(["gcc", "-shared", "-fPIC", f"-DRESULT={code}", "-o", library, source], check=True)
    report = _report(str(library))
    assert report.startswith(expected)
    assert (f"'cuDevicePrimaryCtxSetFlags': {code}" in report) == (code != 0)


def test_a_replica_without_a_driver_goes_on(tmp_path: Path) -> None:
    report = _report(str(tmp_path / "libcuda.so.1"))
    assert report.startswith("False")
    assert "spins while it waits for its GPU" in report
