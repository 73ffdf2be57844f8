"""What every test shares: the same small, offline machine, whoever runs them."""

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

import tests.environment  # noqa: F401

# A machine that many share may take a second over anything.
settings.register_profile("shared", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared")

FOLDERS = {"cluster": ("cluster",), "ray": ("examples", "proof", "releases", "serve", "trainer")}
"""The folders in which the Makefile looks for tests with these markers."""
_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test that no part of `make test` would find."""
    for marker, folders in FOLDERS.items():
        places = [_HERE / folder for folder in folders]
        for item in items:
            if item.get_closest_marker(marker) and not any(item.path.is_relative_to(place) for place in places):
                raise pytest.UsageError(f"{item.nodeid}: the Makefile looks for the marker {marker} in {folders} only")
