"""The NetworkPolicy of a job's pods: Ray executes any code that it is sent, so only the job itself may reach it."""

from typing import Any

from spotune_operator.children.ports import DASHBOARD, METRICS, PROGRESS, Port
from spotune_operator.children.resolved_job import ResolvedJob


def network_policy(resolved: ResolvedJob) -> dict[str, Any]:
    """The NetworkPolicy: it admits the job's own pods, and the operator and Prometheus to the ports that they read.

    Probes of the kubelet and ``kubectl port-forward`` come from the pod's own node, which policies always admit. Egress
    is open, because model hubs, object stores and trackers can be anywhere.
    """
    rules = [
        {"from": [{"podSelector": {"matchLabels": resolved.selector}}]},
        {"from": [_operator(resolved.operator_namespace)], "ports": [_allowed(PROGRESS), _allowed(DASHBOARD)]},
    ]
    if resolved.monitoring_namespace:
        readers = [{"namespaceSelector": _named(resolved.monitoring_namespace)}]
        rules.append({"from": readers, "ports": [_allowed(PROGRESS), _allowed(METRICS)]})
    spec = {"podSelector": {"matchLabels": resolved.selector}, "policyTypes": ["Ingress"], "ingress": rules}
    return resolved.child("networking.k8s.io/v1", "NetworkPolicy", "network") | {"spec": spec}


def _operator(namespace: str) -> dict[str, Any]:
    labels = {"app.kubernetes.io/name": "spotune", "app.kubernetes.io/component": "operator"}
    return {"namespaceSelector": _named(namespace), "podSelector": {"matchLabels": labels}}


def _named(namespace: str) -> dict[str, Any]:
    return {"matchLabels": {"kubernetes.io/metadata.name": namespace}}


def _allowed(port: Port) -> dict[str, Any]:
    return {"port": port.number, "protocol": "TCP"}
