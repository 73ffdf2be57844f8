"""NetworkPolicies, including that of a job, block all pods that they do not name, on one node and between two."""

import pytest

from spotune_operator.children.network import network_policy
from spotune_operator.children.resolved_job import resolve
from spotune_operator.providers import PROVIDERS, ProviderName
from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from spotune_testcluster.waiting import wait_for
from tests.api.support.job_files import a_job
from tests.cluster.pods import pod, run_in, wait_until_running

pytestmark = pytest.mark.cluster

SERVER = ("python3", "-m", "http.server", "8000")
ONLY_FRIENDS = {
    "apiVersion": "networking.k8s.io/v1",
    "kind": "NetworkPolicy",
    "metadata": {"name": "only-friends"},
    "spec": {
        "podSelector": {"matchLabels": {"app": "server"}},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": [{"podSelector": {"matchLabels": {"friend": "yes"}}}], "ports": [{"port": 8000}]}],
    },
}


def _reaches(kubectl: Kubectl, client: str, address: str, port: int = 8000) -> bool:
    url = f"http://{address}:{port}"
    try:
        run_in(kubectl, client, "curl", "--silent", "--max-time", "3", "--output", "/dev/null", url)
    except KubectlError:
        return False
    return True


def test_policy_blocks_all_but_whom_it_names(cluster: ClusterUnderTest, namespace: Kubectl) -> None:
    clients = {"same-node": cluster.nodes[0], "other-node": cluster.nodes[1]}
    namespace.apply(
        pod("server", cluster.image, SERVER, node=cluster.nodes[0], labels={"app": "server"}),
        pod("friend", cluster.image, node=cluster.nodes[1], labels={"friend": "yes"}),
        *(pod(name, cluster.image, node=node) for name, node in clients.items()),
    )
    wait_until_running(namespace, "server", "friend", *clients)
    address = namespace.get("pod", "server")["status"]["podIP"]
    for client in ("friend", *clients):
        wait_for(f"{client} reaching the server", 60, lambda client=client: _reaches(namespace, client, address))  # type: ignore[misc]

    namespace.apply(ONLY_FRIENDS)
    for client in clients:
        wait_for(f"{client} being blocked", 60, lambda client=client: not _reaches(namespace, client, address))  # type: ignore[misc]
    wait_for("the friend reaching the server", 30, lambda: _reaches(namespace, "friend", address))


LISTEN = """
import http.server, threading
for port in (6379, 8080, 8090, 8265):
    server = http.server.ThreadingHTTPServer(("", port), http.server.SimpleHTTPRequestHandler)
    threading.Thread(target=server.serve_forever).start()
"""
OPERATOR = {"app.kubernetes.io/name": "spotune", "app.kubernetes.io/component": "operator"}


def test_policy_of_a_job_leaves_ray_to_the_job_and_progress_to_operator_and_prometheus(
    cluster: ClusterUnderTest, namespace: Kubectl
) -> None:
    with temporary_namespace(cluster.kubectl) as operators, temporary_namespace(cluster.kubectl) as prometheus:
        job = a_job()
        resolved = resolve(
            job,
            PROVIDERS[ProviderName.NONE],
            operator_namespace=operators.namespace,
            monitoring_namespace=prometheus.namespace,
        )
        server = ("python3", "-c", LISTEN)
        policy = network_policy(resolved)
        policy["metadata"]["namespace"] = namespace.namespace
        namespace.apply(policy, pod("server", cluster.image, server, labels=resolved.selector))
        clients = {
            ("worker", namespace): (resolved.selector, {6379, 8080, 8090, 8265}),
            ("stranger", namespace): (OPERATOR, set()),
            ("operator", operators): (OPERATOR, {8090, 8265}),
            ("neighbour", operators): ({}, set()),
            ("prometheus", prometheus): ({}, {8080, 8090}),
        }
        for (name, kubectl), (labels, _) in clients.items():
            kubectl.apply(pod(name, cluster.image, labels=labels))
        wait_until_running(namespace, "server")
        address = namespace.get("pod", "server")["status"]["podIP"]
        for (name, kubectl), (_, ports) in clients.items():
            wait_until_running(kubectl, name)

            def reached(kubectl: Kubectl = kubectl, name: str = name) -> set[int]:
                return {port for port in (6379, 8080, 8090, 8265) if _reaches(kubectl, name, address, port)}

            wait_for(f"{name} to reach {ports}", 60, lambda ports=ports, reached=reached: reached() == ports)  # type: ignore[misc]
