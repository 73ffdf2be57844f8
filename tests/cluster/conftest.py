"""What several cluster tests share: the installed operator, a place for its jobs, and jobs that nobody disturbs."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests.cluster import finetune_jobs, operator_install
from tests.cluster.finetune_jobs import Remains, Workplace
from tests.cluster.operator_install import Operator


@pytest.fixture(scope="session")
def operator(cluster: ClusterUnderTest) -> Iterator[Operator]:
    """The operator, installed from manifests/, from the first test that wants it to the last of all."""
    with operator_install.installed(cluster) as found:
        yield found


@pytest.fixture(scope="session")
def workplace(cluster: ClusterUnderTest) -> Iterator[Workplace]:
    """Where tiny jobs are started: a namespace with their model and data on a volume."""
    with finetune_jobs.workplace(cluster) as found:
        yield found


@pytest.fixture(scope="session")
def undisturbed(
    operator: Operator, workplace: Workplace, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int], Remains]:
    """What a job of so many steps leaves that nobody disturbs; each is run once, when it is first asked for."""
    folder = tmp_path_factory.mktemp("undisturbed")
    found: dict[int, Remains] = {}

    def remains(steps: int) -> Remains:
        if steps not in found:
            found[steps] = _train(operator, workplace, steps, folder)
        return found[steps]

    return remains


def _train(operator: Operator, workplace: Workplace, steps: int, folder: Path) -> Remains:
    operator.wait_until_ready()
    manifest = workplace.manifest(f"undisturbed-{steps}", training={"maxSteps": steps})
    with workplace.running(manifest) as job:
        job.wait_until_complete()
        return job.remains(folder)
