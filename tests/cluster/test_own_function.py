"""The example of a training function on the cluster, from a ConfigMap: two faults, and the same model."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from spotune.job import FinetuneJob
from spotune.job_file.load import replace_fields
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_trainer.job_directory.layout import JobDirectory
from tests import ROOT
from tests.cluster.faults import pods, processes
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.finetune_jobs import CLAIM, SMALL, WORKERS, Workplace
from tests.cluster.operator_install import Operator
from tests.trainer.training_functions.ranks import run_generation

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1800)]

CODE = "own-function"
FILES = (ROOT / "examples" / "own-function" / "train.py", Path(__file__).parent / "own_function" / "slow_epochs.py")
CONFIG = {"images": 512, "batchSize": 32, "learningRate": 0.05, "seed": 1}
ENDLESS, PAUSE_SECONDS, EPOCHS_TO_THE_END = 100_000, 0.3, 5
FAULTS = (processes.worker_process_killed, pods.head_pod_deleted_by_force)
"""The loss of a pod and of a node: `test_own_command.py` and `test_ray_examples.py`."""


def manifest(workplace: Workplace, config: Mapping[str, Any]) -> dict[str, Any]:
    """A FinetuneJob with the example's training function, whose code is in a ConfigMap."""
    training = {"function": "slow_epochs:main", "codeFrom": {"configMap": {"name": CODE}}}
    return {
        "apiVersion": "spotune.dev/v1alpha1",
        "kind": "FinetuneJob",
        "metadata": {"name": CODE, "namespace": workplace.kubectl.namespace},
        "spec": {
            "training": {**training, "config": {**CONFIG, **config}},
            "workers": {"count": WORKERS, "min": WORKERS, "gpus": 0, "resources": SMALL},
            "head": {"resources": SMALL},
            "storage": {"existingClaim": CLAIM},
            "cluster": {
                "provider": "aks" if workplace.cluster.machine else "none",
                "image": workplace.cluster.image,
            },
            "retry": {"backoff": {"initial": "1s", "max": "10s"}},
            "cleanup": {"after": "5s"},
        },
    }


@pytest.fixture(scope="module")
def harness(cluster: ClusterUnderTest, operator: Operator, workplace: Workplace) -> Iterator[FaultHarness]:
    """The job into which all tests of this module inject faults."""
    code = {file.name: file.read_text(encoding="utf-8") for file in FILES}
    workplace.kubectl.apply({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": CODE}, "data": code})
    with workplace.running(manifest(workplace, {"epochs": ENDLESS, "pause": PAUSE_SECONDS})) as job:
        yield FaultHarness(cluster, Fault(cluster), operator, job)


@pytest.mark.parametrize("inject", FAULTS, ids=lambda inject: inject.__name__)
def test_training_recovers(inject: Callable[[FaultHarness], None], harness: FaultHarness) -> None:
    harness.inject_once(inject)


def test_model_and_status_are_those_of_an_undisturbed_run(
    harness: FaultHarness, workplace: Workplace, tmp_path: Path
) -> None:
    for inject in FAULTS:  # all were injected before, unless this test is tried again alone
        harness.inject_once(inject)
    job = harness.job
    job.suspend()
    epochs = job.progress()["step"] + EPOCHS_TO_THE_END
    job.patch({"suspend": False, "training": {"config": {"epochs": epochs}}})
    ended = job.wait_until_complete()
    artifacts = job.artifacts(tmp_path / "artifacts")

    assert ended.status["restarts"]["total"] == len(FAULTS)
    harness.assert_status_invariants(artifacts)
    assert [line["step"] for line in artifacts.steps()] == list(range(1, epochs + 1))
    versions = {line["code"] for line in artifacts.ledger.records("generation-started")}
    assert len(versions) == 1, "all groups have trained with the same code"
    undisturbed, folder = JobDirectory(tmp_path / "undisturbed"), tmp_path / "code"
    folder.mkdir()
    for file in FILES:
        shutil.copy(file, folder)
    local = FinetuneJob.model_validate(manifest(workplace, {"epochs": epochs, "pause": 0.0}))
    code = {"spec.training.code": str(folder), "spec.training.codeFrom": None}
    run_generation(undisturbed, replace_fields(local, code))
    assert (artifacts.directory.export / "state.pt").read_bytes() == (undisturbed.export / "state.pt").read_bytes()
