"""Injects faults into jobs whose only storage is a bucket; run by `make bucket-faults`.

The S3 server has a node of its own, which no fault hits.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotune_testcluster.providers import Provider
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_testcluster.settings import NodeSettings
from tests.cluster.bucket_jobs import BucketWorkplace, bucket_workplace
from tests.cluster.faults.bucket_catalogue import BUCKET_CASES, TWO_WRITERS
from tests.cluster.faults.catalogue import Case
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.faults.records import counted, recorded
from tests.cluster.finetune_jobs import ENDLESS, RunArtifacts, Workplace
from tests.cluster.operator_install import Operator
from tests.cluster.status_history import ObservedJob

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]

_NODE_OF_THE_STORE = NodeSettings(number=6, provider=Provider.NONE)
_SECONDS_TO_TAKE_OVER = 300.0


@pytest.fixture(scope="module")
def buckets(cluster: ClusterUnderTest, workplace: Workplace) -> Iterator[BucketWorkplace]:
    """A workplace with an S3 server on a node that takes no other pods."""
    machine = cluster.machine_for("another node")
    machine.add_node(_NODE_OF_THE_STORE)
    cluster.kubectl("taint", "node", _NODE_OF_THE_STORE.name, "spotune.dev/store=true:NoSchedule", "--overwrite")
    with bucket_workplace(workplace, _NODE_OF_THE_STORE.name) as found:
        yield found


def test_older_of_two_jobs_in_a_bucket_is_fenced_off(
    operator: Operator,
    buckets: BucketWorkplace,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    with recorded(TWO_WRITERS) as record:
        operator.wait_until_ready()
        manifest = buckets.manifest("older", training={"maxSteps": ENDLESS})
        with buckets.running(manifest) as older:
            committed = older.wait_for_commit()
            with buckets.running({**manifest, "metadata": {**manifest["metadata"], "name": "newer"}}) as newer:
                step = newer.wait_for_step(older.progress()["step"] + 1, generation=2)["step"]
                fenced = older.wait_for("the end of the older job", _is_fenced_off, _SECONDS_TO_TAKE_OVER)
                assert not fenced.holds("Ready")
                newer.finish_soon()
                ended = newer.wait_until_complete()
                artifacts = newer.artifacts(tmp_path)
            assert older.history.last.status.get("phase") != "Complete"
        assert committed < step < ended.status["totalSteps"]
        reference = undisturbed(ended.status["totalSteps"])
        assert artifacts.samples() == reference.samples(), "a step of the older job is among those of the newer one"
        assert artifacts.sha256() == reference.sha256(), "the weights differ from those of the undisturbed run"
        record.restarts = counted(ended.status["restarts"])


@pytest.mark.parametrize("case", BUCKET_CASES, ids=lambda case: case.slug)
def test_job_in_a_bucket_survives(
    case: Case,
    cluster: ClusterUnderTest,
    fault: Fault,
    operator: Operator,
    buckets: BucketWorkplace,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    with recorded(case.name) as record:
        operator.wait_until_ready()
        with buckets.running(case.manifest(buckets)) as job:
            harness = FaultHarness(cluster, fault, operator, job)
            case.inject(harness)
            if case.endless:
                job.finish_soon()
            [recovery] = harness.verify_outcome(undisturbed, tmp_path)
            [injected] = harness.injected_faults
            record.measure(injected, recovery)


def _is_fenced_off(seen: ObservedJob) -> bool:
    return "has taken over" in str(seen.condition("Training").get("message", ""))
