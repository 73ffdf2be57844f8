"""Results of fault suites as JSON lines, and what their pages have in common."""

from __future__ import annotations

import json
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import pytest


@dataclass
class FaultRecord:
    """The result of one fault.

    Attributes:
        fault: Its name.
        result: "" while it runs, then "passed" or the error.
        wall_seconds: Duration of the whole test.
        commit: The tested commit.
    """

    fault: str
    result: str = ""
    wall_seconds: float = 0.0
    commit: str = ""


R = TypeVar("R", bound=FaultRecord)


@contextmanager
def recording(record: R, variable: str) -> Iterator[R]:
    """Append a record to the file that an environment variable names, whether the block passes or raises.

    Args:
        record: The block fills it.
        variable: The environment variable; without it, nothing is written.
    """
    start = time.monotonic()
    try:
        yield record
        record.result = "passed"
    except BaseException as error:
        record.result = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        raise
    finally:
        record.wall_seconds = round(time.monotonic() - start, 1)
        if path := os.environ.get(variable):
            with Path(path).open("a") as file:
                file.write(json.dumps(asdict(record)) + "\n")


def skip_if_passed(record: FaultRecord, variable: str) -> None:
    """Skip a test whose fault has passed in an earlier sitting.

    Args:
        record: The empty record of the fault.
        variable: The environment variable that names the file of the records.

    Raises:
        pytest.skip.Exception: The fault has passed.
    """
    path = Path(os.environ.get(variable, ""))
    earlier = newest_records(path, type(record)).get(record.fault) if path.is_file() else None
    if earlier is not None and earlier.result == "passed":
        pytest.skip(f"passed at commit {earlier.commit}; AGAIN=1 runs all faults again")


def newest_records(path: Path, kind: type[R]) -> dict[str, R]:
    """The newest record of each fault, by its name."""
    records = (kind(**json.loads(line)) for line in path.read_text().splitlines())
    return {record.fault: record for record in records}


def num_passed(records: Iterable[FaultRecord]) -> int:
    """Number of faults that passed."""
    return sum(record.result == "passed" for record in records)


def tested_commits(records: Iterable[FaultRecord]) -> str:
    """The commits, each with the number of its faults."""
    commits = Counter(record.commit for record in records)
    return " and ".join(f"{commit} ({count} faults)" for commit, count in commits.most_common())


def result_cell(record: FaultRecord) -> str:
    """The result as the cell of a Markdown table."""
    if record.result == "passed":
        return "passed"
    text = re.sub(r"\s+", " ", record.result).replace("|", "\\|")
    return f"**failed**: {text}"
