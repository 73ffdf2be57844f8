"""Four faults on one job, one after the other. The model equals that of an undisturbed run.

`make faults` injects all faults, each into its own job.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from tests.cluster import paced
from tests.cluster.containers import follow_log
from tests.cluster.faults import control_plane, pods, processes
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.finetune_jobs import ENDLESS, PACED, RunArtifacts, Workplace
from tests.cluster.operator_install import Operator

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(2400)]

FAULTS = (
    processes.worker_process_killed,
    pods.head_pod_deleted_by_force,
    processes.supervisor_killed,
    control_plane.operator_killed_at_random_moments,
)


@pytest.fixture(scope="module")
def harness(cluster: ClusterUnderTest, operator: Operator, workplace: Workplace) -> Iterator[FaultHarness]:
    """The job into which all tests of this module inject faults."""
    cluster.machine_for("kill -9 of a container")
    sections: dict[str, dict[str, Any]] = {
        "training": {"maxSteps": ENDLESS},
        "checkpoint": {"every": 8},
        "workers": {"podTemplate": paced.pod_template(PACED)},
    }
    with workplace.running(workplace.manifest("disturbed", **sections)) as job:
        yield FaultHarness(cluster, Fault(cluster), operator, job)


@pytest.mark.parametrize("inject", FAULTS, ids=lambda inject: inject.__name__)
def test_training_recovers(inject: Callable[[FaultHarness], None], harness: FaultHarness) -> None:
    harness.inject_once(inject)


def test_model_samples_and_status_equal_those_of_an_undisturbed_run(
    harness: FaultHarness, undisturbed: Callable[[int], RunArtifacts], tmp_path: Path
) -> None:
    for inject in FAULTS:  # all were injected before, unless this test is tried again alone
        harness.inject_once(inject)
    log = tmp_path / "ray-head.log"
    with follow_log(harness.job.kubectl, harness.job.head(), "ray-head", log):
        harness.job.finish_soon()
    assert "will now block" in log.read_text()
    assert "Draining for up to" not in log.read_text(), "Ray waits 30 s for its dead GCS to drain the head's node"
    harness.verify_outcome(undisturbed, tmp_path / "artifacts")
    steps_with_eta = {seen.status["step"] for seen in harness.job.history.seen if seen.status.get("eta")}
    assert len(steps_with_eta) >= 2, "the status says how long is left while the job trains"
