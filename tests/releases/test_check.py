"""A release knows which of its pages were made at another code, on a small repository."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests import ROOT
from tests.releases.check import Checked, MadeAt, Revision, named_commits, table
from tests.releases.measured_pages import BENCHMARKS, HISTORY, OF_PAGES, PAGES, MeasuredPage

PAGE = MeasuredPage("docs/page.md", ("docs/page.md",), ("trainer",), "make page")
RECORDS = MeasuredPage("benchmarks/speed.py", ("results/speed*.json",), ("trainer",), "benchmarks/speed.py")

Git = Callable[..., str]


@pytest.fixture
def git(tmp_path: Path) -> Git:
    def run(*arguments: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "commit.gpgsign=false")
        command = ["git", "-C", str(tmp_path), *who, *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    run("init", "--quiet")
    return run


@pytest.fixture
def commit(git: Git, tmp_path: Path) -> Callable[..., str]:
    """Commits files, given by path and text, and returns the hash as pages have it."""

    def commit_files(files: dict[str, str]) -> str:
        for path, text in files.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        git("add", "--all")
        git("commit", "--quiet", "--message", "x")
        return git("rev-parse", "--short=12", "HEAD")

    return commit_files


def check(folder: Path, page: MeasuredPage, revision: str = "HEAD") -> Checked:
    return Revision(folder, revision).check(page)


def test_page_is_current_while_other_code_changes(commit: Callable[..., str], tmp_path: Path) -> None:
    made = commit({"trainer/loop.py": "1", "operator/main.py": "1"})
    commit({"docs/page.md": f"Commit `{made}` (3 faults).", "operator/main.py": "2"})
    checked = check(tmp_path, PAGE)
    assert (checked.is_current, checked.changed) == (True, {MadeAt(made): 0})


def test_page_is_stale_once_its_code_changes_but_not_at_the_tag_before(
    commit: Callable[..., str], git: Git, tmp_path: Path
) -> None:
    made = commit({"trainer/loop.py": "1"})
    commit({"docs/page.md": f"Commit `{made}`."})
    git("tag", "v1")
    commit({"trainer/loop.py": "2", "trainer/new.py": ""})
    assert check(tmp_path, PAGE).changed == {MadeAt(made): 2}
    assert not check(tmp_path, PAGE).is_current
    assert check(tmp_path, PAGE, "v1").is_current


def test_change_that_was_taken_back_leaves_a_page_current(commit: Callable[..., str], tmp_path: Path) -> None:
    made = commit({"trainer/loop.py": "1"})
    commit({"docs/page.md": f"Commit `{made}`.", "trainer/loop.py": "2"})
    commit({"trainer/loop.py": "1"})
    assert check(tmp_path, PAGE).is_current


def test_one_old_record_of_several_makes_a_page_stale(commit: Callable[..., str], tmp_path: Path) -> None:
    old = commit({"trainer/loop.py": "1"})
    new = commit({"trainer/loop.py": "2"})
    commit({"docs/page.md": f"Commit `{old}` (1 seed) and `{new}` (9 seeds)."})
    checked = check(tmp_path, PAGE)
    assert not checked.is_current
    assert checked.furthest == (MadeAt(old), 1)


def test_page_of_uncommitted_changes_is_stale(commit: Callable[..., str], tmp_path: Path) -> None:
    made = commit({"trainer/loop.py": "1"})
    commit({"docs/page.md": f"Commit `{made}` with\nuncommitted changes (3 faults)."})
    checked = check(tmp_path, PAGE)
    assert (checked.is_current, checked.changed) == (False, {MadeAt(made, has_uncommitted_changes=True): 0})


def test_page_of_an_unknown_commit_is_stale(commit: Callable[..., str], tmp_path: Path) -> None:
    commit({"docs/page.md": "Commit `0123456789ab` and `ba9876543210`."})
    checked = check(tmp_path, PAGE)
    assert not checked.is_current
    assert set(checked.changed.values()) == {None}
    assert checked.as_json()["madeAt"][0]["filesChanged"] is None


def test_page_without_records_is_stale(commit: Callable[..., str], tmp_path: Path) -> None:
    commit({"trainer/loop.py": "1"})
    checked = check(tmp_path, PAGE)
    assert (checked.is_current, checked.furthest) == (False, None)
    assert "nothing" in "".join(table([checked]))


def test_record_that_names_no_commit_counts_from_its_own(commit: Callable[..., str], git: Git, tmp_path: Path) -> None:
    commit({"trainer/loop.py": "1"})
    commit({"results/speed_1.json": '{"commitSeconds": 1, "times": {"commit": 0.5}}'})
    recorded = git("rev-parse", "HEAD")
    assert check(tmp_path, RECORDS).changed == {MadeAt(recorded, is_named=False): 0}
    commit({"trainer/loop.py": "2"})
    (stale,) = [line for line in table([check(tmp_path, RECORDS)]) if line.startswith("stale")]
    assert stale.split() == ["stale", "benchmarks/speed.py", "before", recorded[:12], "1", "benchmarks/speed.py"]


@pytest.mark.parametrize(
    ("path", "text", "found"),
    [
        ("a.json", json.dumps({"machine": {"commit": "`0123456789ab`"}}), [MadeAt("0123456789ab")]),
        ("a.json", json.dumps([{"commit": 40 * "a"}, {"commit": "none"}]), [MadeAt(40 * "a")]),
        ("a.json", json.dumps({"commits": {"`0123456`": 3, "x": 1}}), [MadeAt("0123456")]),
        ("a.jsonl", '{"commit": "`0123456` with uncommitted changes"}\n{}\n', [MadeAt("0123456", True)]),
        ("a.md", "`0123456789ab` and `0123456`", [MadeAt("0123456789ab")]),
        ("a.txt", "`0123456789ab`", []),
    ],
)
def test_commits_are_found_in_records_of_any_form(path: str, text: str, found: list[MadeAt]) -> None:
    assert list(named_commits(path, text)) == found


def test_every_page_that_a_program_writes_after_hours_is_checked() -> None:
    pages = [path for path in (ROOT / "docs").glob("*.md") if "writes this page" in path.read_text()]
    assert len(pages) > 5
    assert {str(path.relative_to(ROOT)) for path in pages} <= {page.name for page in PAGES}


def test_every_record_of_a_benchmark_is_checked_or_history() -> None:
    files = [str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks/results").iterdir()]
    others = [file for file in files if not any(fnmatch(file, pattern) for pattern in (*HISTORY, *OF_PAGES))]
    assert [file for file in others if not any(page.has_record(file) for page in (*PAGES, *BENCHMARKS))] == []


def test_record_that_stays_for_comparison_does_not_count() -> None:
    (throughput,) = [page for page in BENCHMARKS if page.name == "benchmarks/throughput.py"]
    assert throughput.has_record("benchmarks/results/throughput_1.json")
    assert not throughput.has_record("benchmarks/results/throughput_1_before.json")


@pytest.mark.parametrize("page", [*PAGES, *BENCHMARKS], ids=lambda page: page.name)
def test_what_a_page_names_exists(page: MeasuredPage) -> None:
    assert [path for path in page.measures if not (ROOT / path).exists()] == []
    assert all(list(ROOT.glob(pattern)) for pattern in page.records)
    if page.name.endswith(".py"):
        assert (ROOT / page.name).is_file()


COMPUTED = ("benchmarks/step_time.py",)
"""Reads the records of others, and measures nothing."""
MEASURING = [page for page in BENCHMARKS if page.name.endswith(".py") and page.name not in COMPUTED]


@pytest.mark.parametrize("page", MEASURING, ids=lambda page: page.name)
def test_every_benchmark_names_the_commit_that_it_measures(page: MeasuredPage) -> None:
    text = (ROOT / page.name).read_text()
    assert re.search(r"\bcommit\(\)|\bdescribe_machine\(|\bmachine\(\)|\"commit\": commit", text)
