"""Which pages and records were made at another code than a release has.

python -m tests.releases.check                       # against HEAD
python -m tests.releases.check --revision v0.1.0     # against a tag
python -m tests.releases.check --output json docs/  # only names that begin so

Everything is read from that revision. A page is current if no file of the code that it measures has changed since each
commit that it names. A record that names none counts from the commit that it was last changed in, so it may be older.
Exits with 1 if a page is stale.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from tests import ROOT
from tests.releases.measured_pages import BENCHMARKS, PAGES, MeasuredPage

_UNCOMMITTED = " with uncommitted changes"
_COMMIT = re.compile(r"`?([0-9a-f]{7,40})`?(" + _UNCOMMITTED + ")?")
_COMMIT_IN_PAGE = re.compile(r"`([0-9a-f]{12})`(\s+with\s+uncommitted\s+changes)?")


@dataclass(frozen=True)
class MadeAt:
    """A commit that a page was made at.

    Attributes:
        commit: Its hash, as the record has it.
        has_uncommitted_changes: The code had changes that no commit has.
        is_named: The record names the commit. Otherwise it is the one that last changed the record.
    """

    commit: str
    has_uncommitted_changes: bool = False
    is_named: bool = True

    def __str__(self) -> str:
        return ("" if self.is_named else "before ") + self.commit[:12] + ("+" if self.has_uncommitted_changes else "")


@dataclass(frozen=True)
class Checked:
    """A page, and for each commit that it was made at the number of files that changed since (None: unknown commit)."""

    page: MeasuredPage
    changed: dict[MadeAt, int | None]

    @property
    def is_current(self) -> bool:
        """Whether the page was made at the code of the release."""
        return bool(self.changed) and all(
            count == 0 and not made.has_uncommitted_changes for made, count in self.changed.items()
        )

    @property
    def furthest(self) -> tuple[MadeAt, int | None] | None:
        """The commit since which most has changed, with the number of files; None if the page has no records."""

        def distance(item: tuple[MadeAt, int | None]) -> tuple[bool, int, bool]:
            made, count = item
            return count is None, count or 0, made.has_uncommitted_changes

        return max(self.changed.items(), key=distance, default=None)

    def as_json(self) -> dict[str, Any]:
        """The page as a value of the JSON output."""
        commits = [
            {
                "commit": made.commit,
                "uncommittedChanges": made.has_uncommitted_changes,
                "namedByRecord": made.is_named,
                "filesChanged": count,
            }
            for made, count in self.changed.items()
        ]
        return {
            "page": self.page.name,
            "current": self.is_current,
            "madeAt": commits,
            "command": self.page.command,
        }


@dataclass(frozen=True)
class Revision:
    """The files of one revision of a git repository."""

    repository: Path
    name: str

    @cached_property
    def files(self) -> list[str]:
        """All paths."""
        return self._git("ls-tree", "-r", "--name-only", self.name).splitlines()

    @cached_property
    def last_changed(self) -> dict[str, str]:
        """The newest commit that changed each path."""
        found: dict[str, str] = {}
        commit = ""
        options = ("--no-renames", "--diff-merges=combined", "--format=commit %H", "--name-only")
        for line in self._git("log", *options, self.name).splitlines():
            if line.startswith("commit "):
                commit = line.removeprefix("commit ")
            elif line:
                found.setdefault(line, commit)
        return found

    def made_at(self, page: MeasuredPage) -> Iterator[MadeAt]:
        """Yields the commits that a page was made at, each once for each of its records."""
        for path in self.files:
            if not page.has_record(path):
                continue
            named = list(named_commits(path, self._text(path)))
            yield from named or [MadeAt(self.last_changed[path], is_named=False)]

    def files_changed_since(self, commit: str, paths: Sequence[str]) -> int | None:
        """How many files below some paths differ from those of a commit; None if the repository has no such commit."""
        try:
            self._git("cat-file", "-e", f"{commit}^{{commit}}")
        except subprocess.CalledProcessError:
            return None
        return len(self._git("diff", "--name-only", "--no-renames", commit, self.name, "--", *paths).splitlines())

    def check(self, page: MeasuredPage) -> Checked:
        """Compare a page with the code of this revision."""
        count = cache(lambda commit: self.files_changed_since(commit, page.measures))
        return Checked(page, {made: count(made.commit) for made in dict.fromkeys(self.made_at(page))})

    def _text(self, path: str) -> str:
        return self._git("show", f"{self.name}:{path}") if path.endswith((".md", ".json", ".jsonl")) else ""

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.repository), *arguments]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def named_commits(path: str, text: str) -> Iterator[MadeAt]:
    """Yields the commits that a record names: in a page as code, in JSON below the keys "commit" and "commits"."""
    if path.endswith(".md"):
        for commit, changes in _COMMIT_IN_PAGE.findall(text):
            yield MadeAt(commit, bool(changes))
    elif path.endswith(".jsonl"):
        for line in text.splitlines():
            yield from _commits_in(json.loads(line))
    elif path.endswith(".json"):
        yield from _commits_in(json.loads(text))


def _commits_in(value: Any) -> Iterator[MadeAt]:
    if isinstance(value, dict):
        found = value.get("commit")
        if isinstance(found, str) and (match := _COMMIT.fullmatch(found)):
            yield MadeAt(match[1], bool(match[2]))
        found = value.get("commits")
        for key in found if isinstance(found, dict) else ():
            yield from _commits_in({"commit": key})
        for item in value.values():
            yield from _commits_in(item)
    elif isinstance(value, list):
        for item in value:
            yield from _commits_in(item)


def table(checked: Sequence[Checked]) -> Iterator[str]:
    """Yields the lines of a table, the stale pages first."""
    rows = [("", "page", "made at", "files changed", "make it again")]
    for each in sorted(checked, key=lambda each: each.is_current):
        made, count = each.furthest or ("nothing", None)
        more = f" and {len(each.changed) - 1} more" if len(each.changed) > 1 else ""
        changed = "unknown" if count is None else str(count)
        rows.append(("ok" if each.is_current else "stale", each.page.name, f"{made}{more}", changed, each.page.command))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; the exit code says whether all is current."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--revision", default="HEAD", help="tag or commit of the release; default: HEAD")
    parser.add_argument("--output", choices=("text", "json"), default="text")
    parser.add_argument("names", nargs="*", default=[""], help="beginnings of names to check; default: all")
    given = parser.parse_args(arguments)
    pages = [page for page in (*PAGES, *BENCHMARKS) if page.name.startswith(tuple(given.names))]
    revision = Revision(ROOT, given.revision)
    checked = [revision.check(page) for page in pages]
    stale = [each for each in checked if not each.is_current]
    if given.output == "json":
        sys.stdout.write(json.dumps([each.as_json() for each in checked], indent=1) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in table(checked))
        sys.stdout.write(f"\n{len(stale)} of {len(checked)} are not of the code of {given.revision}. ")
        sys.stdout.write('"+": with uncommitted changes. "before": the record names no commit.\n')
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
