"""Fixtures of several cluster tests: the installed operator, a workplace for jobs, and undisturbed runs."""

import json
from collections.abc import Callable, Iterator

import pytest

from spotune.job import FinetuneJob
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_trainer.job_directory.layout import JobDirectory
from tests.cluster import finetune_jobs, operator_install
from tests.cluster.finetune_jobs import INPUTS, WORKERS, RunArtifacts, Workplace
from tests.cluster.operator_install import Operator
from tests.trainer.support.runs import Layout, train_generation

SECONDS = 900
"""Time limit of a test on the cluster without one of its own: the first test starts the cluster."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests on the cluster a time limit that allows for its start."""
    for item in items:
        if "cluster" in getattr(item, "fixturenames", ()) and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(SECONDS))


@pytest.fixture(scope="session")
def operator(cluster: ClusterUnderTest) -> Iterator[Operator]:
    """The operator, installed by the chart when the first test needs it, and removed after the last test."""
    with operator_install.installed(cluster) as found:
        yield found


@pytest.fixture(scope="session")
def workplace(cluster: ClusterUnderTest) -> Iterator[Workplace]:
    """A workplace for tiny jobs: a namespace with their model and data on a volume."""
    with finetune_jobs.workplace(cluster) as found:
        yield found


@pytest.fixture(scope="session")
def undisturbed(workplace: Workplace, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], RunArtifacts]:
    """The artifacts of an undisturbed run with that number of steps: two local processes, no Ray, no cluster."""
    folder = tmp_path_factory.mktemp("undisturbed")

    def artifacts(steps: int) -> RunArtifacts:
        directory = JobDirectory(folder / str(steps))
        if not directory.export.exists():
            directory.root.mkdir()
            manifest = json.dumps(workplace.manifest("undisturbed", training={"maxSteps": steps}))
            job = FinetuneJob.model_validate_json(manifest.replace(INPUTS, str(workplace.inputs)))
            execution = job.spec.execution
            layout, batch = Layout(WORKERS, int(execution.zero_stage)), int(execution.micro_batch_size)
            train_generation(directory, job, layout, micro_batch_size=batch, timeout=900.0)
        return RunArtifacts(directory)

    return artifacts
