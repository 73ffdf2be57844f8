"""A NetworkPolicy that blocks must block, on one node and between two; without one, pods reach each other."""

import pytest

from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
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


def _reaches(kubectl: Kubectl, client: str, address: str) -> bool:
    try:
        run_in(
            kubectl, client, "curl", "--silent", "--max-time", "3", "--output", "/dev/null", f"http://{address}:8000"
        )
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
        wait_for(f"{client} reaching the server", 20, lambda client=client: _reaches(namespace, client, address))  # type: ignore[misc]

    namespace.apply(ONLY_FRIENDS)
    for client in clients:
        wait_for(f"{client} being blocked", 30, lambda client=client: not _reaches(namespace, client, address))  # type: ignore[misc]
    assert _reaches(namespace, "friend", address)
