"""What the repository says about itself is true: README, make targets, pins, links, and the size of its modules."""

import re
import subprocess
import tomllib
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from spotune_trainer.job_directory.layout import JobDirectory
from tests import ROOT
from tests.pages import PAGES, page_name

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
PIN = re.compile(r"^([A-Za-z0-9._-]+)==(\S+)", re.MULTILINE)
CONSTRAINTS = sorted(ROOT.glob("constraints/*.txt"))
MAX_MODULE_LINES = 400


def pins(name: str) -> dict[str, str]:
    text = (ROOT / "constraints" / name).read_text()
    return {canonicalize_name(package): version for package, version in PIN.findall(text)}


def tracked_files() -> list[Path]:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def requirements(extras: list[str], groups: list[str]) -> list[Requirement]:
    lines: list[str] = list(PROJECT["project"]["dependencies"]) if extras else []
    for extra in extras:
        lines += PROJECT["project"]["optional-dependencies"][extra]
    for group in groups:
        lines += [line for line in PROJECT["dependency-groups"][group] if isinstance(line, str)]
    return [Requirement(line) for line in lines]


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = set(re.findall(r"(?:`|\$ )make ([a-z-]+)", page.read_text()))
    assert named <= targets


def test_make_explains_every_target() -> None:
    text = (ROOT / "Makefile").read_text()
    phony = set(re.findall(r"^\.PHONY: ([a-z-]+)$", text, re.MULTILINE))
    shown = subprocess.run(["make", "help"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert phony == set(re.findall(r"^ +make ([a-z-]+) +\S", shown, re.MULTILINE))


@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_local_link_of_a_page_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
    missing = [link for link in links if "://" not in link and not (page.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("point", entry_points(group="spotune.commands"), ids=lambda point: point.name)
def test_every_entry_point_resolves(point: Any) -> None:
    assert callable(point.load())


def test_the_page_on_the_job_directory_names_every_file() -> None:
    page = (ROOT / "docs" / "job-directory.md").read_text()
    directory = JobDirectory(Path("DIR"))
    names = [name for name, value in vars(JobDirectory).items() if isinstance(value, property)]
    paths = [str(getattr(directory, name)) for name in names]
    assert paths
    assert [path for path in paths if path not in page] == []


def test_no_tracked_file_holds_the_address_of_a_package_index() -> None:
    address = re.compile(r"index-url|find-links|trusted-host|GOPROXY|https?://\S*(pypi|/simple\b|artifactory|goproxy)")
    others = [file for file in tracked_files() if file != Path(__file__)]
    found = [page_name(file) for file in others if address.search(file.read_text(errors="replace"))]
    assert found == []


def test_there_is_no_lock_file() -> None:
    assert [file for file in tracked_files() if file.name == "uv.lock"] == []


@pytest.mark.parametrize(
    ("name", "extras", "groups"),
    [
        ("dev.txt", ["operator", "serve", "trainer"], ["lint", "test", "docs", "dev"]),
        ("trainer.txt", ["trainer"], []),
        ("serve.txt", ["serve"], []),
        ("serve-vllm.txt", ["serve", "vllm"], []),
        ("client.txt", ["client"], []),
        ("operator.txt", ["operator"], []),
        ("build.txt", [], ["build"]),
    ],
)
def test_the_pins_satisfy_what_the_project_requires(name: str, extras: list[str], groups: list[str]) -> None:
    pinned = pins(name)
    wrong = [
        str(requirement)
        for requirement in requirements(extras, groups)
        if not requirement.specifier.contains(pinned.get(canonicalize_name(requirement.name), "0"))
    ]
    assert wrong == []


@pytest.mark.parametrize("path", CONSTRAINTS, ids=lambda path: path.name)
def test_every_pin_has_a_hash(path: Path) -> None:
    """Without which pip and uv, told to require them, refuse the whole file."""
    head, *entries = re.split(r"^(?=\S)", path.read_text(), flags=re.MULTILINE)
    assert (head, len(entries)) == ("", len(pins(path.name)))
    assert [entry.split()[0] for entry in entries if not re.search(r"\\\n +--hash=sha256:[0-9a-f]{64}\b", entry)] == []


@pytest.mark.parametrize("name", ["client.txt", "trainer.txt", "operator.txt", "serve.txt"])
def test_the_extras_are_installed_at_the_versions_that_are_tested(name: str) -> None:
    assert pins(name).items() <= pins("dev.txt").items()


def test_no_module_holds_two_subjects() -> None:
    modules = [file for file in tracked_files() if file.suffix == ".py"]
    assert modules
    long = {str(file.relative_to(ROOT)): len(file.read_text().splitlines()) for file in modules}
    assert {name: lines for name, lines in long.items() if lines > MAX_MODULE_LINES} == {}
