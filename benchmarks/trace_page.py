"""Writes docs/traces.md and its plot from the results of `benchmarks/trace_runs.py`.

python -m benchmarks.trace_page
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.trace_plot import plot
from benchmarks.trace_runs import (
    FOLDER,
    NOTICE_SECONDS,
    QUIET_SECONDS,
    RESIZE_COOLDOWN_SECONDS,
    TRACES,
    read_results,
    whole_scenario,
)
from spotune.goodput import Part
from spotune.simulate.simulation import simulate
from spotune.simulate.terms import Scenario, Timings
from spotune.simulate.trace import read_trace

RESULTS = Path(__file__).parent / "results" / "trace_runs.json"
_DOCS = Path(__file__).parents[1] / "docs"
GOALS = dict.fromkeys(TRACES, 0.90) | {"LADP": 0.88}
"""The least kept share of each whole trace."""
POINTS = 3.0
"""How far the simulation may be from the run, in percentage points."""
_PARTS = (Part.PRODUCTIVE, Part.STARTUP, Part.WAITING, Part.LOST, Part.RESTORE, Part.CHECKPOINT_STALL, Part.DATA_WAIT)
_COLUMNS = (
    *("trace", "workers", "seconds", "changes", "stands for", "kept share", "simulated", "points"),
    *("groups", "simulated", "steps lost"),
)
_TEXT = """# Spot traces

How much of its time does a run keep whose nodes come and go as real spot nodes did, and does
`spotune simulate` say the same? The kept share is the [goodput](concepts.md#goodput): the time of
steps that count, over the whole time.

[trace_runs.py](../benchmarks/trace_runs.py) trains a small Llama on the CPU (gloo) with one rank on
each node. A node is a raylet of one slot. It joins when the trace gains a node, and is killed with
all of its processes when the trace loses one. The simulation gets the nodes that were really there,
and the durations that the run has measured: of steps, commits, and starts of worker groups and
nodes. Where the machine is busy with other work, both are slower.

```console
$ python -m benchmarks.trace_runs --output benchmarks/results/trace_runs.json
$ python -m benchmarks.trace_page
```

The traces are five recordings of AWS p3 instances ([sources and
licences](../benchmarks/traces/README.md)): Bamboo's of eleven hours, and Parcae's four hours of it
with high (H) or low (L) availability (A) and dense (D) or sparse (S) preemptions (P).
"""
_RULE = f"""## How a trace is scaled and cut

In this order, and decided before the runs ([trace_cutting.py](../benchmarks/trace_cutting.py)):

1. **Scale.** The most nodes of the trace become the number of workers here, other numbers in
   proportion, rounded to the nearest, at least one. Changes that are too small for a node are left
   out.
2. **Cut.** Of a quiet stretch, at most {QUIET_SECONDS:.0f} s remain: a minute in which the run recovers from a
   change and grows, and the two minutes of the next notice. Shorter stretches keep their length, so
   what happens close together in the trace does so here.
3. **Take the first** seconds of what remains, as many as the table says.

Quiet stretches are where nothing is lost. So the kept share of what remains is lower than that of
the whole trace, and each recovery weighs more.

Assumptions:

- A loss is announced {NOTICE_SECONDS:.0f} s ahead, as AWS does. The traces do not say whether it did each time.
- Of several nodes, the newest is lost first, as in the simulation.
- `workers.resizeCooldown` is {RESIZE_COOLDOWN_SECONDS:.0f} s here, so that groups grow within the time that remains.
  Other settings are the defaults, among them `checkpoint.every: auto`.
- Recovery is not sped up or slowed down. All ranks share one machine, so it is that of a tiny model
  on a few cores.
"""
_WHOLE = """## The whole traces

What `spotune simulate` says for each whole trace, neither scaled nor cut, with default settings, as
many workers as the trace has nodes at most, and the durations of the run above. A recovery is the
last commit of a group, the start of the next one and its restore. A node that joins can train after
`join`.
"""


def page(results: Mapping[str, Any]) -> str:
    """The page as Markdown.

    Args:
        results: by trace.
    """
    measured = [*_compared(results), _RULE, *_parts(results), _WHOLE, *_whole(results)]
    lines = [_TEXT, *(measured if results else ["No trace has been run yet.", "", _RULE])]
    return "\n".join(lines).rstrip("\n") + "\n"


def _compared(results: Mapping[str, Any]) -> Iterator[str]:
    within = sum(abs(found["points"]) <= POINTS for found in results.values())
    yield "## Run and simulation"
    yield ""
    yield f"{within} of {len(results)} differ by at most {POINTS:.0f} points."
    if missing := [name for name in TRACES if name not in results]:
        yield f"Not run yet: {', '.join(missing)}."
    yield ""
    yield from _table(
        _COLUMNS,
        (
            (
                name,
                found["workers"],
                f"{found['seconds']:.0f}",
                f"{found['changes']} of {found['changesOfWhole']}",
                f"{found['coveredSeconds'] / 3600:.1f} h",
                f"{found['keptShare']:.3f}",
                f"{found['predictedKeptShare']:.3f}",
                f"{found['points']:+.1f}",
                found["groups"],
                found["predictedRestarts"] + 1,
                found["stepsLost"],
            )
            for name, found in results.items()
        ),
    )
    yield ""
    yield "![Nodes, ranks that train and the kept share of each run over time](images/traces.svg)"
    yield ""
    yield f"Machine: {_machines(results)}. All values: `benchmarks/results/{RESULTS.name}`."
    yield ""


def _machines(results: Mapping[str, Any]) -> str:
    """The machines, with the traces of each if there are several."""
    traces: dict[str, list[str]] = {}
    for name, found in results.items():
        machine = f"{found['machine']['cores']} cores, Python {found['machine']['python']}"
        traces.setdefault(machine, []).append(name)
    if len(traces) == 1:
        return next(iter(traces))
    return "; ".join(f"{machine} ({', '.join(names)})" for machine, names in traces.items())


def _parts(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Where the time went"
    yield ""
    yield "Seconds of the run; in brackets those of the simulation."
    yield ""
    yield from _table(
        ("trace", *(str(part) for part in _PARTS)),
        (
            (name, *(f"{each['measured']:.1f} ({each['predicted']:.1f})" for each in _spent(found)))
            for name, found in results.items()
        ),
    )
    yield ""


def _spent(found: Mapping[str, Any]) -> list[Mapping[str, float]]:
    return [found["parts"][part] for part in _PARTS]


def _whole(results: Mapping[str, Any]) -> Iterator[str]:
    yield from _table(
        ("trace", "nodes", "commit, start, restore: recovery", "join", "kept share", "goal", "without notices"),
        (_whole_row(name, found) for name, found in results.items()),
    )


def _whole_row(name: str, found: Mapping[str, Any]) -> Sequence[Any]:
    trace = read_trace(FOLDER / TRACES[name])
    times = timings(found["times"])
    scenario = whole_scenario(trace)
    recovery = f"{times.commit:.2f} + {times.start_up:.1f} + {times.restore:.2f}"
    return (
        name,
        scenario.workers,
        f"{recovery} = {times.commit + times.start_up + times.restore:.1f} s",
        f"{times.join:.1f} s",
        f"{simulate(trace, scenario, times).goodput:.3f}",
        f"{GOALS[name]:.2f}",
        f"{simulate(trace, Scenario(workers=scenario.workers), times).goodput:.3f}",
    )


def timings(measured: Mapping[str, Any]) -> Timings:
    """The measured durations of a result."""
    return Timings(**{**measured, "step": {int(workers): seconds for workers, seconds in measured["step"].items()}})


def _table(heads: Sequence[str], rows: Iterator[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(str(value) for value in row)} |"


def files() -> dict[Path, str]:
    """The page and its plot as they have to be, by path."""
    results = read_results(RESULTS)
    plots = {_DOCS / "images" / "traces.svg": plot(results)} if results else {}
    return {_DOCS / "traces.md": page(results), **plots}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
