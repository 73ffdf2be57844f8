"""Every pod that spotune makes keeps the level "restricted" of the Pod Security Standards.

Two programs decide: the code of the API server's own admission plugin, and Kyverno with its published policies. Neither
needs a cluster. The rules of the NSA's guide are in tests/test_hardening.py.
"""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune_testcluster import binaries
from spotune_testcluster.home import Home
from tests.cluster.chart import EVERYTHING, PRESETS, template
from tests.rendered_pods import RenderedPod, command_pods, objects_in, pods_in, rendered_pods

pytestmark = pytest.mark.cluster

POLICIES = Path(__file__).parent / "kyverno/policies"
KYVERNO = binaries.Module("kyverno", {"github.com/kyverno/kyverno/cmd/cli/kubectl-kyverno": "kyverno"})

Check = Callable[[Sequence[RenderedPod]], set[tuple[str, str]]]
"""Place of the pod and name of the rule, of each rule that a pod breaks."""


@pytest.fixture(scope="module")
def pods() -> list[RenderedPod]:
    """All pods: of all variants of the chart, of jobs and services, and of commands."""
    texts = {"default": template(), "everything": template(*EVERYTHING), "teams": template("watchNamespaces={a,b}")}
    texts |= {preset.stem: template(preset=preset) for preset in PRESETS}
    charts = [
        pod for name, text in texts.items() for item in objects_in(text) for pod in pods_in(item, f"chart, {name}")
    ]
    assert len(charts) >= len(texts)
    return [*charts, *rendered_pods(), *command_pods()]


def check_as_api_server(pods: Sequence[RenderedPod]) -> set[tuple[str, str]]:
    """What Kubernetes' admission plugin refuses."""
    program = binaries.build(Home.default().root, lambda _line: None) / "podsecurity"
    given = json.dumps([pod.as_pod(f"pod-{index}") for index, pod in enumerate(pods)])
    done = subprocess.run([str(program)], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(pods[int(each["pod"].removeprefix("pod-"))].place, each["reason"]) for each in json.loads(done.stdout)}


def check_by_kyverno(pods: Sequence[RenderedPod]) -> set[tuple[str, str]]:
    """What Kyverno's policies for the Pod Security Standards report as failed."""
    program = binaries.build_module(Home.default().root, KYVERNO) / "kyverno"
    given = yaml.safe_dump_all(pod.as_pod(f"pod-{index}") for index, pod in enumerate(pods))
    options = ["--resource", "/dev/stdin", "--policy-report", "--output-format", "json"]
    done = subprocess.run([str(program), "apply", str(POLICIES), *options], input=given, capture_output=True, text=True)
    results = json.loads(done.stdout[done.stdout.index("{") :])["results"]
    policies = [path for path in POLICIES.glob("*.yaml") if path.name != "README.md"]
    assert {each["policy"] for each in results} == {path.stem for path in policies}, done.stderr
    numbers = [(each, resource["name"]) for each in results for resource in each["resources"]]
    assert len({name for _, name in numbers}) == len(pods), "Kyverno has not seen all pods"
    assert {each["result"] for each in results} <= {"pass", "fail", "skip"}
    return {
        (pods[int(name.removeprefix("pod-"))].place, each["policy"])
        for each, name in numbers
        if each["result"] == "fail"
    }


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(check_as_api_server, id="api-server"),
        pytest.param(check_by_kyverno, id="kyverno", marks=[pytest.mark.long, pytest.mark.timeout(7200)]),
    ],
)
def check(request: pytest.FixtureRequest) -> Check:
    """One of the programs. Kyverno's command line is built once, for minutes, or half an hour beside other work."""
    found: Check = request.param
    return found


def test_every_pod_keeps_the_restricted_level(check: Check, pods: list[RenderedPod]) -> None:
    assert check(pods) == set()


ROOT_USER: dict[str, Any] = {"runAsNonRoot": False, "runAsUser": 0}
MISTAKES: tuple[dict[str, Any], ...] = (
    {"allowPrivilegeEscalation": True},
    {"privileged": True},
    {"capabilities": {"drop": ["ALL"], "add": ["SYS_ADMIN"]}},
    {"seccompProfile": {"type": "Unconfined"}},
    ROOT_USER,
)


def test_each_mistake_is_found(check: Check) -> None:
    """Each in a pod of its own, and volumes and namespaces of the node."""
    changed: list[RenderedPod] = []
    for index, context in enumerate(MISTAKES):
        spec = copy.deepcopy(rendered_pods()[0].spec)
        spec["containers"][0].setdefault("securityContext", {}).update(context)
        changed.append(RenderedPod(f"context {index}", {"spec": spec}))
    for name, part in (("network", {"hostNetwork": True}), ("volume", {"hostPath": {"path": "/"}})):
        spec = copy.deepcopy(rendered_pods()[0].spec)
        spec.update(part if name == "network" else {"volumes": [{"name": "node", **part}]})
        changed.append(RenderedPod(name, {"spec": spec}))
    assert {place for place, _ in check(changed)} == {pod.place for pod in changed}
