"""A FinetuneSweep on the cluster: faults of one trial and of the operator, pruning, suspension and deletion."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from spotune.sweep import FinetuneSweep
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests import ROOT
from tests.cluster.finetune_jobs import CLAIM, INPUTS, READER, SMALL, Workplace
from tests.cluster.operator_install import Operator
from tests.cluster.pods import run_in

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

CODE = "sweep-code"
FILES = (ROOT / "examples" / "own-function" / "train.py", Path(__file__).parent / "own_function" / "slow_epochs.py")
CONFIG = {"images": 256, "batchSize": 32, "learningRate": 0.05, "seed": 1}
PATH = "training.config.learningRate"
RATES = [0.05, 0.02, 0.000001]
EPOCHS, PAUSE_SECONDS, ENDLESS = 60, 0.5, 100_000
HELD_SECONDS = 5.0
"""Pause of each epoch while other trials are looked at: no trial ends in these minutes."""
SECONDS_TO_START = 300.0
SECONDS_TO_END = 900.0


def manifest(workplace: Workplace, name: str, config: Mapping[str, Any], **spec: Any) -> dict[str, Any]:
    """A FinetuneSweep over the learning rate of the example's training function, with one CPU worker for each trial."""
    template = {
        "training": {"function": "slow_epochs:main", "code": f"{INPUTS}/{CODE}", "config": {**CONFIG, **config}},
        "workers": {"count": 1, "min": 1, "gpus": 0, "resources": SMALL},
        "head": {"resources": SMALL},
        "storage": {"existingClaim": CLAIM},
        "cluster": {"provider": "aks" if workplace.cluster.machine else "none", "image": workplace.cluster.image},
        "retry": {"backoff": {"initial": "1s", "max": "10s"}},
        "cleanup": {"after": "5s"},
    }
    content = {
        "apiVersion": "spotune.dev/v1alpha1",
        "kind": "FinetuneSweep",
        "metadata": {"name": name, "namespace": workplace.kubectl.namespace},
        "spec": {"search": {"algorithm": "grid"}, "maxConcurrent": 2, "template": {"spec": template}, **spec},
    }
    return FinetuneSweep.model_validate(content).model_dump(mode="json", exclude_unset=True)


class RunningSweep:
    """A sweep that is applied, and its trials by kubectl."""

    def __init__(self, kubectl: Kubectl, content: Mapping[str, Any]) -> None:
        self.kubectl = kubectl
        self.name: str = content["metadata"]["name"]
        kubectl("apply", "--filename=-", stdin=json.dumps(content))

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = self.kubectl.get("ftsweep", self.name).get("status", {})
        return found

    def condition(self, name: str) -> dict[str, Any]:
        return next((each for each in self.status().get("conditions", ()) if each["type"] == name), {})

    def jobs(self) -> dict[str, dict[str, Any]]:
        found = self.kubectl.get("ftj", f"--selector=spotune.dev/sweep={self.name}")
        return {job["metadata"]["name"]: job for job in found}

    def trial(self, number: int) -> dict[str, Any]:
        """The FinetuneJob of a trial; {} before it exists."""
        return self.jobs().get(f"{self.name}-{number}", {})

    def pods(self, number: int, component: str) -> list[dict[str, Any]]:
        selector = f"--selector=spotune.dev/job={self.name}-{number},app.kubernetes.io/component={component}"
        return [pod for pod in self.kubectl.get("pods", selector) if "deletionTimestamp" not in pod["metadata"]]

    def pod_uids(self, number: int) -> set[str]:
        return {pod["metadata"]["uid"] for component in ("head", "workers") for pod in self.pods(number, component)}

    def step(self, number: int) -> int:
        return int(self.trial(number).get("status", {}).get("step") or 0)

    def patch(self, spec: Mapping[str, Any]) -> None:
        self.kubectl("patch", "ftsweep", self.name, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def wait_for(self, what: str, holds: Callable[[], Any], seconds: float = SECONDS_TO_START) -> Any:
        return wait_for(f"{self.name}: {what}", seconds, holds, every=1.0)


@pytest.fixture(scope="module", autouse=True)
def _code(cluster: ClusterUnderTest, operator: Operator, workplace: Workplace) -> None:
    """The training function on the volume, and a ready operator."""
    folder = workplace.inputs / CODE
    folder.mkdir()
    for file in FILES:
        shutil.copy(file, folder)
    workplace.add_input(CODE)
    operator.wait_until_ready()


def test_loss_of_a_worker_concerns_one_trial_and_the_best_one_is_in_the_status(
    workplace: Workplace, operator: Operator
) -> None:
    parameters = {PATH: {"values": RATES}}
    enough = f"{INPUTS}/enough"
    config = {"epochs": EPOCHS, "pause": HELD_SECONDS, "untilFile": enough}
    sweep = RunningSweep(workplace.kubectl, manifest(workplace, "rates", config, parameters=parameters))
    sweep.wait_for("both trials to train", lambda: min(sweep.step(0), sweep.step(1)) >= 1)
    assert set(sweep.jobs()) == {"rates-0", "rates-1"}, "maxConcurrent is 2"
    undisturbed = sweep.pod_uids(1)

    (worker,) = sweep.pods(0, "workers")
    workplace.kubectl("delete", "pod", worker["metadata"]["name"], "--wait=false")
    operator.kill()  # the next one rebuilds the study from the status and the jobs
    sweep.wait_for("the restart", lambda: sweep.trial(0)["status"]["restarts"]["total"] >= 1)
    step = sweep.step(1)
    sweep.wait_for("trial 1 to make more steps", lambda: sweep.step(1) > step)
    assert sweep.pod_uids(1) == undisturbed, "the pods of the other trial are the same"
    assert sweep.trial(1)["status"]["restarts"]["total"] == 0
    run_in(workplace.kubectl, READER, "touch", enough)

    sweep.wait_for("the end", lambda: sweep.condition("Complete").get("status") == "True", SECONDS_TO_END)
    status = sweep.status()
    assert status["phase"] == "Complete"
    assert status["counts"] == {"running": 0, "complete": len(RATES), "pruned": 0, "failed": 0, "waiting": 0}
    assert [trial["parameters"][PATH] for trial in status["trials"]] == RATES
    assert set(sweep.jobs()) == {f"rates-{number}" for number in range(len(RATES))}, (
        "no trial is lost, and none exists twice"
    )
    restarts = {name: job["status"]["restarts"]["total"] for name, job in sweep.jobs().items()}
    assert restarts["rates-0"] >= 1
    assert [restarts[f"rates-{number}"] for number in (1, 2)] == [0, 0]

    values = {trial["name"]: trial["value"] for trial in status["trials"]}
    best = status["best"]
    assert best["value"] == values[best["name"]] == min(values.values())
    assert best["value"] == sweep.jobs()[best["name"]]["status"]["loss"]
    path = best["output"].removeprefix(f"pvc://{CLAIM}/")
    assert run_in(workplace.kubectl, READER, "ls", f"/data/{path}").split() == ["state.pt"]


def test_a_worse_trial_is_pruned_then_the_sweep_is_suspended_resumed_and_deleted(workplace: Workplace) -> None:
    """The second learning rate learns nothing, so its loss stays the higher one."""
    asha = {"algorithm": "asha", "minSteps": 10, "reductionFactor": 2}
    content = manifest(
        workplace,
        "halving",
        {"epochs": ENDLESS, "pause": PAUSE_SECONDS},
        parameters={PATH: {"values": [RATES[0], RATES[-1]]}},
        earlyStopping=asha,
    )
    sweep = RunningSweep(workplace.kubectl, content)
    sweep.wait_for("a pruned trial", lambda: sweep.status().get("counts", {}).get("pruned") == 1, SECONDS_TO_END)
    trials = sweep.status()["trials"]
    assert [trial["state"] for trial in trials] == ["Running", "Pruned"]
    assert "is not" in trials[1]["message"]
    assert trials[1]["evaluations"]
    sweep.wait_for("the end of its pods", lambda: not sweep.pod_uids(1))
    pruned = sweep.trial(1)
    assert pruned["spec"]["suspend"] is True
    assert pruned["metadata"]["labels"]["spotune.dev/pruned"] == "true"
    assert pruned["status"]["step"] >= 10, "its record stays"

    sweep.patch({"suspend": True})
    sweep.wait_for("the suspension", lambda: sweep.condition("Suspended").get("status") == "True")
    assert not sweep.pod_uids(0)
    step = sweep.step(0)
    sweep.patch({"suspend": False})
    sweep.wait_for("the first trial to train on", lambda: sweep.step(0) > step)
    assert sweep.trial(1)["spec"]["suspend"] is True, "it stays pruned"

    workplace.kubectl("delete", "ftsweep", sweep.name, "--wait=false")
    sweep.wait_for("the deletion of its trials", lambda: not sweep.jobs())
    sweep.wait_for("the end of all pods", lambda: not (sweep.pod_uids(0) | sweep.pod_uids(1)))
