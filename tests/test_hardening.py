"""Every pod against NSA's and CISA's Kubernetes Hardening Guide (version 1.2, August 2022), without a cluster.

The level `restricted` of the Pod Security Standards is checked by the API server's own code and by Kyverno, in
tests/cluster/test_pod_security.py. Here are the guide's rules for pods, of which some are stricter. `EXCEPTIONS` has
what spotune does not do, and why; a rule that is kept by all pods must not be listed there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.rendered_pods import INSTALL, RenderedPod, command_pods, objects_in, rendered_pods

PODS = (*rendered_pods(), *command_pods())


def _contexts(pod: RenderedPod) -> list[dict[str, Any]]:
    """The security context of each container, with what it takes from its pod."""
    own = pod.spec.get("securityContext") or {}
    return [{**own, **(each.get("securityContext") or {})} for each in pod.containers]


def runs_as_non_root(pod: RenderedPod) -> bool:
    """'"Non-root" containers'."""
    return all(context.get("runAsNonRoot") is True and context.get("runAsUser") != 0 for context in _contexts(pod))


def has_an_immutable_file_system(pod: RenderedPod) -> bool:
    """'Immutable container file systems'."""
    return all(context.get("readOnlyRootFilesystem") is True for context in _contexts(pod))


def is_not_privileged(pod: RenderedPod) -> bool:
    """'Pod security enforcement', the guide's table of pod security controls, privileged."""
    return not any(context.get("privileged") for context in _contexts(pod))


def shares_no_namespace_of_the_host(pod: RenderedPod) -> bool:
    """The same table: hostPID, hostIPC, hostNetwork; and ports of the host."""
    ports = [port for each in pod.containers for port in each.get("ports") or ()]
    return not any(pod.spec.get(name) for name in ("hostPID", "hostIPC", "hostNetwork")) and not any(
        port.get("hostPort") for port in ports
    )


def mounts_nothing_of_the_host(pod: RenderedPod) -> bool:
    """The same table: allowedHostPaths."""
    return not any("hostPath" in volume for volume in pod.spec.get("volumes") or ())


def cannot_escalate(pod: RenderedPod) -> bool:
    """The same table: allowPrivilegeEscalation."""
    return all(context.get("allowPrivilegeEscalation") is False for context in _contexts(pod))


def has_no_capabilities(pod: RenderedPod) -> bool:
    """'Hardening container environments'."""
    contexts = [context.get("capabilities") or {} for context in _contexts(pod)]
    return all(each.get("drop") == ["ALL"] and not each.get("add") for each in contexts)


def has_a_seccomp_profile(pod: RenderedPod) -> bool:
    """The same table: seccomp."""
    return all((context.get("seccompProfile") or {}).get("type") == "RuntimeDefault" for context in _contexts(pod))


def mounts_no_token(pod: RenderedPod) -> bool:
    """'Protecting Pod service account tokens'."""
    return pod.spec.get("automountServiceAccountToken") is False


def has_limits(pod: RenderedPod) -> bool:
    """'Resource policies': a container cannot take all memory of its node."""
    return all("memory" in ((each.get("resources") or {}).get("limits") or {}) for each in pod.containers)


Rule = Callable[[RenderedPod], bool]
KEPT: tuple[Rule, ...] = (
    runs_as_non_root,
    is_not_privileged,
    shares_no_namespace_of_the_host,
    mounts_nothing_of_the_host,
    cannot_escalate,
    has_no_capabilities,
    has_a_seccomp_profile,
)
EXCEPTIONS: dict[Rule, tuple[Callable[[RenderedPod], bool], str]] = {
    has_an_immutable_file_system: (
        lambda pod: any(name in pod.place for name in ("RayCluster", "RayService", "spotune logs")),
        "Ray, torch.compile and the caches of libraries write below /tmp and the home folder of the image",
    ),
    mounts_no_token: (
        lambda pod: bool(pod.spec.get("serviceAccountName")),
        "the operator needs the API server; a job or service that names a service account asks for its identity",
    ),
    has_limits: (
        lambda pod: any(name in pod.place for name in ("RayCluster", "RayService")),
        "the need of a head and of an engine depends on model and library: users set limits, or a LimitRange does",
    ),
}


@pytest.mark.parametrize("rule", KEPT, ids=lambda rule: rule.__name__)
def test_every_pod_keeps(rule: Rule) -> None:
    assert len(PODS) > 50
    assert [pod.place for pod in PODS if not rule(pod)] == []


@pytest.mark.parametrize("rule", EXCEPTIONS, ids=lambda rule: rule.__name__)
def test_every_pod_keeps_or_is_an_exception(rule: Rule) -> None:
    is_excepted, reason = EXCEPTIONS[rule]
    broken = [pod for pod in PODS if not rule(pod)]
    assert broken, f"the exception is not needed: {reason}"
    assert [pod.place for pod in broken if not is_excepted(pod)] == []


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        (runs_as_non_root, {"runAsUser": 0}),
        (is_not_privileged, {"privileged": True}),
        (cannot_escalate, {"allowPrivilegeEscalation": True}),
        (has_no_capabilities, {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}}),
        (has_a_seccomp_profile, {"seccompProfile": {"type": "Unconfined"}}),
    ],
)
def test_a_container_that_breaks_a_rule_is_found(rule: Rule, change: dict[str, Any]) -> None:
    template = copy.deepcopy(PODS[1].template)
    template["spec"]["containers"][-1].setdefault("securityContext", {}).update(change)
    assert not rule(RenderedPod("changed", template))


@pytest.mark.parametrize("change", [{"hostNetwork": True}, {"volumes": [{"name": "x", "hostPath": {"path": "/"}}]}])
def test_a_pod_that_reaches_its_node_is_found(change: dict[str, Any]) -> None:
    pod = RenderedPod("changed", {"spec": {**PODS[1].spec, **change}})
    assert not (shares_no_namespace_of_the_host(pod) and mounts_nothing_of_the_host(pod))


def test_what_is_installed_has_policies_for_its_network_and_namespace() -> None:
    """'Network separation and hardening', and 'Namespaces'."""
    found = objects_in(INSTALL.read_text())
    kinds = {item["kind"]: item for item in found}
    assert kinds["NetworkPolicy"]["spec"]["policyTypes"] == ["Ingress", "Egress"]
    assert kinds["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_roles_have_no_wildcards_and_read_no_secrets() -> None:
    """'Role-based access control'."""
    roles = [item for item in objects_in(INSTALL.read_text()) if item["kind"] in ("Role", "ClusterRole")]
    rules = [rule for role in roles for rule in role.get("rules") or ()]
    assert rules
    for rule in rules:
        assert "*" not in [*rule.get("apiGroups", ()), *rule.get("resources", ()), *rule["verbs"]], rule
        assert "secrets" not in rule.get("resources", ()), rule
