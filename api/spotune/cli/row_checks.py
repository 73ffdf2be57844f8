"""Which rows of a job this machine can read, and their check by the trainer, for `spotune validate`.

The trainer registers its check as an entry point, so this package neither imports it nor reads rows itself.
"""

from __future__ import annotations

import glob
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from spotune.cli.plugins import CommandSource
from spotune.errors import Problem, UsageError
from spotune.job import FinetuneJob
from spotune.job_file.load import resolve_paths, sources_of

GROUP: Final = "spotune.row_checks"
"""Entry point ``raw`` of the trainer, see `RowCheck`."""
_SHARDS: Final = "shards have no raw rows"
_RAW: Final = ".prepare.source"


@dataclass(frozen=True)
class RowCheck:
    """What was found in the rows of one source.

    Attributes:
        field: camelCase path of the source in the job.
        source: The source: a path or URL.
        rows: Rows that were read.
        complete: Whether these are known to be all rows.
        left_out: Those of them that shards would leave out, as far as `dataset.maxSkipped` allows.
        not_checked: Why rows were not read; empty if they were.
        problems: What is wrong, of the source or of another field.
    """

    field: str
    source: str
    rows: int = 0
    complete: bool = False
    left_out: int = 0
    not_checked: str = ""
    problems: tuple[Problem, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """The check with camelCase keys for ``--output json``."""
        found: dict[str, Any] = {"field": self.field, "source": self.source, "checked": self.rows}
        if self.not_checked:
            return found | {"notChecked": self.not_checked}
        return found | {"complete": self.complete, "leftOut": self.left_out}

    def __str__(self) -> str:
        if self.not_checked:
            return f"{self.field}: rows not checked: {self.not_checked}"
        which = f"all {self.rows:,} rows" if self.complete else f"the first {self.rows:,} rows"
        left_out = f", {self.left_out:,} of them left out, as dataset.maxSkipped allows" if self.left_out else ""
        return f"{self.field}: {which} checked{left_out}"


def check_rows(job: FinetuneJob, base: Path, max_rows: int | None, *, stores: bool) -> list[RowCheck]:
    """Check the raw rows of a job that this machine can read. A terminal shows the progress.

    A path that is not here may exist in the cluster, so its rows are not checked. It is a problem if another path of
    raw rows is here: both are relative to the same folder.

    Args:
        job: The job, with sources as written.
        base: Folder of the job file.
        max_rows: Rows to read of each source, from the start; None: all.
        stores: Whether to read rows in stores, too.

    Returns:
        One for each source of training and evaluation data, those of raw rows first.
    """
    written = {path: source for path, source in sources_of(job).items() if path.startswith("spec.dataset.")}
    resolved = resolve_paths(job, base)
    by_field = sources_of(resolved)
    sources = {path: by_field[path] for path in sorted(written, key=lambda path: not path.endswith(_RAW))}
    relative = [path for path, source in written.items() if path.endswith(_RAW) and _is_relative(source)]
    some_are_here = any(_is_here(sources[path]) for path in relative)

    def not_read(path: str) -> str:
        """Why rows of a source are not read; empty if they are."""
        source = sources[path]
        if not path.endswith(_RAW):
            return _SHARDS
        if max_rows == 0:
            return "--rows 0"
        if "://" in source:
            return "" if stores else "they are in a store, which --stores reads"
        return "" if _is_here(source) or (path in relative and some_are_here) else f"{source} is not on this machine"

    reasons = {path: not_read(path) for path in sources}
    to_read = {path: source for path, source in sources.items() if not reasons[path]}
    checked = {check.field: check for check in _read(resolved, to_read, max_rows)}
    skipped = {path: RowCheck(path, sources[path], not_checked=reason) for path, reason in reasons.items() if reason}
    return [check for path in sources if (check := checked.get(path) or skipped.get(path)) is not None]


def _read(job: FinetuneJob, sources: Mapping[str, str], max_rows: int | None) -> list[RowCheck]:
    """Check rows by the trainer. Without it, they are not checked."""
    if not sources:
        return []
    with Console(stderr=True).status("reading rows") as status:
        try:
            check = _trainers_check()
            found: list[RowCheck] = check(
                job, sources, max_rows, lambda source, rows: status.update(f"{source}: {rows:,} rows read")
            )
        except UsageError as error:
            return [RowCheck(path, source, not_checked=str(error)) for path, source in sources.items()]
    return found


def _trainers_check() -> Callable[..., Any]:
    """The check of the trainer: job, sources by field, most rows, and a function for progress; returns `RowCheck`s.

    Raises:
        UsageError: It is not installed.
    """
    found = entry_points(group=GROUP, name="raw")
    if not found:
        raise UsageError("the trainer, which reads rows, is not installed: pip install 'spotune[trainer]'")
    check: Callable[..., Any] = CommandSource("validate", next(iter(found)).value).load()
    return check


def _is_relative(source: str) -> bool:
    return "://" not in source and not Path(source).expanduser().is_absolute()


def _is_here(path: str) -> bool:
    """Whether a path or pattern without a scheme names something on this machine."""
    return "://" not in path and (Path(path).exists() or any(True for _ in glob.iglob(path, recursive=True)))  # noqa: PTH207
