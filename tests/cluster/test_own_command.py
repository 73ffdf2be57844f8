"""The example of a program under torchrun on the cluster, from git: a launcher per pod, a lost pod, the same model."""

from pathlib import Path
from typing import Any

import pytest

from spotune.job import FinetuneJob
from spotune.job_file.load import replace_fields
from spotune_testcluster.pytest_plugin import ClusterUnderTest, Fault
from spotune_trainer.job_directory.layout import JobDirectory
from tests import ROOT
from tests.cluster.faults import pods
from tests.cluster.faults.harness import FaultHarness
from tests.cluster.finetune_jobs import CLAIM, INPUTS, SMALL, WORKERS, Workplace
from tests.cluster.operator_install import Operator
from tests.trainer.training_functions.ranks import run_generation
from tests.trainer.user_code.git_server import REPOSITORY, make_repository

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(600)]

CODE = "torchrun"
STEPS = 200
COMMAND = ("torchrun", "train.py", "--epochs", "10", "--rows", "1280", "--save-every", "10", "--pause")
"""Ten epochs of 1,280 rows, 64 in a step."""


def manifest(workplace: Workplace, pause_seconds: float) -> dict[str, Any]:
    """A FinetuneJob with the example's program, whose code is in a git repository on the volume."""
    return {
        "apiVersion": "spotune.dev/v1alpha1",
        "kind": "FinetuneJob",
        "metadata": {"name": CODE, "namespace": workplace.kubectl.namespace},
        "spec": {
            "training": {
                "command": [*COMMAND, str(pause_seconds)],
                "codeFrom": {"git": {"url": f"file://{INPUTS}/{CODE}/{REPOSITORY}", "revision": "main"}},
            },
            "workers": {"count": WORKERS, "min": WORKERS, "gpus": 0, "resources": SMALL},
            "head": {"resources": SMALL},
            "storage": {"existingClaim": CLAIM},
            "cluster": {"provider": "none", "image": workplace.cluster.image},
            "retry": {"backoff": {"initial": "1s", "max": "10s"}},
            "cleanup": {"after": "5s"},
        },
    }


def test_torchrun_trains_through_the_loss_of_a_pod_to_the_bits_of_an_undisturbed_run(
    cluster: ClusterUnderTest, operator: Operator, workplace: Workplace, tmp_path: Path
) -> None:
    program = ROOT / "examples" / CODE / "train.py"
    (commit,) = make_repository(workplace.inputs / CODE, {"train.py": program.read_text(encoding="utf-8")})
    workplace.add_input(CODE)
    with workplace.running(manifest(workplace, pause_seconds=0.4)) as job:
        harness = FaultHarness(cluster, Fault(cluster), operator, job)
        pods.worker_pod_deleted(harness)
        ended = job.wait_until_complete()
        artifacts = job.artifacts(tmp_path / "artifacts")
        harness.assert_status_invariants(artifacts)

    assert ended.status["restarts"]["total"] == 1
    assert [line["step"] for line in artifacts.steps()] == list(range(1, STEPS + 1))
    assert {line["code"] for line in artifacts.ledger.records("generation-started")} == {commit}
    undisturbed = JobDirectory(tmp_path / "undisturbed")
    local = FinetuneJob.model_validate(manifest(workplace, pause_seconds=0.0))
    code = {"spec.training.code": str(program.parent), "spec.training.codeFrom": None}
    run_generation(undisturbed, replace_fields(local, code), nodes=2)
    assert (artifacts.directory.export / "state.pt").read_bytes() == (undisturbed.export / "state.pt").read_bytes()
