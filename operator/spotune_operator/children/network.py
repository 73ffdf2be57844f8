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
        {"from": [operator_pods(resolved.operator_namespace)], "ports": [allowed(PROGRESS), allowed(DASHBOARD)]},
    ]
    if resolved.monitoring_namespace:
        rules.append({"from": [pods_of(resolved.monitoring_namespace)], "ports": [allowed(PROGRESS), allowed(METRICS)]})
    spec = {"podSelector": {"matchLabels": resolved.selector}, "policyTypes": ["Ingress"], "ingress": rules}
    return resolved.child("networking.k8s.io/v1", "NetworkPolicy", "network") | {"spec": spec}


def operator_pods(namespace: str) -> dict[str, Any]:
    """The ``NetworkPolicyPeer`` for the operator's pods."""
    labels = {"app.kubernetes.io/name": "spotune", "app.kubernetes.io/component": "operator"}
    return pods_of(namespace) | {"podSelector": {"matchLabels": labels}}


def pods_of(namespace: str) -> dict[str, Any]:
    """The ``NetworkPolicyPeer`` for all pods of a namespace."""
    return {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}


def allowed(port: Port) -> dict[str, Any]:
    """The ``NetworkPolicyPort`` for a port."""
    return {"port": port.number, "protocol": "TCP"}
