"""The API server behaves like a managed one: admission, authorisation, quota, audit, validation, field ownership."""

import json
import time
from typing import Any

import pytest

from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_testcluster.waiting import wait_for
from tests.cluster.definitions import wait_until_served
from tests.cluster.pods import as_json, pod

pytestmark = [pytest.mark.cluster, pytest.mark.long]


def _config_map(name: str, **data: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "data": data}


def test_restricted_namespace_refuses_a_privileged_pod(cluster: ClusterUnderTest, namespace: Kubectl) -> None:
    namespace("label", "namespace", namespace.namespace, "pod-security.kubernetes.io/enforce=restricted")
    with pytest.raises(KubectlError, match='violates PodSecurity "restricted'):
        namespace.apply(pod("root", cluster.image))


def test_service_account_may_do_what_its_role_says(namespace: Kubectl) -> None:
    namespace("create", "serviceaccount", "reader")
    who = f"--as=system:serviceaccount:{namespace.namespace}:reader"
    with pytest.raises(KubectlError, match="cannot list resource"):
        namespace("get", "pods", who)
    namespace("create", "role", "reader", "--verb=list", "--resource=pods")
    namespace("create", "rolebinding", "reader", "--role=reader", f"--serviceaccount={namespace.namespace}:reader")
    wait_for("the role", 10, lambda: namespace("auth", "can-i", "list", "pods", who).strip() == "yes")
    namespace("get", "pods", who)


def test_quota_refuses_what_is_over_it(namespace: Kubectl) -> None:
    namespace("create", "quota", "few", "--hard=configmaps=2")  # one exists already: the cluster's root certificate
    counted = {"configmaps": "1"}
    wait_for("the quota's count", 60, lambda: namespace.get("quota", "few")["status"].get("used") == counted)
    namespace.apply(_config_map("first"))
    with pytest.raises(KubectlError, match="exceeded quota"):
        namespace.apply(_config_map("second"))


def test_two_managers_of_one_field_conflict(namespace: Kubectl) -> None:
    first, second = _config_map("shared", key="a"), _config_map("shared", key="b")
    namespace("apply", "--server-side", "--field-manager=first", "--filename=-", stdin=as_json(first))
    with pytest.raises(KubectlError, match='conflict with "first"'):
        namespace("apply", "--server-side", "--field-manager=second", "--filename=-", stdin=as_json(second))


def test_rules_of_a_definition_are_enforced(cluster: ClusterUnderTest, namespace: Kubectl) -> None:
    rule = {"rule": "self.minimum <= self.count", "message": "minimum must not exceed count"}
    whole = {"type": "integer"}
    spec = {
        "type": "object",
        "properties": {"minimum": whole, "count": whole},
        "x-kubernetes-validations": [rule],
    }
    group = f"{namespace.namespace}.spotune.dev"
    definition = {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"probes.{group}"},
        "spec": {
            "group": group,
            "scope": "Namespaced",
            "names": {"kind": "Probe", "plural": "probes"},
            "versions": [
                {
                    "name": "v1",
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": {"type": "object", "properties": {"spec": spec}}},
                }
            ],
        },
    }
    cluster.kubectl.apply(definition)
    try:
        wait_until_served(namespace, f"probes.{group}")
        probe = {"apiVersion": f"{group}/v1", "kind": "Probe", "metadata": {"name": "probe"}}
        with pytest.raises(KubectlError, match="minimum must not exceed count"):
            namespace.apply(probe | {"spec": {"minimum": 3, "count": 2}})
        namespace.apply(probe | {"spec": {"minimum": 1, "count": 2}})
    finally:
        cluster.kubectl("delete", "crd", f"probes.{group}", "--wait=false")


def test_audit_log_says_who_asked_for_what(cluster: ClusterUnderTest, namespace: Kubectl) -> None:
    log = cluster.machine_for("the audit log").files.audit_log
    namespace("create", "serviceaccount", "curious")
    who = f"system:serviceaccount:{namespace.namespace}:curious"
    with pytest.raises(KubectlError, match="cannot list resource"):
        namespace("get", "secrets", f"--as={who}")
    entries = (json.loads(line) for line in log.read_text().splitlines())
    asked = [entry for entry in entries if entry.get("impersonatedUser", {}).get("username") == who]
    assert [(entry["verb"], entry["objectRef"]["resource"]) for entry in asked] == [("list", "secrets")]


def test_pods_reach_the_api_server_and_each_other_by_name(cluster: ClusterUnderTest, namespace: Kubectl) -> None:
    """The node of the pod may have started just now, without its rules for Services yet."""
    asks = "getent hosts kubernetes.default.svc.cluster.local && curl -sk https://kubernetes.default.svc/version"
    namespace.apply(pod("asks", cluster.image, ("bash", "-c", f"until {asks}; do sleep 1; done")))
    wait_for(
        "the answer", 120, lambda: "gitVersion" in namespace("logs", "asks") or None if _ended(namespace) else None
    )


def _ended(namespace: Kubectl) -> bool:
    return namespace.get("pod", "asks")["status"]["phase"] in {"Succeeded", "Failed"}


def test_restart_of_the_api_server_loses_nothing(namespace: Kubectl, fault: Fault) -> None:
    namespace.apply(_config_map("kept", key="value"))
    fault.restart_api_server()
    assert namespace.get("configmap", "kept")["data"] == {"key": "value"}


def test_paused_api_server_hangs_and_goes_on(cluster: ClusterUnderTest, namespace: Kubectl, fault: Fault) -> None:
    fault.pause_api_server()
    start = time.monotonic()
    with pytest.raises(KubectlError, match=r"[Tt]imeout|deadline"):
        namespace("get", "configmaps", "--request-timeout=2s")
    assert time.monotonic() - start > 2
    fault.continue_api_server()
    namespace("get", "configmaps")
