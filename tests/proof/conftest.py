"""The proof gets no second try: a finding that does not come again is a finding."""

from pathlib import Path

import pytest

_FOLDER = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Let a failure in this folder stand, also under `--reruns`."""
    for item in items:
        if item.path.is_relative_to(_FOLDER):
            item.add_marker(pytest.mark.flaky(reruns=0))
