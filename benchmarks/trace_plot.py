"""The plot of docs/traces.md: nodes, ranks that train, and the kept share of each run over time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from matplotlib.figure import Figure

from benchmarks.plotting import svg
from spotune.goodput import Part

_NODES, _RANKS, _SHARE = "#9a9a9a", "#8fb8de", "#d1732c"
_INCHES_EACH = 1.5


def plot(results: Mapping[str, Any]) -> str:
    """One panel for each trace, as an SVG.

    Args:
        results: of `benchmarks/trace_runs.py`, by trace.
    """

    def draw(figure: Figure) -> None:
        panels: Any = figure.subplots(len(results), 1, squeeze=False)[:, 0]
        for axes, (name, found) in zip(panels, results.items(), strict=True):
            end = found["seconds"]
            for begin, stop, ranks in training(found["events"], end):
                axes.fill_between([begin, stop], [ranks, ranks], color=_RANKS, linewidth=0)
            times, nodes = zip(*found["nodes"], strict=True)
            axes.step([*times, end], [*nodes, nodes[-1]], where="post", color=_NODES, linewidth=1.2)
            axes.set(xlim=(0, end), ylim=(0, found["workers"] + 0.6), yticks=range(0, found["workers"] + 1, 4))
            axes.set_title(f"{name}: kept {found['keptShare']:.3f}, simulated {found['predictedKeptShare']:.3f}")
            axes.title.set_fontsize(9)
            share = axes.twinx()
            share.plot(*zip(*found["samples"], strict=True), color=_SHARE, linewidth=1.2)
            share.axhline(found["predictedKeptShare"], color=_SHARE, linewidth=0.8, linestyle=(0, (4, 3)))
            share.set(ylim=(0, 1.05), yticks=(0, 0.5, 1))
            share.tick_params(colors=_SHARE)
        panels[-1].set_xlabel("seconds")
        figure.legend(
            handles=[
                panels[0].plot([], [], color=_NODES, label="nodes")[0],
                panels[0].fill_between([], [], color=_RANKS, label="ranks that train"),
                panels[0].plot([], [], color=_SHARE, label="kept share so far (right); dashed: simulated")[0],
            ],
            loc="outside upper center",
            ncols=3,
            frameon=False,
        )

    return svg(draw, (7.0, 0.9 + _INCHES_EACH * len(results)))


def training(events: list[Mapping[str, Any]], end: float) -> Iterator[tuple[float, float, int]]:
    """(begin, end, ranks) of the times in which a worker group made steps; begin and end in seconds.

    Args:
        events: of the ledger.
        end: of the run. The last group is stopped soon after it.
    """
    started = {event["generation"]: event["at"] for event in events if event["event"] == "generation-started"}
    for event in events:
        if event["event"] == "generation-ended" and event["steps"]:
            parts = event["parts"]
            begin = started[event["generation"]] + parts.get(Part.STARTUP, 0.0) + parts.get(Part.RESTORE, 0.0)
            stop = min(event["at"] - parts.get(Part.LOST, 0.0), end)
            if begin < stop:
                yield begin, stop, event["worldSize"]
