"""Three examples of Ray on the cluster: a worker, the head and a node are lost, and the model is the same."""

import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

from spotune.job import FinetuneJob
from spotune.job_file.load import replace_fields
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_trainer.job_directory.layout import JobDirectory
from tests import ROOT
from tests.cluster.faults import nodes, pods, processes
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.finetune_jobs import CLAIM, INPUTS, SMALL, WORKERS, Workplace
from tests.cluster.operator_install import Operator
from tests.trainer.training_functions.ranks import run_generation

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(900)]

SLOW = Path(__file__).parent / "own_function"
RAY_EXAMPLES = ROOT / "tests" / "trainer" / "training_functions" / "support" / "ray_examples"
FAULTS = (processes.worker_process_killed, pods.head_pod_deleted_by_force, nodes.node_of_a_worker_crashed)
ENDLESS, EPOCHS_TO_THE_END = 100_000, 3


@dataclass(frozen=True)
class Example:
    """An example of Ray.

    Attributes:
        name: of its job, and of its folder on the volume.
        module: with `main`, which trains at a pace.
        files: what the folder has, by the folder inside it.
        config: argument of `main`, besides `epochs` and `pause`.
        pause: seconds that a step takes longer.
        steps_per_epoch: reports of an epoch.
        weights: the exported weights by name.
    """

    name: str
    module: str
    files: Mapping[str, tuple[Path, ...]]
    config: Mapping[str, Any]
    pause: float
    steps_per_epoch: int
    weights: Callable[[Path], Mapping[str, torch.Tensor]]


def _of_deepspeed(export: Path) -> Mapping[str, torch.Tensor]:
    return dict(get_fp32_state_dict_from_zero_checkpoint(str(export)))


def _of_lightning(export: Path) -> Mapping[str, torch.Tensor]:
    weights: Mapping[str, torch.Tensor] = torch.load(export / "lightning.ckpt")["state_dict"]
    return weights


def _of_spotune_train(export: Path) -> Mapping[str, torch.Tensor]:
    weights: Mapping[str, torch.Tensor] = torch.load(export / "state.pt", weights_only=True)["model"]
    return weights


EXAMPLES = (
    Example(
        "ray-fashion-mnist",
        "slow_fashion",
        {
            ".": (SLOW / "slow_fashion.py",),
            "ray_examples": tuple(RAY_EXAMPLES / f"{name}.py" for name in ("__init__", "fashion_mnist")),
        },
        {"batch_size_per_worker": 32, "lr": 0.05, "every": 3},
        pause=0.4,
        steps_per_epoch=4,
        weights=_of_spotune_train,
    ),
    Example(
        "ray-deepspeed",
        "slow_pairs",
        {".": (ROOT / "examples" / "ray-deepspeed" / "classify.py", SLOW / "slow_pairs.py")},
        {"pairs": 64, "batchSize": 16, "learningRate": 0.001, "zeroStage": 3, "seed": 1},
        pause=1.0,
        steps_per_epoch=1,
        weights=_of_deepspeed,
    ),
    Example(
        "ray-lightning",
        "slow_lightning",
        {
            ".": (SLOW / "slow_lightning.py",),
            "ray_examples": tuple(
                RAY_EXAMPLES / f"{name}.py" for name in ("__init__", "fashion_mnist", "lightning_images")
            ),
        },
        {"every": 3},
        pause=0.4,
        steps_per_epoch=4,
        weights=_of_lightning,
    ),
)


def manifest(example: Example, workplace: Workplace, epochs: int, pause: float) -> dict[str, Any]:
    """A FinetuneJob with the function of an example, whose code is on the volume."""
    config = {**example.config, "epochs": epochs, "pause": pause}
    code = f"{INPUTS}/{example.name}"
    return {
        "apiVersion": "spotune.dev/v1alpha1",
        "kind": "FinetuneJob",
        "metadata": {"name": example.name, "namespace": workplace.kubectl.namespace},
        "spec": {
            "training": {"function": f"{example.module}:main", "code": code, "config": config},
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


@pytest.fixture(scope="module", params=EXAMPLES, ids=lambda example: example.name)
def example(request: pytest.FixtureRequest) -> Example:
    found: Example = request.param
    return found


@pytest.fixture(scope="module")
def harness(
    example: Example, cluster: ClusterUnderTest, operator: Operator, workplace: Workplace
) -> Iterator[FaultHarness]:
    """The job of an example, into which the tests inject faults."""
    for folder, files in example.files.items():
        (workplace.inputs / example.name / folder).mkdir(parents=True, exist_ok=True)
        for file in files:
            shutil.copy(file, workplace.inputs / example.name / folder)
    workplace.add_input(example.name)
    fault = Fault(cluster)
    with workplace.running(manifest(example, workplace, ENDLESS, example.pause)) as job:
        yield FaultHarness(cluster, fault, operator, job)
    fault.mend()


@pytest.mark.parametrize("inject", FAULTS, ids=lambda inject: inject.__name__)
def test_training_recovers(inject: Callable[[FaultHarness], None], harness: FaultHarness) -> None:
    inject(harness)


def test_model_and_status_are_those_of_an_undisturbed_run(
    example: Example, harness: FaultHarness, workplace: Workplace, tmp_path: Path
) -> None:
    assert len(harness.injected_faults) == len(FAULTS), "an earlier fault was not survived"
    job = harness.job
    job.suspend()
    epochs = job.progress()["step"] // example.steps_per_epoch + EPOCHS_TO_THE_END
    job.patch({"suspend": False, "training": {"config": {"epochs": epochs}}})
    ended = job.wait_until_complete()
    artifacts = job.artifacts(tmp_path / "artifacts")

    assert ended.status["restarts"]["total"] == len(FAULTS)
    harness.assert_status_invariants(artifacts)
    assert [line["step"] for line in artifacts.steps()] == list(range(1, epochs * example.steps_per_epoch + 1))
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    local = FinetuneJob.model_validate(manifest(example, workplace, epochs, 0.0))
    code = str(workplace.inputs / example.name)
    run_generation(undisturbed, replace_fields(local, {"spec.training.code": code}))
    found, expected = example.weights(artifacts.directory.export), example.weights(undisturbed.export)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
