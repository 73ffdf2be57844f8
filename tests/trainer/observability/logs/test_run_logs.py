"""The merged logs of a run: drivers, workers and events of all attempts, both complete and followed."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.logs.line_format import (
    format_timestamp,
    timestamp_of,
)
from spotune_trainer.observability.logs.run_logs import RunLogs, stream
from tests.trainer.support.groups import run_group
from tests.trainer.support.runs import Layout, Runs, make_task, rank_error, start_generation

ALONE = Layout(1, 0)
NOON = 1_800_000_000.0


@pytest.fixture
def run(tmp_path: Path) -> JobDirectory:
    """Two attempts; the first has one generation of two workers, the second two generations of one."""
    directory = JobDirectory(tmp_path / "job")
    attempt_starts(directory, 1, 0)
    write(directory.driver_log(1), (1, "generation 1 starts"), (9, "generation 1 ended"))
    generation_starts(directory, 1, 1)
    write(directory.generation_logs(1).worker(0), (2, "zero"), (5, "zero again"))
    write(directory.generation_logs(1).worker(1), (3, "one"), (4, "ends"))
    with directory.generation_logs(1).worker(1).open("a") as log:
        log.write("Traceback (most recent call last):\n  ...\nValueError: bad row\n")
    event(directory, 6, "failure", step=7, cause="appError", message="bad row")
    attempt_starts(directory, 2, 10)
    for generation in (2, 3):
        generation_starts(directory, generation, 10 * generation)
        write(directory.generation_logs(generation).worker(0), (10 * generation + 1, f"worker of {generation}"))
    write(directory.driver_log(2), (35, "still here"))
    return directory


def attempt_starts(directory: JobDirectory, number: int, second: float) -> None:
    directory.logs.mkdir(parents=True, exist_ok=True)
    event(directory, second, "attempt-started", attempt=number)


def generation_starts(directory: JobDirectory, number: int, second: float) -> None:
    event(
        directory, second, "generation-started", generation=number, step=0, worldSize=2, zeroStage=1, microBatchSize=4
    )


def event(directory: JobDirectory, second: float, name: str, **values: object) -> None:
    files.append_json(directory.ledger, {"time": NOON + second, "event": name, **values})


def write(path: Path, *lines: tuple[float, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as log:
        log.writelines(f"{format_timestamp(NOON + second)} INFO {text}\n" for second, text in lines)


def short(lines: str | list[str]) -> list[str]:
    """Lines without their times."""
    found = lines.splitlines() if isinstance(lines, str) else lines
    return [" ".join(word for word in line.split(" ") if not timestamp_of(f"{word} ")) for line in found]


WHOLE = [
    "driver-1: INFO generation 1 starts",
    "job: 2 worker(s) start from the beginning (ZeRO-1, micro-batch 4)",
    "gen-1/worker-0: INFO zero",
    "gen-1/worker-1: INFO one",
    "gen-1/worker-1: INFO ends",
    "gen-1/worker-1: Traceback (most recent call last):",
    "gen-1/worker-1:   ...",
    "gen-1/worker-1: ValueError: bad row",
    "gen-1/worker-0: INFO zero again",
    "job: failure at step 7 (appError): bad row",
    "driver-1: INFO generation 1 ended",
    "job: attempt 2 starts",
    "job: 2 worker(s) start from the beginning (ZeRO-1, micro-batch 4)",
    "gen-2/worker-0: INFO worker of 2",
    "job: 2 worker(s) start from the beginning (ZeRO-1, micro-batch 4)",
    "gen-3/worker-0: INFO worker of 3",
    "driver-2: INFO still here",
]


def test_lines_of_all_attempts_are_sorted_by_time_and_tracebacks_stay_together(run: JobDirectory) -> None:
    lines = short("".join(stream(run, None, None)))
    assert sorted(lines[:2]) == sorted(WHOLE[:2]), "these two have the same time"
    assert lines[2:] == WHOLE[2:]


@pytest.mark.parametrize("count", [1, 3, 6, 9, 15])
def test_last_lines_are_the_last_of_all_lines(run: JobDirectory, count: int) -> None:
    assert short(RunLogs(run).last_lines(count)) == WHOLE[-count:]


def test_asking_for_more_last_lines_than_exist_returns_all(run: JobDirectory) -> None:
    assert len(RunLogs(run).last_lines(1000)) == len(WHOLE)


@pytest.mark.parametrize("lines", [None, 0, 2, 1000])
def test_following_yields_new_lines_and_none_twice(run: JobDirectory, lines: int | None) -> None:
    def grow() -> Iterator[bool]:
        write(run.generation_logs(3).worker(0), (36, "more"))
        event(run, 37, "committed", step=9, bytes=5e6, seconds=0.5)
        write(run.driver_log(1), (38, "a lost driver speaks"))
        yield True
        attempt_starts(run, 3, 40)
        with run.driver_log(3).open("w") as log:
            log.write(f"{format_timestamp(NOON + 41)} INFO not yet wh")
        yield True
        with run.driver_log(3).open("a") as log:
            log.write("ole\n")
        yield True
        yield False

    steps = grow()
    found = short("".join(stream(run, lines, lambda: next(steps))))
    assert found[-5:] == [
        "gen-3/worker-0: INFO more",
        "job: committed step 9 (5 MB in 0.5 s)",
        "driver-1: INFO a lost driver speaks",
        "job: attempt 3 starts",
        "driver-3: INFO not yet whole",
    ]
    assert len(found) == 5 + (len(WHOLE) if lines is None else min(lines, len(WHOLE)))


def test_stacks_of_a_hang_are_sorted_by_the_time_of_their_file(run: JobDirectory) -> None:
    stacks = run.generation_logs(1).stacks(1)
    stacks.write_text("Timeout!\nThread 0x1\n")
    os.utime(stacks, (NOON + 5.5, NOON + 5.5))
    run.generation_logs(1).stacks(0).touch()
    lines = short("".join(stream(run, None, None)))
    place = lines.index("gen-1/worker-0: INFO zero again")
    assert lines[place + 1 : place + 3] == ["gen-1/stacks-rank-00001: Timeout!", "gen-1/stacks-rank-00001: Thread 0x1"]


def test_long_logs_come_in_several_batches(run: JobDirectory) -> None:
    write(run.driver_log(2), *((50 + number, "x" * 1000) for number in range(200)))
    batches = list(stream(run, None, None))
    assert len(batches) > 2
    assert all(batch.endswith("\n") for batch in batches)
    assert len("".join(batches).splitlines()) == len(WHOLE) + 200


def test_command_prints_the_logs_of_a_folder(run: JobDirectory) -> None:
    command = [sys.executable, "-m", "spotune_trainer.observability.logs.run_logs"]
    printed = subprocess.run([*command, str(run.root), "--lines", "2"], capture_output=True, text=True, check=True)
    assert short(printed.stdout) == WHOLE[-2:]
    missing = subprocess.run([*command, str(run.root / "no")], capture_output=True, text=True, check=False)
    assert missing.returncode == 1
    assert "there is no folder" in missing.stderr


def test_closing_the_pipe_ends_the_command_quietly(run: JobDirectory) -> None:
    write(run.driver_log(2), *((50 + number, "x" * 1000) for number in range(2000)))
    command = f"{sys.executable} -m spotune_trainer.observability.logs.run_logs {run.root} --follow | head --lines 1"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert len(done.stdout.splitlines()) == 1
    assert done.stderr == ""


@pytest.mark.slow
def test_worker_log_has_its_phases_and_its_final_traceback(runs: Runs) -> None:
    finished = runs.finished(ALONE)
    job = runs.job(dataset={"train": {"source": str(runs.root / "nowhere")}})
    broken = runs.empty("broken")
    run_group(1, rank_error, make_task(broken, job, ALONE, start_generation(broken)))

    logged = short(finished.generation_logs(1).worker(0).read_text())
    assert logged[0].startswith("INFO rank 0 of 1 on ")
    assert logged[0].endswith(": starts from the beginning")
    assert [line for line in logged if line in ("INFO Training", "INFO Exporting", "INFO rank 0 ends: trained")] == [
        "INFO Training",
        "INFO Exporting",
        "INFO rank 0 ends: trained",
    ]
    ended = broken.generation_logs(1).worker(0).read_text()
    assert "ERROR rank 0 failed\nTraceback (most recent call last):" in ended
    assert ended.splitlines()[-1].startswith("spotune.errors.JobError: ")
