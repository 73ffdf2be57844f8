"""Termination notices and changes of the number of workers on a real cluster lose no steps.

Part of `make faults`. The checkpoint interval is so long that only notices cause commits.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.finetune_jobs import STEPS, RunArtifacts, RunningJob, Workplace
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

RARELY = 100_000
MANY = 100_000


@pytest.fixture
def job(operator: Operator, workplace: Workplace) -> Iterator[RunningJob]:
    """A job with one worker that can be resized."""
    operator.wait_until_ready()
    manifest = workplace.manifest(
        "elastic",
        training={"maxSteps": MANY},
        checkpoint={"every": RARELY},
        workers={"count": 1, "min": 1, "resizeCooldown": "5s"},
    )
    with workplace.running(manifest) as running:
        yield running


def trains_with(job: RunningJob, workers: int, after: dict[str, Any]) -> dict[str, Any]:
    """Wait until so many workers have made new steps, in a later generation than the progress `after`."""

    def wanted(found: dict[str, Any]) -> bool:
        is_new = found["generation"] > after["generation"] and found["step"] > after["step"]
        return bool(is_new and found["phase"] == "Training" and found["workers"]["running"] == workers)

    return job.wait_for_progress(f"{workers} workers train", wanted)


def delete_a_worker(job: RunningJob, grace_seconds: int) -> None:
    name = job.pods("workers")[0]["metadata"]["name"]
    job.kubectl("delete", "pod", name, "--wait=false", f"--grace-period={grace_seconds}")


def reported_status(job: RunningJob, progress: dict[str, Any]) -> dict[str, Any]:
    """The FinetuneJob's status, once it has caught up with the trainer's progress."""
    generation = progress["generation"]
    seen = job.wait_for(f"generation {generation}", lambda seen: seen.status.get("generation", 0) >= generation, 90)
    return seen.status


def test_resizes_and_termination_notices_lose_no_step(
    job: RunningJob, undisturbed_samples: list[str], tmp_path: Path
) -> None:
    alone = job.wait_for_step(10)
    job.patch({"workers": {"count": 2}})
    two = trains_with(job, 2, after=alone)
    assert (two["stepsLost"], sum(two["restarts"].values())) == (0, 0)

    delete_a_worker(job, grace_seconds=60)
    again = trains_with(job, 2, after=two)  # at once, or after some steps with one worker
    assert again["stepsLost"] == 0
    assert again["restarts"]["preempted"] == 1
    status = reported_status(job, again)
    assert status.get("stepsLost", 0) == 0
    assert status["restarts"]["preempted"] == 1

    job.patch({"workers": {"count": 1}})
    fewer = trains_with(job, 1, after=again)
    assert fewer["stepsLost"] == 0
    assert fewer["restarts"] == again["restarts"], "a number that the user has lowered is no loss"

    delete_a_worker(job, grace_seconds=5)  # less notice than announced: the commit at the notice counts
    last = trains_with(job, 1, after=fewer)
    assert last["resumedFromStep"] >= fewer["step"], "it must resume from the commit that the notice caused"
    assert last["restarts"]["preempted"] == fewer["restarts"]["preempted"] + 1
    assert reported_status(job, last).get("stepsLost", 0) == last["stepsLost"]

    samples = job.artifacts(tmp_path).samples()
    assert len(samples) >= len(undisturbed_samples)
    assert samples[: len(undisturbed_samples)] == undisturbed_samples


@pytest.fixture(scope="module")
def undisturbed_samples(undisturbed: Callable[[int], RunArtifacts]) -> list[str]:
    """Hash of the rows of each of the first steps of an undisturbed run of two processes."""
    return undisturbed(STEPS).samples()
