"""What users write: files of jobs, services and sweeps, traces, prices, and values with units."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError

from spotune.errors import JobError, UsageError
from spotune.job import FinetuneJob
from spotune.job_file.deadlines import deadline_problems
from spotune.job_file.load import load_resource, resolve_paths
from spotune.job_file.yaml_file import read_documents
from spotune.simulate.measured import read_timings
from spotune.simulate.terms import Timings
from spotune.simulate.trace import read_trace
from spotune.units.deadlines import Deadline
from spotune.units.durations import Duration
from spotune.units.money import Money, Price
from spotune.units.quantities import Quantity
from spotune_operator.prices import parse_prices
from tests import ROOT
from tests.fuzz.mutations import NUMBERS, TEXTS, VALUES, changed_bytes, changed_json, changed_lines, changed_values
from tests.fuzz.target import Target
from tests.fuzz.targets.ledgers import EVENTS

FILE = "job.yaml"


def _samples(pattern: str, kind: str) -> list[bytes]:
    found = [path.read_bytes() for path in sorted((ROOT / "examples").glob(pattern))]
    return [content for content in found if f"kind: {kind}\n".encode() in content]


JOBS = _samples("*/*.yaml", "FinetuneJob")
SERVICES = _samples("serving/*.yaml", "ModelService")
SWEEPS = _samples("sweep/*.yaml", "FinetuneSweep")
ALIASES = [
    b"a: &a [x, x, x, x, x, x, x, x, x]\n"
    + b"".join(b"%c: &%c [%s]\n" % (n, n, b", ".join([b"*%c" % (n - 1)] * 9)) for n in range(98, 98 + size))
    for size in (2, 9)
]


def _as_file(content: bytes, read: Callable[[Path], Any], name: str = FILE) -> None:
    """Read a file; an error has to be of a documented class, and to name the file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / name
        path.write_bytes(content)
        try:
            read(path)
        except (JobError, UsageError) as error:
            _check_message(error, name)


def _check_message(error: JobError | UsageError, name: str) -> None:
    message = str(error)
    assert name in message, message
    assert len(message) < 100_000, f"a message of {len(message)} characters"
    message.encode()  # can be printed
    json.dumps(error.as_json())


def _read_resource(path: Path) -> None:
    found = load_resource(path)
    found.model_dump_json()
    if isinstance(found, FinetuneJob):
        resolve_paths(found, path.parent)
        deadline_problems(found, 1.8e9)


def _resources(samples: list[bytes]) -> st.SearchStrategy[bytes]:
    parsed = [yaml.safe_load(sample) for sample in samples]
    as_yaml = changed_values(parsed).map(lambda value: json.dumps(value).encode())
    return as_yaml | changed_bytes(samples) | changed_bytes([*samples, *ALIASES]) | st.binary(max_size=60)


def read_resource(content: bytes) -> None:
    """A job, a service or a sweep."""
    _as_file(content, _read_resource)


def read_any_yaml(content: bytes) -> None:
    """YAML documents of any kind."""
    _as_file(content, lambda path: [each.kind for each in read_documents(path)])


def read_a_trace(content: bytes) -> None:
    """A preemption trace."""
    _as_file(content, read_trace, "trace.csv")


def read_measured(content: bytes) -> None:
    """The ledger of a run whose timings a simulation uses."""
    _as_file(content, lambda path: read_timings(path.parent, Timings({1: 1.0})), "ledger.jsonl")


def read_prices(content: bytes) -> None:
    """Prices of the chart's values, as the operator gets them in its environment."""
    try:
        parse_prices(content.decode(errors="surrogateescape"))
    except UsageError as error:
        _check_message(error, "prices")


UNITS: tuple[Any, ...] = (Duration, Deadline, Quantity, Price, Money)


def read_unit(value: Any) -> None:
    """A value with a unit: pydantic's error, or a number."""
    for unit in UNITS:
        with suppress(ValidationError):
            found = TypeAdapter(unit).validate_python(value)
            match found:
                case Deadline():
                    found.problem(1.8e9)
                case Duration():
                    assert found.seconds >= 0
                case Quantity():
                    assert found.value >= 0
                case Price():
                    assert found.amount >= 0
                    assert len(found.currency) == 3


PRICES = [
    [
        {"labels": {"pool": "a"}, "price": "2.10 USD", "onDemandPrice": "6 USD", "source": "s", "date": "2026-11-01"},
        {"price": "1 USD"},
    ]
]
TRACES = [
    b"seconds,nodes\n0,4\n60,3\n120.5,4\n",
    *((path.read_bytes()[:2000]) for path in sorted((ROOT / "examples/traces").glob("*.csv"))),
]
_WITH_UNITS = st.from_regex(r"[-+]?[0-9]{0,400}\.?[0-9]{0,9} ?([a-zA-Z]{0,3}|[eE][-+]?[0-9]{0,5})", fullmatch=True)
_TIMES = st.from_regex(
    r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(Z|[-+][0-9]{2}:[0-9]{2})", fullmatch=True
)

TARGETS = (
    Target("job", "FinetuneJob files, as `spotune validate` reads them", _resources(JOBS), read_resource),
    Target("service", "ModelService files", _resources(SERVICES), read_resource),
    Target("sweep", "FinetuneSweep files, with the jobs of their trials", _resources(SWEEPS), read_resource),
    Target("yaml", "YAML of any kind", changed_bytes([*JOBS, *ALIASES]) | st.binary(max_size=80), read_any_yaml),
    Target("trace", "preemption traces", changed_bytes(TRACES), read_a_trace, 300),
    Target("measured", "ledgers, as `spotune simulate --measured` reads them", changed_lines(EVENTS), read_measured),
    Target("prices", "prices of the chart's values", changed_json(PRICES), read_prices, 300),
    Target(
        "units",
        "durations, deadlines, quantities, prices",
        _WITH_UNITS | _TIMES | TEXTS | NUMBERS | VALUES,
        read_unit,
        300,
    ),
)
