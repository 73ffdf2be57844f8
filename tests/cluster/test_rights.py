"""The operator's role has exactly the rights that it uses. A stolen token gives no others."""

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster import prometheus
from tests.cluster.chart import HEALING
from tests.cluster.finetune_jobs import NOWHERE, Workplace
from tests.cluster.operator_install import Operator
from tests.cluster.rights import FOR_SWEEPS, FOR_TTL, Right, granted, refused, used

PROMETHEUS = "monitoring.namespace=monitoring"
ONLY_ON_DEAD_NODES = {Right("", "pods", "delete")}
"""Rights that are needed only after a node crash, which `make faults` tests and these tests do not."""


@pytest.mark.cluster
def test_role_gives_no_way_into_secrets_pods_or_everything() -> None:
    rights = granted(PROMETHEUS, *HEALING)
    assert not [right for right in rights if "*" in right]
    assert not [
        right for right in rights if right.resource in ("secrets", "pods/exec", "pods/attach", "pods/portforward")
    ]
    assert not [right for right in rights if right.verb in ("impersonate", "escalate", "bind")]


@pytest.mark.cluster
@pytest.mark.timeout(1200)
def test_role_is_what_the_operator_has_used(
    cluster: ClusterUnderTest, operator: Operator, workplace: Workplace
) -> None:
    machine = cluster.machine_for("the audit log")
    operator.wait_until_ready()
    log = machine.files.audit_log
    expected = granted(PROMETHEUS) - ONLY_ON_DEAD_NODES - FOR_SWEEPS - FOR_TTL
    if not expected <= used(log):  # test_operator.py did not run before this
        _use_all_rights(operator, workplace)
    wait_for("all rights to have been used", 30, lambda: expected <= used(log), every=1)
    assert not refused(log, operator.replaced)


def _use_all_rights(operator: Operator, workplace: Workplace) -> None:
    """A job with its own volume, and one that ends, in a cluster with a Prometheus operator."""
    kubectl = workplace.kubectl
    own = {"existingClaim": "", "storageClassName": workplace.cluster.storage_class, "size": "300Mi", "retain": False}
    with (
        prometheus.known(operator.cluster.kubectl, "PodMonitor"),
        operator.with_values(PROMETHEUS),
        workplace.running(workplace.manifest("with-a-volume", head=NOWHERE, storage=own)),
        workplace.running(workplace.manifest("trained", training={"maxSteps": 5})) as job,
    ):
        job.wait_until_complete()
        wait_for("its end", 120, lambda: not kubectl("get", "raycluster", "spotune-trained", "--ignore-not-found"))
        wait_for("a volume", 60, lambda: kubectl("get", "pvc", "spotune-with-a-volume", "--ignore-not-found"))
