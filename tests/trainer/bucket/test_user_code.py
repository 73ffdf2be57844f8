"""Functions and commands of the user on machines that share nothing but the bucket.

Each group trains on new machines with empty disks. The nodes of a group have directories of their own, as pods have.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.bucket.checkpoints import list_checkpoint_files, refresh
from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.folders import pull_generation_logs
from spotune_trainer.checkpoint.generations import claim, surviving_steps
from spotune_trainer.checkpoint.layout import MANIFEST
from spotune_trainer.checkpoint.reader import CorruptCheckpointError
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.training.task import RankExit, WorkerTask
from tests.trainer.bucket.conftest import linked_directory
from tests.trainer.commands.test_worker import EXAMPLE, PROGRAMS, TORCHRUN, process_of
from tests.trainer.commands.test_worker import STEPS as TORCHRUN_STEPS
from tests.trainer.support.unreliable_server import UnreliableServer
from tests.trainer.training_functions.ranks import command_job, function_job, run_disturbed, run_generation
from tests.trainer.training_functions.test_worker import content_of

pytestmark = pytest.mark.slow

TRAINED = [RankExit.TRAINED] * 2


@dataclass(frozen=True)
class Group:
    """What has become of a worker group on two machines with a rank each."""

    driver: JobDirectory
    homes: tuple[JobDirectory, ...]
    task: WorkerTask
    results: list[Any]

    @property
    def exits(self) -> list[RankExit]:
        """How the ranks ended, of a group without failures."""
        assert all(isinstance(result, tuple) for result in self.results), self.results
        return [result[0] for result in self.results]


@dataclass(frozen=True)
class Machines:
    """Worker groups of one job in one bucket."""

    bucket: Bucket
    folder: Path

    def train(
        self,
        name: str,
        job: FinetuneJob,
        disturb: Callable[[tuple[JobDirectory, ...]], None] = lambda _: None,
        endpoints: Mapping[int, str] = MappingProxyType({}),
    ) -> Group:
        """Train the next generation on new machines, while `disturb` runs. `endpoints`: see `run_generation`."""
        driver, *homes = (
            linked_directory(self.bucket, self.folder / name / each) for each in ("driver", "node0", "node1")
        )
        refresh(self.bucket, driver)
        task, results = run_disturbed(driver, job, lambda: disturb(tuple(homes)), homes=homes, endpoints=endpoints)
        return Group(driver, tuple(homes), task, results)

    def steps(self) -> list[int]:
        """The steps that count, of all generations, as another machine finds them in the bucket."""
        reader = linked_directory(self.bucket, self.folder / f"reader-{len(list(self.folder.iterdir()))}")
        refresh(self.bucket, reader)
        pull_generation_logs(self.bucket, reader)
        return [line["step"] for line in surviving_steps(reader)]

    def export(self) -> dict[str, bytes | None]:
        """The files of the trained model in the bucket. A manifest says that they are complete."""
        names = sorted(self.bucket.list("export"))
        assert f"export/{MANIFEST}" in names
        found = {name.removeprefix("export/"): self.bucket.read(name) for name in names}
        return {name: content for name, content in found.items() if name != MANIFEST}

    def wait_for_commit(self) -> None:
        """Wait until the bucket has a checkpoint."""
        wait_until(lambda: any(MANIFEST in each for each in list_checkpoint_files(self.bucket).values()))


@pytest.fixture
def machines(bucket: Bucket, tmp_path: Path) -> Machines:
    return Machines(bucket, tmp_path)


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait without a limit: a group may start slowly, and a test whose group has ended without it fails anyway."""
    while not condition():
        time.sleep(0.05)


def log_of(home: JobDirectory, rank: int, generation: int) -> str:
    log = home.generation_logs(generation).worker(rank)
    return log.read_text() if log.exists() else ""


def export_of_undisturbed(tmp_path: Path, job: FinetuneJob, nodes: int = 1) -> dict[str, bytes]:
    """The model of the same job on one machine without a bucket, of which nothing is lost."""
    directory = JobDirectory(tmp_path / "undisturbed")
    _, results = run_generation(directory, job, nodes=nodes)
    assert [result[0] for result in results] == TRAINED
    return content_of(directory.export)


def test_other_machines_continue_after_what_ray_train_has_reported(machines: Machines, tmp_path: Path) -> None:
    steps = {"steps": 7, "every": 2}
    expected = export_of_undisturbed(tmp_path, function_job("adds_up", {"steps": 8, "every": 2}))
    first = machines.train("first", function_job("adds_up", {**steps, "killAt": 7}))
    assert first.results[1] == -signal.SIGKILL
    assert [len(list(home.checkpoints.glob("*/shards/*"))) for home in first.homes] == [2, 2], "older copies are gone"
    second = machines.train("second", function_job("adds_up", {"steps": 8, "every": 2, "rereads": True}))
    assert second.exits == TRAINED
    assert second.task.restore == "step-00000006.gen-1"
    assert machines.export() == expected
    assert machines.steps() == list(range(1, 9))
    assert second.results[0][1]["steps"] == 8
    assert machines.bucket.read("logs/gen-2/worker-1.log.parts/000000000000") is not None


@pytest.mark.long
def test_shards_of_other_machines_are_loaded(machines: Machines, tmp_path: Path) -> None:
    config = {"steps": 5}
    expected = export_of_undisturbed(tmp_path, function_job("shards", config, module="library_functions"))
    killed = {**config, "killAt": 4, "happened": str(tmp_path / "happened")}
    first = machines.train("first", function_job("shards", killed, module="library_functions"))
    assert first.results[1] == -signal.SIGKILL
    second = machines.train("second", function_job("shards", killed, module="library_functions"))
    assert second.exits == TRAINED
    assert second.task.restore in ("step-00000003.gen-1", "step-00000004.gen-1")
    found = machines.export()
    assert found.keys() == expected.keys() >= {".metadata", "__0_0.distcp", "__1_0.distcp"}
    assert found["whole.pt"] == expected["whole.pt"]


@pytest.mark.long
def test_torchrun_continues_on_other_machines(machines: Machines, tmp_path: Path) -> None:
    expected = export_of_undisturbed(tmp_path, command_job(*TORCHRUN, code=EXAMPLE), nodes=2)

    def kill_one(homes: tuple[JobDirectory, ...]) -> None:
        machines.wait_for_commit()
        process = process_of(homes[1], 1)
        assert process is not None
        os.kill(process, signal.SIGKILL)

    first = machines.train("first", command_job(*TORCHRUN, "--pause", "0.2", code=EXAMPLE), kill_one)
    assert "a process of torchrun was killed by SIGKILL" in str(first.results[1])
    second = machines.train("second", command_job(*TORCHRUN, code=EXAMPLE))
    assert second.exits == TRAINED
    assert second.task.restore is not None
    assert machines.export() == expected
    assert machines.steps() == list(range(1, TORCHRUN_STEPS + 1))
    assert second.results[0][1]["steps"] == TORCHRUN_STEPS


@pytest.mark.long
def test_a_plain_program_goes_on_from_its_own_checkpoints_on_other_machines(machines: Machines) -> None:
    def job(steps: int) -> FinetuneJob:
        config = {"steps": steps, "seconds": 0.1, "export": True}
        return command_job("python", "plain_program.py", code=PROGRAMS, config=config)

    def stop(homes: tuple[JobDirectory, ...]) -> None:
        wait_until(lambda: all("starts after 0 steps" in log_of(home, rank, 1) for rank, home in enumerate(homes)))
        time.sleep(1)
        for home in homes:  # as the relay does
            write_notice(home.notice, seconds=30, reason="suspended", stop=True)

    first = machines.train("first", job(100_000), stop)
    assert first.exits == [RankExit.STOPPED] * 2
    saved = [
        json.loads((home.command_checkpoints / f"steps-{i}.json").read_text()) for i, home in enumerate(first.homes)
    ]
    steps = max(len(each) for each in saved) + 5
    second = machines.train("second", job(steps))
    assert second.exits == TRAINED
    for rank, home in enumerate(second.homes):
        assert f"starts after {len(saved[rank])} steps" in log_of(home, rank, 2)
    model = json.dumps(list(range(1, steps + 1))).encode()
    assert machines.export() == dict.fromkeys(("steps.json", "steps-of-rank-0.json", "steps-of-rank-1.json"), model)


def test_a_damaged_object_is_refused_by_all_ranks(machines: Machines) -> None:
    job = function_job("adds_up", {"steps": 2, "every": 2})
    machines.train("first", job)
    machines.bucket.write("checkpoints/step-00000002.gen-1/shards/rank-1.bin", bytes([7]) * 1000)
    second = machines.train("second", job)
    assert all(isinstance(result, CorruptCheckpointError) for result in second.results), second.results
    assert "rank-1.bin in the bucket does not have the checksum of its manifest" in str(second.results[0])


@pytest.mark.parametrize("cut_off", [(1,), pytest.param((0, 1), marks=pytest.mark.long)])
def test_a_commit_waits_until_all_ranks_reach_the_bucket(
    machines: Machines, tmp_path: Path, cut_off: tuple[int, ...]
) -> None:
    """The status says what holds up any of the ranks."""
    broken = tmp_path / "broken"
    with UnreliableServer(os.environ["S3_ENDPOINT_URL"]) as server:

        def interrupt(homes: tuple[JobDirectory, ...]) -> None:
            machines.wait_for_commit()
            server.break_connections()
            broken.touch()
            progress = homes[0].generation_logs(1).progress
            wait_until(lambda: "s3://" in ((files.read_json(progress) or {}).get("checkpointProblem") or ""))
            server.mend()

        job = function_job("adds_up", {"steps": 20, "every": 2, "waitsFor": str(broken)})
        group = machines.train("first", job, interrupt, dict.fromkeys(cut_off, server.url))
    assert group.exits == TRAINED
    progress = files.read_json(group.homes[0].generation_logs(1).progress)
    assert progress is not None
    assert progress["checkpointProblem"] is None
    assert machines.steps() == list(range(1, 21))


def test_a_group_that_another_machine_has_superseded_commits_nothing(machines: Machines) -> None:
    def supersede(_: tuple[JobDirectory, ...]) -> None:
        machines.wait_for_commit()
        other = linked_directory(machines.bucket, machines.folder / "other")
        refresh(machines.bucket, other)
        assert claim(other, None).number == 2

    group = machines.train("first", function_job("adds_up", {"steps": 100_000, "every": 100}), supersede)
    assert [type(result).__name__ for result in group.results] == ["SupersededError"] * 2


def test_notice_of_an_agent_without_rank_0_lets_the_group_commit_and_leave(machines: Machines) -> None:
    """Without a driver nobody else learns that the pod of the other rank ends."""

    def notify(homes: tuple[JobDirectory, ...]) -> None:
        machines.wait_for_commit()
        write_notice(homes[1].generation_logs(1).agent_notice, seconds=None, reason="the pod ends", leave=True)

    group = machines.train("first", function_job("adds_up", {"steps": 100_000, "every": 100}), notify)
    assert group.exits == [RankExit.YIELDED] * 2
    last = list(files.read_lines(group.homes[0].generation_logs(1).steps))[-1]
    assert f"step-{last['step']:08d}.gen-1" in list_checkpoint_files(machines.bucket)
