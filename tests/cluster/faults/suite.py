"""Injects every fault into its own job; run by `make faults`. `make test` runs the shorter ../test_faults.py."""

from collections.abc import Callable
from pathlib import Path

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from tests.cluster.chart import HEALING
from tests.cluster.faults.catalogue import CASES, Case
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.faults.records import counted, recorded
from tests.cluster.finetune_jobs import RunArtifacts, Workplace
from tests.cluster.operator_install import Operator
from tests.cluster.rights import FOR_SWEEPS, FOR_TTL, granted, refused, used

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(3600)]
_INJECTED: set[str] = set()
"""Names of the faults of this sitting."""


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.slug)
def test_job_survives(
    case: Case,
    cluster: ClusterUnderTest,
    fault: Fault,
    operator: Operator,
    workplace: Workplace,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    with recorded(case.name) as record:
        _INJECTED.add(case.name)
        operator.wait_until_ready()
        if case.prepare is not None:
            case.prepare(workplace)
        with workplace.running(case.manifest(workplace)) as job:
            harness = FaultHarness(cluster, fault, operator, job)
            case.inject(harness)
            if not case.trains:
                record.restarts = counted(job.history.last.status["restarts"])
                harness.assert_status_invariants(job.artifacts(tmp_path))
                return
            if case.endless:
                job.finish_soon()
            for injected, recovery in zip(
                harness.injected_faults, harness.verify_outcome(undisturbed, tmp_path), strict=True
            ):
                record.measure(injected, recovery)


def test_role_is_what_the_operator_has_used(cluster: ClusterUnderTest, operator: Operator) -> None:
    """The role with node healing grants exactly the permissions used over all faults."""
    if missing := {case.name for case in CASES} - _INJECTED:
        pytest.skip(f"{len(missing)} faults were injected in other sittings")
    operator.wait_until_ready()
    log = cluster.machine_for("the audit log").files.audit_log
    assert granted(*HEALING) - FOR_SWEEPS - FOR_TTL == used(log) - FOR_SWEEPS - FOR_TTL
    assert not refused(log, operator.replaced)
