"""The site builds without a warning and loads nothing from other hosts; what is generated is current; lines are short.

Pages are read in terminals, diffs and on GitHub, so prose wraps at 100 columns. The site cuts off code past 80 columns.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import recovery_page
from docs import generate, pictures
from docs.outside import PAGES
from docs.wrapping import CODE_COLUMNS, PROSE_COLUMNS, wrap_command
from tests import ROOT, pages
from tests.pages import page_name

REPOSITORY = "https://git.example.com/team/spotune"
README = ROOT / "README.md"
REPORTS = {
    ROOT / "docs" / f"{name}.md" for name in ("bucket-faults", "chaos", "faults", "proof", "proof-recovery", "recovery")
}
"""Pages that a benchmark or a test suite writes, with long lines of machines and commits."""
WRAPPED = [page for page in pages.PAGES if page not in REPORTS and page.name != "CHANGELOG.md"]
"""All other pages; the changelog is read by release, an entry a line."""
CODE = ("api", "benchmarks", "charts", "client", "docs", "examples", "operator", "serve", "tests", "trainer")
OTHER_MODULES = {"judges.py", "partitioners.py", "utils.py"}
"""A module that a reader writes, one of PyTorch, and one that the project does not have."""
README_LINES = 150
FIRST_SCREEN_LINES = 40
PROMISES = 8


def long_lines(page: Path) -> list[str]:
    """Lines of a page that are too long for prose or code.

    Markdown lets nobody wrap a row of a table, an image, or a word (mostly a link), so those may be longer.
    """
    found: list[str] = []
    in_code = False
    for line in page.read_text().splitlines():
        if line.lstrip().startswith("```"):
            in_code = not in_code
        cannot_wrap = not in_code and (line.startswith(("|", "![")) or " " not in line.strip())
        if len(line) > (CODE_COLUMNS if in_code else PROSE_COLUMNS) and not cannot_wrap:
            found.append(line)
    return found


def build(folder: Path, repository: str = "") -> Path:
    """The site; raises CalledProcessError where MkDocs has anything to say."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    environment = {**os.environ, "SPOTUNE_REPOSITORY": repository, "NO_MKDOCS_2_WARNING": "1"}
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    return folder


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"))


@pytest.fixture(scope="module")
def site_of_a_repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("site"), REPOSITORY)


def links(page: Path) -> list[str]:
    return re.findall(r'<a [^>]*href="([^"]*)"', page.read_text())


@pytest.mark.parametrize("path", generate.files(), ids=lambda path: path.name)
def test_reference_is_current(path: Path) -> None:
    assert path.read_text() == generate.files()[path], "run `make manifests` and commit what it writes"


@pytest.mark.parametrize("path", pictures.files(), ids=lambda path: path.name)
def test_picture_is_current(path: Path) -> None:
    assert path.read_text() == pictures.files()[path], "run `make manifests` and commit what it writes"


@pytest.mark.parametrize("page", WRAPPED, ids=page_name)
def test_lines_of_a_page_are_short(page: Path) -> None:
    assert long_lines(page) == []


@pytest.mark.parametrize("page", WRAPPED, ids=page_name)
def test_pages_have_no_placeholders(page: Path) -> None:
    """Such as `TABLE` on a line of its own, or `TEXT_RATIO`, outside code."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    assert (
        re.findall(r"^(?:TABLE|FIGURE|TEXT)$|\b(?:TABLE|FIGURE|TEXT)_[A-Z]+\b|\bTODO\b|\bTBD\b", prose, re.MULTILINE)
        == []
    )


def test_long_lines_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(f"{'word ' * 21}\n{'word' * 26}\n| {'word ' * 21}|\n```\n{'word ' * 17}\n{'w' * 81}\n```\n")
    assert [line[:6] for line in long_lines(page)] == ["word w", "word w", "wwwwww"]


def test_long_command_is_continued_before_an_option() -> None:
    assert wrap_command("$ spotune validate job.yaml") == "$ spotune validate job.yaml"
    command = wrap_command(
        '$ spotune shard rows.jsonl --directory data/shards --prompt "{question} | {columns}" --packing'
    )
    assert command == (
        '$ spotune shard rows.jsonl --directory data/shards \\\n    --prompt "{question} | {columns}" --packing'
    )


def test_readme_is_short_and_its_first_screen_sells() -> None:
    lines = README.read_text().splitlines()
    assert len(lines) <= README_LINES
    first_screen = "\n".join(lines[:FIRST_SCREEN_LINES])
    for part in ("](docs/images/", "kind: FinetuneJob", "$ make demo", "$ make test", "](docs/benchmarks.md"):
        assert part in first_screen


def test_readme_promises_no_more_than_a_reader_remembers() -> None:
    section = README.read_text().split("## What it promises")[1].split("\n## ")[0]
    rows = [line for line in section.splitlines() if line.startswith("| ")]
    assert 1 < len(rows) <= 1 + PROMISES  # and the head of the table


@pytest.mark.parametrize("page", [page for page in pages.PAGES if page.name != "CHANGELOG.md"], ids=page_name)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    named = set(re.findall(r"`(?:[\w/.-]+/)?(\w+\.py)`", page.read_text()))
    modules = {path.name for folder in CODE for path in (ROOT / folder).rglob("*.py")}
    assert named - modules - OTHER_MODULES == set()


def test_every_decision_is_in_its_index() -> None:
    folder = ROOT / "docs/adr"
    rows = re.findall(
        r"^\| (\d+) \| \[.+\]\((\d{4}-[\w-]+\.md)\) \|$", (folder / "README.md").read_text(), re.MULTILINE
    )
    listed = sorted((name, int(number)) for number, name in rows)
    assert [name for name, _ in listed] == sorted(path.name for path in folder.glob("0*.md"))
    assert [number for _, number in listed] == [int(name[:4]) for name, _ in listed]


def test_site_asks_other_hosts_for_nothing(site: Path) -> None:
    loaded = r'<(?:link|script|img|iframe|source)\b[^>]*(?:src|href)="((?:https?:)?//[^"]*)"'
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(PAGES)
    assert {address for page in pages for address in re.findall(loaded, page.read_text())} == set()
    assert [sheet for sheet in site.rglob("*.css") if re.search(r"url\([\"']?(https?:)?//", sheet.read_text())] == []


def test_pages_of_the_repository_are_pages_of_the_site(site: Path) -> None:
    assert {uri for uri in PAGES if not (site / uri).with_suffix(".html").exists()} == set()
    assert "reference/chart-values.html" in links(site / "index.html")
    assert "test-cluster.html" in links(site / "faults.html")
    assert "reference/command-line.html#exit-codes" in links(site / "index.html")
    assert "contributing.html#which-package-may-import-which" in links(site / "how-it-works.html")


def test_line_within_code_in_a_table_is_not_escaped(site: Path) -> None:
    page = (site / "reference/command-line.html").read_text()
    assert "<code>spotune checkpoint ls|verify|export DIR</code>" in page


def test_link_to_a_file_is_text_where_the_repository_cannot_be_seen(site: Path) -> None:
    page = (site / "concepts.html").read_text()
    assert "(<code>trainer/spotune_trainer/data/schedule.py</code>)" in page


def test_link_to_a_file_leads_into_a_repository_that_can_be_seen(site_of_a_repository: Path) -> None:
    found = links(site_of_a_repository / "concepts.html")
    assert f"{REPOSITORY}/blob/HEAD/trainer/spotune_trainer/data/schedule.py" in found
    assert not [link for link in found if link.startswith("../")]


def test_the_page_on_recovery_is_that_of_what_was_measured() -> None:
    assert (ROOT / "docs/recovery.md").read_text() == recovery_page.page(), "run `make manifests`"
