"""A pod whose job can pass the preflight."""

from pathlib import Path

import pytest

from tests.trainer.support.pods import MountedPod
from tests.trainer.support.runs import Runs


@pytest.fixture
def pod(tmp_path: Path, runs: Runs) -> MountedPod:
    return MountedPod(tmp_path, runs)
