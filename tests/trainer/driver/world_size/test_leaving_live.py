"""A driver on a real Ray: a node drains twice, and what the first replacement took is weighed at the second notice."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import ray

from spotune.errors import StoppedError
from spotune_trainer import files
from spotune_trainer.driver.driver import Driver, DriverDependencies
from spotune_trainer.driver.world_size.measured_times import measured_times
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.worker_group.agent_pool import AgentPool
from tests.trainer.support.connected_ray import connected_ray
from tests.trainer.support.runs import Runs
from tests.trainer.support.waiting import wait_until

pytestmark = [pytest.mark.ray, pytest.mark.timeout(600)]

_PATIENCE_SECONDS = 120.0
_NOTICE_SECONDS = 12.0


@dataclass
class RunningDriver:
    """A driver in a thread, on a Ray of one node that the test drains and gives back."""

    driver: Driver
    draining: dict[str, float]
    errors: list[Exception] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.driver.run()
        except StoppedError as error:
            self.errors.append(error)

    def events(self, name: str) -> list[dict[str, Any]]:
        return self.driver.ledger.records(name)

    def until(self, condition: Callable[[], object], what: str) -> None:
        assert wait_until(lambda: bool(condition()) or not self._thread.is_alive(), _PATIENCE_SECONDS), what
        assert condition(), f"the driver has exited before {what}"

    def wait_for_measurements(self, generation: int) -> None:
        """Wait until the generation has made some steps, and the driver can see their duration and that of a commit."""
        logs = self.driver.directory.generation_logs(generation)
        self.until(lambda: any(files.read_lines(logs.steps)), f"the steps of generation {generation}")
        measured = partial(measured_times, self.driver.ledger, logs, generation)
        self.until(lambda: not isinstance(measured(), str), f"what generation {generation} measures")

    def drain(self, seconds: float | None) -> None:
        """Drain the node with a deadline, and wait for the notice."""
        (node,) = [node["NodeID"] for node in ray.nodes() if node["Alive"]]
        notices = len(self.events("leaving"))
        self.draining[node] = time.time() + seconds if seconds is not None else 0.0
        self.until(lambda: len(self.events("leaving")) > notices, "the notice")

    def give_back(self, generation: int) -> None:
        """End the drain once the generation has left."""
        self.until(lambda: len(self.events("generation-ended")) == generation, f"the end of generation {generation}")
        self.draining.clear()

    def stop(self, directory: JobDirectory) -> None:
        write_notice(directory.notice, seconds=None, reason="the test ends", stop=True)
        self._thread.join(_PATIENCE_SECONDS)


@pytest.fixture
def running(runs: Runs, tmp_path: Path) -> Iterator[RunningDriver]:
    """Two CPU workers that train for long, with a commit every ten steps."""
    directory = runs.empty("drained")
    job = runs.job(
        training={"epochs": 10_000},
        checkpoint={"every": 10},
        execution={"zeroStage": 1, "microBatchSize": 3},
        workers={"count": 2, "min": 1, "gpus": 0},
    )
    draining: dict[str, float] = {}
    with connected_ray(tmp_path, slots=2):
        driver = Driver(
            directory, job, 1, DriverDependencies(AgentPool(directory.root, draining=lambda: dict(draining)))
        )
        made = RunningDriver(driver, draining)
        yield made
        made.stop(directory)


@pytest.mark.long
def test_second_notice_is_decided_by_what_the_run_has_measured(running: RunningDriver) -> None:
    running.wait_for_measurements(1)
    running.drain(None)
    running.give_back(1)
    running.wait_for_measurements(2)
    running.drain(_NOTICE_SECONDS)
    running.give_back(2)
    running.wait_for_measurements(3)

    first, second = running.events("leaving")
    assert (first["choice"], first["lostSeconds"]) == ("default", {})
    assert first["why"].endswith("because no replacement of a worker has come in this run yet")
    took = [event["seconds"] for event in running.events("replaced")][:2]
    assert second["measured"]["replacementSeconds"] == pytest.approx(took, abs=0.1)
    assert second["measured"]["commitSeconds"] > 0
    assert second["measured"]["changeSeconds"].keys() >= {"plan", "workers", "model", "engine", "restore", "firstStep"}
    assert second["choice"] == "waitForReplacement"
    assert second["lostSeconds"]["waitForReplacement"] < second["lostSeconds"]["leaveNow"]
    assert second["lostSeconds"]["waitForReplacement"] <= second["lostSeconds"]["default"]

    ended = running.events("generation-ended")[1]
    assert second["time"] < ended["time"] < second["time"] + _NOTICE_SECONDS, "it trains on, and leaves in time"
    assert [event["stepsLost"] for event in running.events("generation-started")] == [0, 0, 0]
