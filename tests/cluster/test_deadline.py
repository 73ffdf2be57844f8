"""A job with a deadline: it waits for spot nodes while it can, and moves to on-demand nodes when it must.

Spot nodes are away from its 20th step on. The deadline is set anew then, so that the test does not depend on the speed
of the machine: first far away, then so near that only on-demand nodes keep it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotune.units.timestamps import rfc3339, unix_time
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster import paced
from tests.cluster.finetune_jobs import PACED, WORKERS, RunArtifacts, RunningJob, Workplace
from tests.cluster.operator_install import Operator
from tests.cluster.status_history import ObservedJob
from tests.cluster.test_pools import CHEAP, DEAR, all_run_in, dry, pools_of

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

STEPS = 240
ON_DEMAND_START = 120.0
"""Seconds that the operator expects a start of on-demand nodes to take: in time even on two busy processors."""
MARGIN = 150.0
"""Seconds of slack that the deadline leaves: less than the start and a minute between decisions."""
_SECONDS_TO_WAIT = 30.0


def _at_risk(status: str, reason: str, message: str) -> Callable[[ObservedJob], bool]:
    """Whether the condition `DeadlineAtRisk` has these values, and a message that begins so."""

    def wanted(seen: ObservedJob) -> bool:
        found = seen.condition("DeadlineAtRisk")
        return (found.get("status"), found.get("reason")) == (status, reason) and message in found["message"]

    return wanted


def _work_left(job: RunningJob) -> float:
    """Seconds of the steps that are not committed, at the measured speed."""
    status = job.history.last.status
    committed = status.get("lastCheckpoint", {}).get("step", 0)
    seconds: float = status["deadline"]["secondsPerStep"] * (STEPS - committed)
    return seconds


def _uses_no_on_demand_node(job: RunningJob) -> bool:
    dear: dict[str, Any] = pools_of(job.history.last).get("dear", {})
    return not dear.get("running", 0) and not dear.get("pending", 0)


def test_job_moves_to_on_demand_nodes_and_ends_before_its_deadline(
    cluster: ClusterUnderTest,
    operator: Operator,
    workplace: Workplace,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    cluster.machine_for("pools of pretended spot nodes")
    manifest = workplace.manifest(
        "deadline",
        training={"maxSteps": STEPS},
        checkpoint={"every": 8},
        workers={
            "podTemplate": paced.pod_template(PACED),
            "pools": [DEAR, CHEAP],
            "poolPatience": "5s",
            "resizeCooldown": "5s",
        },
    )
    manifest["spec"]["deadline"] = "2h"
    with (
        operator.with_values(f"settings.onDemandStartSeconds={ON_DEMAND_START:.0f}"),
        workplace.running(manifest) as job,
    ):
        job.wait_for(f"{WORKERS} workers in cheap", all_run_in("cheap"), 600)
        job.wait_for("its slack", _at_risk("False", "InTime", "trains on spot nodes"), 600)
        job.wait_for_step(20)
        job.wait_for_commit()

        since = time.time()
        with dry(cluster):
            job.kubectl("delete", "pods", "--selector=ray.io/group=cheap", "--wait=false")
            job.history.wait_for("a wait", 300, _at_risk("False", "InTime", "waits for spot nodes"), since)
            started = time.time()
            wait_for(
                "the end of the wait",
                2 * _SECONDS_TO_WAIT,
                lambda: not _uses_no_on_demand_node(job) or time.time() - started > _SECONDS_TO_WAIT,
                every=0.5,
            )
            assert _uses_no_on_demand_node(job), "there are two hours of slack"
            assert pools_of(job.history.last)["cheap"]["refusals"] > 0, "it asks for spot nodes again and again"

            since = time.time()
            deadline = rfc3339(since + _work_left(job) + MARGIN)
            job.patch({"deadline": deadline})
            job.history.wait_for("no slack", 120, _at_risk("True", "NoSlackLeft", "on-demand pools"), since)
            job.history.wait_for(f"{WORKERS} workers in dear", 300, all_run_in("dear"), since)
            ended = job.wait_until_complete()

        end, limit = unix_time(ended.condition("Complete")["lastTransitionTime"]), unix_time(deadline)
        assert end is not None
        assert limit is not None
        assert end <= limit, f"{end - limit:.0f} s late"
        assert ended.status.get("stepsLost", 0) == 0, "the pods were told to go"
        assert {name for name, pool in pools_of(ended).items() if pool.get("nodeSeconds")} == {"cheap", "dear"}
        artifacts = job.artifacts(tmp_path)
    expected = undisturbed(STEPS)
    assert artifacts.samples() == expected.samples()
    assert artifacts.sha256() == expected.sha256()
