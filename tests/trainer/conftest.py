"""Runs of small jobs that several tests look at."""

import pytest

from tests.trainer.runs import Runs


@pytest.fixture(scope="session")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """Jobs over a corpus of very uneven rows; each finished run is made once."""
    return Runs(tmp_path_factory.mktemp("runs"))
