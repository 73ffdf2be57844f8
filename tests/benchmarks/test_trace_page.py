"""docs/traces.md and its plot are those of the committed results."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks import trace_page
from benchmarks.trace_plot import training
from benchmarks.trace_runs import played_scenario, read_results
from spotune.goodput import Part
from spotune.simulate.simulation import simulate
from spotune.simulate.trace import Trace

RESULTS = read_results(trace_page.RESULTS)


def test_page_and_plot_are_those_of_what_was_measured() -> None:
    stale = [path.name for path, content in trace_page.files().items() if path.read_text() != content]
    assert stale == [], "run `make manifests`"


def test_committed_predictions_are_those_of_the_simulation_of_today() -> None:
    for found in RESULTS.values():
        trace = Trace(tuple((seconds, nodes) for seconds, nodes in found["nodes"]), found["measuredSeconds"])
        scenario = played_scenario(found["workers"], found["noticeSeconds"])
        predicted = simulate(trace, scenario, trace_page.timings(found["times"]))
        assert round(predicted.goodput, 4) == found["predictedKeptShare"]
        assert round(100 * (predicted.goodput - found["keptShare"]), 2) == found["points"]


def test_run_that_differs_too_much_is_counted() -> None:
    found = {
        "workers": 8,
        "seconds": 540.0,
        "changes": 2,
        "changesOfWhole": 2,
        "coveredSeconds": 3600.0,
        "keptShare": 0.8,
        "predictedKeptShare": 0.81,
        "points": 1.0,
        "groups": 3,
        "predictedRestarts": 2,
        "stepsLost": 0,
        "machine": {"cores": 2, "python": "3.12.1"},
        "parts": {str(part): {"measured": 1.0, "predicted": 1.0} for part in Part},
        "times": {"step": {"8": 0.5}},
    }
    page = trace_page.page({"LASP": found, "HASP": found | {"points": -3.1}})
    assert "\n1 of 2 differ by at most 3 points.\nNot run yet: LADP, HADP, Bamboo.\n" in page
    assert trace_page.page({}).startswith("# Spot traces\n")


def test_ranks_train_from_their_first_step_to_the_loss() -> None:
    events: list[Mapping[str, Any]] = [
        {"event": "generation-started", "generation": 1, "at": 10.0},
        {"event": "generation-ended", "generation": 1, "at": 30.0, "steps": 5, "worldSize": 8}
        | {"parts": {"startup": 4.0, "restore": 1.0, "productive": 13.0, "lost": 2.0}},
        {"event": "generation-started", "generation": 2, "at": 31.0},
        {
            "event": "generation-ended",
            "generation": 2,
            "at": 34.0,
            "steps": 0,
            "worldSize": 7,
            "parts": {"startup": 3.0},
        },
    ]
    assert list(training(events, 100.0)) == [(15.0, 28.0, 8)]
    assert list(training(events, 20.0)) == [(15.0, 20.0, 8)]
