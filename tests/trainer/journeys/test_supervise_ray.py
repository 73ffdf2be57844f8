"""The supervisor over a real Ray head: killed parts restart, a hung driver is stopped, and nothing is left running."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.ray_head.local import LocalRay, RunningRay, process_marker, ray_folder
from spotune_trainer.supervisor.ray_head.processes import ProcessFamily, boot_id
from tests import ROOT
from tests.trainer.support.supervised import SLOTS
from tests.trainer.support.waiting import wait_until

pytestmark = pytest.mark.ray

_PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def shared_ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file with the record of a running Ray head."""
    folder = tmp_path_factory.mktemp("ray")
    ray = LocalRay(folder, SLOTS, gpus=False)
    ray.start()
    record = folder / "record.json"
    files.write_json(record, ray.record())
    try:
        yield record
    finally:
        ray.shut_down()


@pytest.fixture
def job(tmp_path: Path) -> JobDirectory:
    """A job whose driver makes steps until there is a notice to stop."""
    (tmp_path / "logs").mkdir()
    behave(JobDirectory(tmp_path), steps=100_000)
    return JobDirectory(tmp_path)


def behave(job: JobDirectory, **behaviour: Any) -> None:
    files.write_json(job.root / "behaviour.json", behaviour)


@contextmanager
def supervisor(job: JobDirectory, ray: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A supervisor in its own process, with all of its output on the pipe."""
    command = [sys.executable, "-m", "tests.trainer.support.supervised", str(job.root), *([str(ray)] if ray else [])]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def status(job: JobDirectory) -> dict[str, Any]:
    return files.read_json(job.status) or {"attempt": 0, "step": 0}


def until(condition: Callable[[], object]) -> None:
    assert wait_until(lambda: bool(condition()), _PATIENCE_SECONDS), "it did not happen"


def stop(process: subprocess.Popen[str]) -> str:
    """Send SIGINT (Ctrl-C); returns the output."""
    process.send_signal(signal.SIGINT)
    said, _ = process.communicate(timeout=_PATIENCE_SECONDS)
    return said


def failures(job: JobDirectory) -> list[str]:
    return [record["cause"] for record in Ledger(job).records("failure")]


def attempts(job: JobDirectory) -> list[tuple[int, int | None]]:
    return [(record["attempt"], record["exitCode"]) for record in Ledger(job).records("attempt-ended")]


def shared_memory(job: JobDirectory) -> set[Path]:
    """Files in /dev/shm that processes of the job have mapped now; other tests on this machine have their own."""
    found = set()
    for member in family(job).members():
        with suppress(OSError):  # it has exited since
            lines = Path(f"/proc/{member.pid}/maps").read_text().splitlines()
            found |= {Path(line.split()[5]) for line in lines if "/dev/shm/" in line}
    return found


def family(job: JobDirectory) -> ProcessFamily:
    return ProcessFamily(None, boot_id(), process_marker(job.root))


def test_killed_driver_is_resubmitted(job: JobDirectory, shared_ray: Path) -> None:
    with supervisor(job, shared_ray) as process:
        until(lambda: status(job)["attempt"] == 1)
        os.kill(status(job)["pid"], signal.SIGKILL)
        until(lambda: status(job)["attempt"] == 2)
        said = stop(process)

    assert process.returncode == 10
    assert failures(job) == ["headLost"]
    assert "the driver was killed" in said


def test_supervisor_after_a_killed_one_continues_its_attempt(job: JobDirectory, shared_ray: Path) -> None:
    with supervisor(job, shared_ray) as process:
        until(lambda: status(job)["attempt"] == 1)
        process.kill()
        process.wait()
    driver = status(job)["pid"]

    with supervisor(job, shared_ray) as process:
        earlier = process.pid
        until(lambda: (files.read_json(job.supervisor) or {}).get("pid") == earlier)
        step = status(job)["step"]
        until(lambda: status(job)["step"] > step)
        assert status(job)["pid"] == driver
        said = stop(process)

    assert "continuing with attempt 1" in said
    assert attempts(job) == [(1, 10)]


def test_ctrl_c_lets_the_driver_commit_and_leave(job: JobDirectory, shared_ray: Path) -> None:
    with supervisor(job, shared_ray) as process:
        until(lambda: status(job)["attempt"] == 1)
        said = stop(process)

    assert process.returncode == 10
    assert attempts(job) == [(1, 10)]
    assert Ledger(job).records("notice")
    assert "stopped on request" in said
    assert not job.supervisor.exists()


def test_hanging_driver_is_stopped_for_its_stale_heartbeat(job: JobDirectory, shared_ray: Path) -> None:
    behave(job, steps=5, hang_in=[1], hang_timeout="6s")
    with supervisor(job, shared_ray) as process:
        until(lambda: failures(job))
        behave(job, steps=5)  # on a slow machine the next driver may be late with its first beat
        said, _ = process.communicate(timeout=_PATIENCE_SECONDS)

    assert process.returncode == 0
    assert set(failures(job)) == {"hang"}
    assert "no heartbeat for" in said


def test_job_error_ends_the_supervisor_with_its_message(job: JobDirectory, shared_ray: Path) -> None:
    behave(job, steps=5, fail_in=[1], exit_code=20, message="column input is not in the data")
    with supervisor(job, shared_ray) as process:
        said, _ = process.communicate(timeout=_PATIENCE_SECONDS)

    assert process.returncode == 20
    assert "column input is not in the data" in said
    assert attempts(job) == [(1, 20)]


def test_second_run_on_a_directory_names_the_first(job: JobDirectory, shared_ray: Path) -> None:
    with supervisor(job, shared_ray) as first:
        until(lambda: status(job)["attempt"] == 1)
        with supervisor(job, shared_ray) as second:
            said, _ = second.communicate(timeout=_PATIENCE_SECONDS)
        stop(first)

    assert second.returncode == 2
    assert f"process {first.pid}" in said
    assert attempts(job) == [(1, 10)]


def test_progress_is_served_where_supervisor_json_says(job: JobDirectory, shared_ray: Path) -> None:
    with supervisor(job, shared_ray) as process:
        until(lambda: status(job)["attempt"] == 1)
        url = files.read_json(job.supervisor)["url"]  # type: ignore[index]
        with urlopen(f"{url}/progress") as answer:
            progress = json.load(answer)
        stop(process)

    assert progress["attempt"] == 1


@pytest.fixture
def nothing_left_running(job: JobDirectory) -> Iterator[None]:
    """Kill everything after the test, whatever its result."""
    yield
    family(job).kill()
    shutil.rmtree(ray_folder(job.root), ignore_errors=True)


@pytest.mark.usefixtures("nothing_left_running")
def test_run_recovers_after_everything_was_killed_and_leaves_nothing(job: JobDirectory) -> None:
    behave(job, steps=100_000, connect=True)
    with supervisor(job) as process:
        until(lambda: status(job)["attempt"] == 1)
        assert status(job)["message"] == f"{SLOTS} slots"
        ray = RunningRay.from_json(files.read_json(job.supervisor)["ray"])  # type: ignore[index]
        mapped = shared_memory(job)
        process.kill()
        process.wait()
        os.kill(ray.parts["raylet"].pid, signal.SIGKILL)
        with suppress(ProcessLookupError):  # it may have ended with its raylet
            os.kill(status(job)["pid"], signal.SIGKILL)

    with supervisor(job) as process:
        until(lambda: status(job)["attempt"] == 2)
        assert not ray.parts["gcs"].is_alive()
        mapped |= shared_memory(job)
        stop(process)

    assert process.returncode == 10
    assert attempts(job) == [(1, None), (2, 10)]
    assert family(job).members() == []
    assert not ray_folder(job.root).exists()
    assert mapped
    assert [path for path in mapped if path.exists()] == []
