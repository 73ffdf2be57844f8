"""The Service of the gateway, and who may reach the pods of a service."""

from typing import Any, Final

from spotune.custom_resource.object_names import CLUSTER_LABEL
from spotune_operator.children.network import allowed, operator_pods, pods_of
from spotune_operator.children.ports import DASHBOARD, METRICS, SERVE
from spotune_operator.children.serving.groups import GATEWAY
from spotune_operator.children.serving.resolved_service import ResolvedService

HTTP_PORT: Final = "http"
SERVICE_PORT: Final = 80
"""Port of the Service of the endpoint: Ingresses refer to it by name, HTTPRoutes by number."""
_KUBERAY_LABELS: Final = {"app.kubernetes.io/component": "kuberay-operator"}
"""Labels of KubeRay's operator, by its Helm chart and by its manifests."""


def gateway_service(resolved: ResolvedService) -> dict[str, Any]:
    """The Service of the endpoint. It selects the pods of the gateway alone: a connection ends with its pod."""
    selector = resolved.owner.pod_selector(GATEWAY)
    if resolved.active_cluster:
        selector = selector | {CLUSTER_LABEL: resolved.active_cluster}
    port = {"name": HTTP_PORT, "port": SERVICE_PORT, "targetPort": SERVE.number, "protocol": "TCP"}
    spec = {"type": "ClusterIP", "selector": selector, "ports": [port]}
    return resolved.owner.child("v1", "Service", GATEWAY) | {"spec": spec}


def network_policy(resolved: ResolvedService) -> dict[str, Any]:
    """The NetworkPolicy of all pods: it admits the service's own pods, and readers to the ports that they read.

    KubeRay's operator deploys the application through Ray's dashboard, which requires Ray's token. It may be in any
    namespace. Probes of the kubelet and ``kubectl port-forward`` come from the pod's own node, which policies always
    admit. Egress is open, because model hubs can be anywhere.
    """
    selector = {"matchLabels": resolved.owner.selector}
    kuberay = {"namespaceSelector": {}, "podSelector": {"matchLabels": _KUBERAY_LABELS}}
    rules: list[dict[str, Any]] = [
        {"from": [{"podSelector": selector}]},
        {"from": [kuberay], "ports": [allowed(DASHBOARD)]},
        {"from": [operator_pods(resolved.operator_namespace)], "ports": [allowed(DASHBOARD), allowed(SERVE)]},
    ]
    if resolved.monitoring_namespace:
        rules.append({"from": [pods_of(resolved.monitoring_namespace)], "ports": [allowed(METRICS)]})
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": rules}
    return resolved.owner.child("networking.k8s.io/v1", "NetworkPolicy", "network") | {"spec": spec}


def gateway_policy(resolved: ResolvedService) -> dict[str, Any]:
    """The NetworkPolicy that admits clients to the gateway: all pods of the cluster.

    With an Ingress or HTTPRoute it admits everybody, because load balancers and some controllers are no pods.
    """
    rule: dict[str, Any] = {"ports": [allowed(SERVE)]}
    if resolved.service.spec.ingress is None and resolved.service.spec.http_route is None:
        rule = {"from": [{"namespaceSelector": {}}]} | rule
    selector = {"matchLabels": resolved.owner.pod_selector(GATEWAY)}
    spec = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": [rule]}
    return resolved.owner.child("networking.k8s.io/v1", "NetworkPolicy", GATEWAY, suffix="-gateway") | {"spec": spec}
