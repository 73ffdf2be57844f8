"""What every test shares: the same small, offline machine, whoever runs them."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tests.environment  # noqa: F401

# A machine that many share may take a second over anything.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

HERE = Path(__file__).parent
FOLDERS = {"cluster": ("cluster",), "ray": ("examples", "proof", "serve", "trainer")}
"""The folders in which the Makefile looks for tests with these markers."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that no part of `make test` would find."""
    for item in items:
        for marker, folders in FOLDERS.items():
            if item.get_closest_marker(marker) and item.path.relative_to(HERE).parts[0] not in folders:
                raise pytest.UsageError(f"{item.nodeid} is marked {marker}: the Makefile looks in {folders} for such tests")
