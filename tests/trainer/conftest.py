"""Fixtures for tests of whole runs."""

from pathlib import Path

import pytest

from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Small jobs on rows of very different lengths; each run is trained once per session."""
    return Runs(tmp_path_factory.mktemp("runs"))


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    """The directory of a job that has not started."""
    found = JobDirectory(tmp_path / "job")
    found.logs.mkdir(parents=True)
    return found
