"""Which tests cost the most: `pytest -p tests.cpu_seconds PATHS` lists CPU seconds by test file and by test.

A wall time says little where others use the machine. What is counted is the time of pytest and of all processes that it
started, the living and the ended ones. The first test with ranks also pays for the server that they are forked from.
"""

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

_TICKS = os.sysconf("SC_CLK_TCK")
_SHOWN = 40
"""Lines of each list."""
_seconds: Counter[str] = Counter()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Count what one test costs with its fixtures: a shared one is paid for by the first test that asks for it."""
    before = _used()
    result = yield
    _seconds[item.nodeid] += _used() - before  # type: ignore[assignment]
    return result


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """List the most expensive files and tests."""
    files: Counter[str] = Counter()
    for test, seconds in _seconds.items():
        files[test.partition("::")[0]] += seconds
    terminalreporter.section(f"CPU seconds: {sum(files.values()):.0f}")
    for counted in (files, _seconds):
        for name, seconds in counted.most_common(_SHOWN):
            terminalreporter.write_line(f"{seconds:8.1f}  {name}")
        terminalreporter.write_line("")


def _used() -> float:
    """CPU seconds of this process and its descendants so far, those included that have ended and were waited for."""
    parents: dict[int, int] = {}
    ticks: dict[int, int] = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = status.read_text().rpartition(")")[2].split()  # man 5 proc: the state is the third field
        except (FileNotFoundError, ProcessLookupError):
            continue
        process = int(status.parent.name)
        parents[process] = int(fields[1])
        ticks[process] = sum(map(int, fields[11:15]))
    return sum(ticks[process] for process in ticks if _descends(process, parents)) / _TICKS


def _descends(process: int, parents: dict[int, int]) -> bool:
    while process not in (0, os.getpid()):
        process = parents.get(process, 0)
    return process != 0
