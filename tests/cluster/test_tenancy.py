"""Two teams on a real Kubernetes: pods of one namespace cannot reach a job of another, whatever labels they have."""

from __future__ import annotations

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

PORT = 8265
"""Of Ray's dashboard, whose Jobs API runs what it is sent."""
SERVER = ("python3", "-m", "http.server", str(PORT))
OPERATOR = {"app.kubernetes.io/name": "spotune", "app.kubernetes.io/component": "operator"}


def reaches(kubectl: Kubectl, client: str, address: str) -> bool:
    """Whether a pod can open the port."""
    try:
        run_in(
            kubectl, client, "curl", "--silent", "--max-time", "3", "--output", "/dev/null", f"http://{address}:{PORT}"
        )
    except KubectlError:
        return False
    return True


def test_labels_of_a_job_or_of_the_operator_open_nothing_from_another_namespace(
    cluster: ClusterUnderTest, namespace: Kubectl
) -> None:
    """Anybody can label pods in a namespace of their own; a namespace's own name is set by the API server."""
    with temporary_namespace(cluster.kubectl) as other, temporary_namespace(cluster.kubectl) as operators:
        resolved = resolve(a_job(), PROVIDERS[ProviderName.NONE], operator_namespace=operators.namespace)
        policy = network_policy(resolved)
        policy["metadata"]["namespace"] = namespace.namespace
        own = {**resolved.selector}
        namespace.apply(pod("server", cluster.image, SERVER, labels=own), pod("worker", cluster.image, labels=own))
        other.apply(
            pod("same-labels", cluster.image, labels=own), pod("false-operator", cluster.image, labels=OPERATOR)
        )
        wait_until_running(namespace, "server", "worker")
        wait_until_running(other, "same-labels", "false-operator")
        address = namespace.get("pod", "server")["status"]["podIP"]
        strangers = ("same-labels", "false-operator")
        for client in strangers:
            wait_for(f"{client} reaching the server", 60, lambda client=client: reaches(other, client, address))  # type: ignore[misc]
        namespace.apply(policy)
        for client in strangers:
            wait_for(f"{client} being blocked", 60, lambda client=client: not reaches(other, client, address))  # type: ignore[misc]
        wait_for("the worker reaching the server", 30, lambda: reaches(namespace, "worker", address))
