"""The folders show the architecture: few modules in each, no import cycles, and a layer for every folder."""

from collections import Counter
from pathlib import Path

import pytest

from tests import ROOT
from tests.import_graph import PACKAGES, cycles, find_cycle, levels, module_graph

MAX_MODULES_PER_FOLDER = 12
MAX_MODULES_AT_ROOT = 6
SOURCES = {
    "spotune": ROOT / "api/spotune",
    "spotune_client": ROOT / "client/spotune_client",
    "spotune_operator": ROOT / "operator/spotune_operator",
    "spotune_serve": ROOT / "serve/spotune_serve",
    "spotune_trainer": ROOT / "trainer/spotune_trainer",
}


def modules_per_folder(package: Path) -> Counter[Path]:
    """How many modules each folder holds; `__init__.py` is not counted."""
    return Counter(module.parent for module in package.rglob("*.py") if module.name != "__init__.py")


@pytest.mark.parametrize("package", PACKAGES)
def test_no_folder_is_crowded(package: str) -> None:
    found = modules_per_folder(SOURCES[package])
    assert found
    assert {folder: count for folder, count in found.items() if count > MAX_MODULES_PER_FOLDER} == {}


@pytest.mark.parametrize("package", PACKAGES)
def test_few_modules_lie_at_the_root_of_a_package(package: str) -> None:
    assert modules_per_folder(SOURCES[package])[SOURCES[package]] <= MAX_MODULES_AT_ROOT


@pytest.mark.parametrize("package", PACKAGES)
def test_nothing_imports_in_a_circle(package: str) -> None:
    assert module_graph(package)
    assert cycles(package) == []


def test_a_circle_is_found_and_named() -> None:
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": set()})[:1] in (["a"], ["b"], ["c"])
    assert find_cycle({"a": {"b"}, "b": {"c"}, "c": set()}) == []
    assert list(levels({"a": {"b"}, "b": set()})) == [["b"], ["a"]]


@pytest.mark.parametrize("package", PACKAGES)
def test_test_folders_mirror_the_package(package: str) -> None:
    """Except for support/, journeys/ and golden/, which hold no tests of one module."""
    tests = ROOT / "tests" / SOURCES[package].parent.name
    others = {"support", "journeys", "golden", "__pycache__"}
    folders = {path.relative_to(tests) for path in tests.rglob("*") if path.is_dir() and path.name not in others}
    folders = {folder for folder in folders if not others & set(folder.parts)}
    assert folders
    assert {str(folder) for folder in folders if not (SOURCES[package] / folder).is_dir()} == set()
