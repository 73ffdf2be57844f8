"""The health of objects in Argo CD and Flux, by the former's Lua runtime and the latter's status library."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from spotune.custom_resource import API_VERSION
from spotune.job import KIND
from spotune.service import SERVICE_KIND
from spotune.sweep import SWEEP_KIND
from spotune_operator.errors import StalledError
from spotune_operator.reconcile.decide import stalled
from spotune_testcluster import binaries
from spotune_testcluster.home import Home
from tests import ROOT
from tests.api.support.sweep_files import a_sweep
from tests.operator.serving.scenario import OUTPUT, PENDING
from tests.operator.serving.scenario import Scenario as ServiceScenario
from tests.operator.support.scenarios import Scenario, a_cluster_job, new_scenario, training_scenario
from tests.operator.sweeps.scenario import GRID, SweepScenario, run_to_the_end

pytestmark = pytest.mark.cluster

ARGO_CD = ROOT / "manifests/argocd/health.yaml"
CUSTOMIZATION = "resource.customizations.health.spotune.dev_"


class Health(NamedTuple):
    """The health of an object in each tool, and words of the message."""

    argo: str
    flux: str
    words: str


def new() -> Scenario:
    return Scenario(a_cluster_job())


def edited() -> Scenario:
    scenario = training_scenario()
    scenario.edit(scenario.job)
    return scenario


def silent() -> Scenario:
    scenario = training_scenario()
    scenario.polls_fail(scenario.now - 100)
    scenario.decide()
    return scenario


def waiting() -> Scenario:
    scenario = training_scenario()
    scenario.has_pods(workers=0, pending=2)
    scenario.supervisor_reports("WaitingForWorkers", step=10)
    scenario.decide(after=1900)
    return scenario


def suspending() -> Scenario:
    scenario = training_scenario()
    scenario.edit(a_cluster_job(suspend=True))
    scenario.decide()
    return scenario


def suspended() -> Scenario:
    scenario = suspending()
    scenario.observe(pods=(), poll=None)
    scenario.decide(after=60)
    return scenario


def trained() -> Scenario:
    return ended("Done", "trained")


def failed() -> Scenario:
    return ended("Failed", "failed", why="the loss is not finite")


def ended(phase: str, state: str, why: str = "") -> Scenario:
    scenario = training_scenario()
    scenario.supervisor_reports(phase, state=state, why=why, step=100)
    scenario.decide()
    return scenario


def refused() -> Scenario:
    scenario = training_scenario()
    error = StalledError("spec.workers.podTemplate", "is wrong")
    scenario.status = stalled(scenario.status, error, generation=scenario.generation, now=scenario.now)
    return scenario


EXPECTED: Mapping[Callable[[], Scenario], Health] = {
    new: Health("Progressing", "InProgress", "has not seen it yet"),
    new_scenario: Health("Progressing", "InProgress", "the head pod is starting"),
    training_scenario: Health("Healthy", "Current", "the model is being trained"),
    edited: Health("Progressing", "InProgress", "has not seen it yet"),
    silent: Health("Progressing", "InProgress", "the supervisor does not answer"),
    waiting: Health("Progressing", "InProgress", "0 of 2 workers run"),
    suspending: Health("Progressing", "InProgress", "the workers commit"),
    suspended: Health("Suspended", "InProgress", "all pods are deleted"),
    trained: Health("Healthy", "Current", "the model is trained"),
    failed: Health("Degraded", "Failed", "the loss is not finite"),
    refused: Health("Degraded", "Failed", "spec.workers.podTemplate"),
}


def as_object(kind: str, scenario: Scenario | ServiceScenario | SweepScenario) -> dict[str, Any]:
    """The object in the API server. A new one has the default status of the definition."""
    status = scenario.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "metadata": {"name": "a", "namespace": "team", "generation": scenario.generation},
        "spec": {},
        "status": status if scenario.status.conditions else {"observedGeneration": -1},
    }


def judge(kind: str, objects: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, str]]:
    """The health of objects of a kind in both tools."""
    script = folder / "health.lua"
    script.write_text(yaml.safe_load(ARGO_CD.read_text())["data"][CUSTOMIZATION + kind])
    program = binaries.build(Home.default().root, lambda _line: None) / "health"
    done = subprocess.run([program, script], input=json.dumps(objects), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found: list[dict[str, str]] = json.loads(done.stdout)
    return found


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[Callable[[], Scenario], dict[str, str]]:
    """The health of every scenario in both tools."""
    found = judge(KIND, [as_object(KIND, make()) for make in EXPECTED], tmp_path_factory.mktemp("argocd"))
    return dict(zip(EXPECTED, found, strict=True))


@pytest.mark.parametrize("moment", EXPECTED, ids=lambda make: make.__name__)
def test_health_is_that_of_the_job(
    moment: Callable[[], Scenario], judged: dict[Callable[[], Scenario], dict[str, str]]
) -> None:
    check(judged[moment], EXPECTED[moment])


def check(found: Mapping[str, str], expected: Health) -> None:
    """Compare the health of an object in both tools."""
    assert (found["argo"], found["flux"]) == (expected.argo, expected.flux)
    assert expected.words in found["argoMessage"]


def waiting_service() -> ServiceScenario:
    scenario = ServiceScenario()
    scenario.job(phase="Training")
    scenario.decide()
    return scenario


def serving_service() -> ServiceScenario:
    scenario = ServiceScenario()
    scenario.serves()
    scenario.decide()
    return scenario


def upgrading_service() -> ServiceScenario:
    scenario = serving_service()
    scenario.job(OUTPUT, 240, "Complete")
    scenario.ray_service("DEPLOYING", pending_cluster=PENDING)
    scenario.decide()
    return scenario


def failing_service() -> ServiceScenario:
    scenario = serving_service()
    scenario.job(OUTPUT, 240, "Complete")
    scenario.ray_service("DEPLOY_FAILED", "JobError: no config.json", pending_cluster=PENDING)
    scenario.decide()
    return scenario


def suspended_service() -> ServiceScenario:
    scenario = serving_service()
    scenario.edit(suspend=True)
    scenario.observe(children={}, pods=[])
    scenario.decide()
    return scenario


EXPECTED_OF_SERVICES: Mapping[Callable[[], ServiceScenario], Health] = {
    waiting_service: Health("Progressing", "InProgress", "waiting for the FinetuneJob sql"),
    serving_service: Health("Healthy", "Current", "the endpoint answers"),
    upgrading_service: Health("Progressing", "InProgress", "DEPLOYING"),
    failing_service: Health("Degraded", "Failed", "no config.json"),
    suspended_service: Health("Suspended", "InProgress", "no pods run"),
}


@pytest.mark.parametrize("moment", EXPECTED_OF_SERVICES, ids=lambda make: make.__name__)
def test_health_is_that_of_the_service(moment: Callable[[], ServiceScenario], tmp_path: Path) -> None:
    (found,) = judge(SERVICE_KIND, [as_object(SERVICE_KIND, moment())], tmp_path)
    check(found, EXPECTED_OF_SERVICES[moment])


def running_sweep() -> SweepScenario:
    scenario = SweepScenario()
    scenario.reconcile()
    scenario.reconcile()
    return scenario


def complete_sweep() -> SweepScenario:
    scenario = SweepScenario()
    run_to_the_end(scenario, [0.3, 0.1, 0.2, 0.6, 0.5, 0.4])
    return scenario


def failed_sweep() -> SweepScenario:
    scenario = SweepScenario(a_sweep(**GRID, budget={"maxFailedTrials": 2}))
    scenario.reconcile()
    scenario.fails(0)
    scenario.fails(1)
    scenario.reconcile()
    return scenario


def stalled_sweep() -> SweepScenario:
    scenario = running_sweep()
    scenario.has_condition(0, "Stalled", "VolumeFull", "the volume is full")
    scenario.reconcile()
    return scenario


def suspended_sweep() -> SweepScenario:
    scenario = SweepScenario(a_sweep(**GRID, suspend=True))
    scenario.reconcile()
    return scenario


EXPECTED_OF_SWEEPS: Mapping[Callable[[], SweepScenario], Health] = {
    running_sweep: Health("Progressing", "InProgress", "running"),
    complete_sweep: Health("Healthy", "Current", "6 complete"),
    failed_sweep: Health("Degraded", "Failed", "the loss is not finite"),
    stalled_sweep: Health("Degraded", "Failed", "the volume is full"),
    suspended_sweep: Health("Suspended", "InProgress", "no trial has pods"),
}


@pytest.mark.parametrize("moment", EXPECTED_OF_SWEEPS, ids=lambda make: make.__name__)
def test_health_is_that_of_the_sweep(moment: Callable[[], SweepScenario], tmp_path: Path) -> None:
    (found,) = judge(SWEEP_KIND, [as_object(SWEEP_KIND, moment())], tmp_path)
    check(found, EXPECTED_OF_SWEEPS[moment])
