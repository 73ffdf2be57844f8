"""What every test shares: the same small, offline machine, whoever runs them."""

import gc
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

gc.disable()  # while the tests are imported, which makes millions of objects that stay


@pytest.hookimpl(tryfirst=True)  # before tests are left out by their markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark further parameters of slow tests as long, and refuse a test that the Makefile would not find."""
    seen: set[str] = set()
    for item in items:
        if item.get_closest_marker("slow") and not any(map(item.get_closest_marker, ("every_parameter", "long"))):
            name = item.nodeid.partition("[")[0]
            if name in seen:
                item.add_marker("long")
            seen.add(name)
    for marker, folders in FOLDERS.items():
        places = [_HERE / folder for folder in folders]
        for item in items:
            if item.get_closest_marker(marker) and not any(item.path.is_relative_to(place) for place in places):
                raise pytest.UsageError(f"{item.nodeid}: the Makefile looks for the marker {marker} in {folders} only")


def pytest_collection_finish() -> None:
    """Let later garbage collections leave out what the imports have made, millions of objects."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Free it in the ordinary way: extensions warn about objects that are left at the end of a process."""
    gc.unfreeze()
