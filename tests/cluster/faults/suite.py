"""Every fault on a job of its own: what `make faults` runs. Too long for `make test`, which runs ../test_faults.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from tests.cluster.chart import HEALING
from tests.cluster.faults.catalogue import CASES, Case
from tests.cluster.faults.harness import Scene
from tests.cluster.faults.records import recorded
from tests.cluster.finetune_jobs import Remains, Workplace
from tests.cluster.operator_install import Operator
from tests.cluster.rights import granted, refused, used

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.slug)
def test_job_survives(
    case: Case,
    cluster: ClusterUnderTest,
    fault: Fault,
    operator: Operator,
    workplace: Workplace,
    undisturbed: Callable[[int], Remains],
    tmp_path: Path,
) -> None:
    with recorded(case.name) as record:
        operator.wait_until_ready()
        if case.prepare is not None:
            case.prepare(workplace)
        with workplace.running(case.manifest(workplace)) as job:
            scene = Scene(cluster, fault, operator, job)
            case.inflict(scene)
            if not case.trains:
                record.restarts = _counted(job.history.last.status["restarts"])
                scene.refuse_untruths(job.remains(tmp_path))
                return
            if case.endless:
                job.give_an_end()
            for strike, recovery in zip(scene.strikes, scene.finish(undisturbed, tmp_path), strict=True):
                record.restarts = strike.restarts
                if recovery is not None:
                    record.detect_seconds = round(recovery.seconds_to_detect, 1)
                    record.new_step_seconds = round(recovery.seconds_to_new_step, 1)


def _counted(restarts: dict[str, int]) -> dict[str, int]:
    return {cause: count for cause, count in restarts.items() if count and cause != "total"}


def test_role_is_what_the_operator_has_used(cluster: ClusterUnderTest, operator: Operator) -> None:
    """All of it, with what heals nodes; after all the faults."""
    operator.wait_until_ready()
    log = cluster.machine_for("the audit log").files.audit_log
    assert granted(*HEALING) == used(log)
    assert not refused(log)
