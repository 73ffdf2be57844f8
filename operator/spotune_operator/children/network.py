"""Who may speak to the pods of a job: Ray runs whatever it is sent, so its ports are open to the job alone."""

from typing import Any

from spotune_operator.children.ports import DASHBOARD, METRICS, PROGRESS, Port
from spotune_operator.children.resolved_job import PlacedJob


def network_policy(placed: PlacedJob) -> dict[str, Any]:
    """A NetworkPolicy: the job's pods among themselves, the operator and Prometheus to what they read, nobody else.

    The kubelet's probes and ``kubectl port-forward`` come from the pod's own node, which policies let pass. Where pods
    connect to is left open: model hubs, object stores and trackers are anywhere.
    """
    rules = [
        {"from": [{"podSelector": {"matchLabels": placed.selector}}]},
        {"from": [_operator(placed.operator_namespace)], "ports": [_allowed(PROGRESS), _allowed(DASHBOARD)]},
    ]
    if placed.monitoring_namespace:
        readers = [{"namespaceSelector": _named(placed.monitoring_namespace)}]
        rules.append({"from": readers, "ports": [_allowed(PROGRESS), _allowed(METRICS)]})
    spec = {"podSelector": {"matchLabels": placed.selector}, "policyTypes": ["Ingress"], "ingress": rules}
    return placed.child("networking.k8s.io/v1", "NetworkPolicy", "network") | {"spec": spec}


def _operator(namespace: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "spotune", "app.kubernetes.io/component": "operator"}
    return {"namespaceSelector": _named(namespace), "podSelector": {"matchLabels": labels}}


def _named(namespace: str) -> dict[str, Any]:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def _allowed(port: Port) -> dict[str, Any]:
    return {"port": port.number, "protocol": "TCP"}
