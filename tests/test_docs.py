"""The site is built without a warning and asks other hosts for nothing; its reference is what the code says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import recovery_page
from docs import generate
from docs.outside import PAGES
from tests.pages import ROOT

REPOSITORY = "https://git.example.com/team/spotune"


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
    assert "../index.html#the-command-line" in links(site / "reference/command-line.html")


def test_line_within_code_in_a_table_is_not_escaped(site: Path) -> None:
    assert "<code>spotune checkpoint ls|verify|export DIR</code>" in (site / "index.html").read_text()


def test_link_to_a_file_is_text_where_the_repository_cannot_be_seen(site: Path) -> None:
    page = (site / "concepts.html").read_text()
    assert "<code>schedule.py</code> (<code>trainer/spotune_trainer/data/schedule.py</code>)" in page


def test_link_to_a_file_leads_into_a_repository_that_can_be_seen(site_of_a_repository: Path) -> None:
    found = links(site_of_a_repository / "concepts.html")
    assert f"{REPOSITORY}/blob/HEAD/trainer/spotune_trainer/data/schedule.py" in found
    assert not [link for link in found if link.startswith("../")]


def test_the_page_on_recovery_is_that_of_what_was_measured() -> None:
    assert (ROOT / "docs/recovery.md").read_text() == recovery_page.page(), "run `make manifests`"
