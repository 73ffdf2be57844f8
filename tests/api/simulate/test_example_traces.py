"""The traces in examples/traces: current output of their generator, with the published statistics."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from types import ModuleType

import pytest

from spotune.simulate.trace import read_trace
from tests import ROOT

FOLDER = ROOT / "examples" / "traces"
PUBLISHED: Mapping[str, Mapping[str, float]] = {
    "p3-32.csv": {"mean": 24.03, "removals_per_hour": 6.95, "nodes_per_removal": 2.11, "additions_per_hour": 7.30},
    "v100-4.csv": {
        "mean": 3.264,
        "removals_per_hour": 0.423,
        "nodes_per_removal": 1.82,
        "additions_per_hour": 0.412,
        "all_there": 0.790,
        "none_there": 0.161,
    },
}


@pytest.fixture(scope="module")
def generator() -> ModuleType:
    specification = importlib.util.spec_from_file_location("generate_traces", FOLDER / "generate.py")
    assert specification is not None
    assert specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_the_files_are_what_the_generator_writes(generator: ModuleType) -> None:
    written = {file: generator.text(points) for file, points in generator.traces()}
    assert {file: file.read_text() for file in FOLDER.glob("*.csv")} == written


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_statistics_match_the_published_ones(generator: ModuleType, name: str) -> None:
    trace = read_trace(FOLDER / name)
    found = vars(generator.statistics([*trace.changes, (trace.seconds, trace.changes[-1][1])]))
    assert {key: found[key] for key in PUBLISHED[name]} == pytest.approx(PUBLISHED[name], rel=0.03)
