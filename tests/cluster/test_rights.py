"""The operator's role has exactly the rights that it uses. A stolen token gives no others."""

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster.chart import HEALING
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
def test_role_is_what_the_operator_has_used(cluster: ClusterUnderTest, operator: Operator) -> None:
    machine = cluster.machine_for("the audit log")
    operator.wait_until_ready()
    log = machine.files.audit_log
    expected = granted(PROMETHEUS) - ONLY_ON_DEAD_NODES - FOR_SWEEPS - FOR_TTL
    what = "all rights to have been used (by test_operator.py, before this)"
    wait_for(what, 30, lambda: expected <= used(log), every=1)
    assert not refused(log)
