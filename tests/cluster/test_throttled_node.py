"""A node with a throttled link is left out before it is used, and the model is the same.

The link is really throttled: a token bucket on both ends of the node's interface. The check runs in the pods: agents
pull bytes from one another. It takes three nodes, since of two nobody can say which one is at fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.pytest_plugin import Fault
from spotune_testcluster.waiting import wait_for
from tests.cluster.finetune_jobs import SMALL, STEPS, WORKERS, RunArtifacts, RunningJob, Workplace
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

BAD = "n3"
RATE = "80mbit"
"""10 MB/s. The others of this machine reach some hundreds."""
NODES = WORKERS + 1
ONE_PER_NODE = {
    "requiredDuringSchedulingIgnoredDuringExecution": [
        {
            "labelSelector": {"matchLabels": {"app.kubernetes.io/component": "workers"}},
            "topologyKey": "kubernetes.io/hostname",
        }
    ]
}


def _nodes_of_workers(job: RunningJob) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in job.pods("workers")}


def test_node_with_a_throttled_link_is_left_out_and_training_goes_on_elsewhere(
    operator: Operator,
    workplace: Workplace,
    undisturbed: Callable[[int], RunArtifacts],
    fault: Fault,
    tmp_path: Path,
) -> None:
    operator.wait_until_ready()
    workplace.cluster.machine_for("a link that is throttled")
    pools: list[dict[str, Any]] = [
        {"name": "spot", "capacity": "spot", "max": NODES - 1},
        {"name": "sure", "capacity": "on-demand", "max": 1},
    ]
    manifest = workplace.manifest(
        "throttled",
        workers={
            "count": NODES,
            "min": WORKERS,
            "gpus": 0,
            "resources": SMALL,
            "nodeCheck": "always",
            "pools": pools,
            "podTemplate": {"spec": {"affinity": {"podAntiAffinity": ONE_PER_NODE}}},
        },
    )
    fault.throttle(BAD, RATE)
    with workplace.running(manifest) as job:
        seen = job.wait_for("an unfit node", lambda seen: bool(seen.status.get("unfitNodes")), 600)
        (unfit,) = seen.status["unfitNodes"]
        assert unfit["node"] == BAD
        found = re.match(r"its network carries ([\d,]+) MB/s; the median of 3 nodes is ([\d,]+) MB/s", unfit["reason"])
        assert found is not None, unfit["reason"]
        assert int(found[1].replace(",", "")) <= 15
        assert seen.condition("NodesFit")["status"] == "False"
        wait_for("the pods to leave the node", 300, lambda: BAD not in _nodes_of_workers(job), every=0.5)
        job.wait_until_complete()
        artifacts = job.artifacts(tmp_path)
    checked = {event["node"] for event in artifacts.ledger.records("node-checked")}
    assert checked == {"n1", "n2", BAD}
    assert [event["node"] for event in artifacts.ledger.records("node-unfit")] == [BAD]
    assert {event["worldSize"] for event in artifacts.ledger.records("generation-started")} == {WORKERS}
    assert not artifacts.ledger.failures(), "leaving a node out before it is used is no failure"
    expected = undisturbed(STEPS)
    assert artifacts.samples() == expected.samples()
    assert artifacts.sha256() == expected.sha256()
