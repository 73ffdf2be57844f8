"""The faults of `make serving-faults` under which no stream may fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tests.cluster.serving_faults import control, replicas
from tests.cluster.serving_faults.harness import ServingHarness
from tests.cluster.serving_faults.replicas import Pods


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        name: What happens.
        inject: Injects the fault.
        prepare: Called before the streams begin.
    """

    name: str
    inject: Callable[[ServingHarness], Pods]
    prepare: Callable[[ServingHarness], None] | None = None

    @property
    def slug(self) -> str:
        """Name of the test."""
        return self.inject.__name__.replace("_", "-")


CASES = (
    Case("container of a replica killed (`kill -9`)", replicas.replica_container_killed),
    Case("pod of a replica deleted", replicas.replica_pod_deleted),
    Case("node of a replica cordoned, its replicas evicted", replicas.node_of_a_replica_drained),
    Case("all replicas killed at once", replicas.all_replicas_killed),
    Case("both replicas killed, two seconds apart", replicas.replica_killed_twice),
    Case(
        "spot node of a replica reclaimed after a notice of 30 s",
        replicas.node_of_a_replica_reclaimed,
        replicas.spread_replicas,
    ),
    Case("spot node of a replica crashed", replicas.node_of_a_replica_crashed, replicas.spread_replicas),
    Case("operator down, and a replica killed meanwhile", control.operator_down_during_a_loss),
    Case("KubeRay down, and a replica killed meanwhile", control.kuberay_down_during_a_loss),
    Case("KubeRay restarted", control.kuberay_restarted),
    Case("head pod deleted (with Redis)", control.head_pod_deleted),
    Case("node of the head crashed (with Redis)", control.node_of_the_head_crashed, control.move_head),
)
"""In the order of docs/serving-faults.md."""

GATEWAY_KILLED = "one of two gateways killed (`kill -9`)"
TOKEN_REPEATED = "control: a gateway that repeats one token when a stream continues"
TOKEN_DROPPED = "control: a gateway that drops one token when a stream continues"
OTHERS = (GATEWAY_KILLED, TOKEN_REPEATED, TOKEN_DROPPED)
"""Tests of their own."""
