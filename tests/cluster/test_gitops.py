"""What Argo CD and Flux make of a job, by the runtime of the one and the status library of the other."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from spotune.job import API_VERSION, KIND
from spotune_operator.errors import StalledError
from spotune_operator.reconcile.decide import stalled
from spotune_testcluster import binaries
from spotune_testcluster.home import Home
from tests.operator.support.scenarios import Life, a_cluster_job, a_life, a_training_life

pytestmark = pytest.mark.cluster

ARGO_CD = Path(__file__).parent.parent.parent / "manifests/argocd/health.yaml"
CUSTOMIZATION = "resource.customizations.health.spotune.dev_FinetuneJob"


class Health(NamedTuple):
    """What each says of an object, and why."""

    argo: str
    flux: str
    words: str


def new() -> Life:
    return Life(a_cluster_job())


def edited() -> Life:
    life = a_training_life()
    life.edit(life.job)
    return life


def silent() -> Life:
    life = a_training_life()
    life.is_silent(life.now - 100)
    life.decide()
    return life


def waiting() -> Life:
    life = a_training_life()
    life.has_pods(workers=0, pending=2)
    life.supervisor_says("WaitingForWorkers", step=10)
    life.decide(after=1900)
    return life


def suspending() -> Life:
    life = a_training_life()
    life.edit(a_cluster_job(suspend=True))
    life.decide()
    return life


def suspended() -> Life:
    life = suspending()
    life.see(pods=(), reading=None)
    life.decide(after=60)
    return life


def trained() -> Life:
    return ended("Done", "trained")


def failed() -> Life:
    return ended("Failed", "failed", why="the loss is not finite")


def ended(phase: str, state: str, why: str = "") -> Life:
    life = a_training_life()
    life.supervisor_says(phase, state=state, why=why, step=100)
    life.decide()
    return life


def refused() -> Life:
    life = a_training_life()
    error = StalledError("spec.workers.podTemplate", "is wrong")
    life.status = stalled(life.status, error, generation=life.generation, now=life.now)
    return life


EXPECTED: Mapping[Callable[[], Life], Health] = {
    new: Health("Progressing", "InProgress", "has not seen it yet"),
    a_life: Health("Progressing", "InProgress", "the head pod is being started"),
    a_training_life: Health("Healthy", "Current", "steps are made"),
    edited: Health("Progressing", "InProgress", "has not seen it yet"),
    silent: Health("Progressing", "InProgress", "the supervisor does not answer"),
    waiting: Health("Progressing", "InProgress", "0 of 2 workers run"),
    suspending: Health("Progressing", "InProgress", "the workers commit"),
    suspended: Health("Suspended", "InProgress", "all pods are gone"),
    trained: Health("Healthy", "Current", "the model is trained"),
    failed: Health("Degraded", "Failed", "the loss is not finite"),
    refused: Health("Degraded", "Failed", "spec.workers.podTemplate"),
}


def as_object(life: Life) -> dict[str, Any]:
    """The job as the API server has it; one that is new with the status that the definition gives it."""
    status = life.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    return {
        "apiVersion": API_VERSION,
        "kind": KIND,
        "metadata": {"name": "a", "namespace": "team", "generation": life.generation},
        "spec": {},
        "status": status if life.status.conditions else {"observedGeneration": -1},
    }


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> dict[Callable[[], Life], dict[str, str]]:
    """All moments, judged by both."""
    script = tmp_path_factory.mktemp("argocd") / "health.lua"
    script.write_text(yaml.safe_load(ARGO_CD.read_text())["data"][CUSTOMIZATION])
    program = binaries.build(Home.default().root, lambda _line: None) / "health"
    objects = json.dumps([as_object(make()) for make in EXPECTED])
    done = subprocess.run([program, script], input=objects, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return dict(zip(EXPECTED, json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("moment", EXPECTED, ids=lambda make: make.__name__)
def test_health_is_that_of_the_job(
    moment: Callable[[], Life], judged: dict[Callable[[], Life], dict[str, str]]
) -> None:
    found, expected = judged[moment], EXPECTED[moment]
    assert (found["argo"], found["flux"]) == (expected.argo, expected.flux)
    assert expected.words in found["argoMessage"]
