"""Runs of small jobs that several tests look at."""

from pathlib import Path

import pytest

from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Jobs over a corpus of very uneven rows; each finished run is made once."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    """The directory of a job that nobody has started."""
    found = JobDirectory(tmp_path / "job")
    found.logs.mkdir(parents=True)
    return found
