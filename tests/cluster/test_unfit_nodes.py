"""A node whose GPU has ECC errors is left out: workers move to another one, and the model is the same.

A fake `nvidia-smi` in the worker pods reports the errors on one node. Nothing else is pretended: the check runs in the
pods, and kube-scheduler and KubeRay move them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.waiting import wait_for
from tests.cluster.finetune_jobs import SMALL, STEPS, RunArtifacts, RunningJob, Workplace
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

BAD = "n2"
PROGRAM = f"""#!/bin/sh
errors=0
[ "$SPOTUNE_NODE" = {BAD} ] && errors=2
echo "0, NVIDIA H100 80GB HBM3, $errors, No, No, No, Not Active, Not Active, Not Active"
"""
CONFIG_MAP = {
    "apiVersion": "v1",
    "kind": "ConfigMap",
    "metadata": {"name": "nvidia-smi"},
    "data": {"nvidia-smi": PROGRAM},
}
MOUNT = {"name": "smi", "mountPath": "/usr/local/bin/nvidia-smi", "subPath": "nvidia-smi"}
POD_TEMPLATE = {
    "spec": {
        "volumes": [{"name": "smi", "configMap": {"name": "nvidia-smi", "defaultMode": 0o755}}],
        "containers": [{"name": "ray-worker", "volumeMounts": [MOUNT]}],
    }
}


def _nodes_of_workers(job: RunningJob) -> set[str]:
    return {pod["spec"].get("nodeName", "") for pod in job.pods("workers")}


def _events(job: RunningJob) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = job.kubectl.get("events", f"--field-selector=involvedObject.name={job.name}")
    return found


def test_node_with_ecc_errors_is_left_out_and_training_goes_on_elsewhere(
    operator: Operator, workplace: Workplace, undisturbed: Callable[[int], RunArtifacts], tmp_path: Path
) -> None:
    operator.wait_until_ready()
    workplace.cluster.machine_for("nodes that the workers are spread over")
    workplace.kubectl("apply", "--filename=-", stdin=json.dumps(CONFIG_MAP))
    manifest = workplace.manifest(
        "unfit",
        workers={
            "count": 2,
            "min": 2,
            "gpus": 0,
            "resources": SMALL,
            "nodeCheck": "always",
            "podTemplate": POD_TEMPLATE,
        },
    )
    with workplace.running(manifest) as job:
        seen = job.wait_for("an unfit node", lambda seen: bool(seen.status.get("unfitNodes")), 600)
        (unfit,) = seen.status["unfitNodes"]
        assert unfit["node"] == BAD
        assert re.match(r"GPU 0 \(NVIDIA H100 80GB HBM3\): 2 uncorrected ECC errors", unfit["reason"])
        assert seen.condition("NodesFit")["status"] == "False"
        wait_for("the pods to leave the node", 300, lambda: BAD not in _nodes_of_workers(job), every=0.5)
        job.wait_until_complete()
        assert any(event["reason"] == "UnfitNode" and BAD in event["message"] for event in _events(job))
        found = job.artifacts(tmp_path)
    checked = found.ledger.records("node-checked")
    assert len(checked) == len({event["node"] for event in checked}), "a node was checked twice"
    assert [event["node"] for event in found.ledger.records("node-unfit")] == [BAD]
    assert not found.ledger.failures(), "leaving a node out before it is used is no failure"
    expected = undisturbed(STEPS)
    assert found.samples() == expected.samples()
    assert found.sha256() == expected.sha256()
