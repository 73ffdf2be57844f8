"""The odds of a deadline: the same job begun at many times of recorded traces, for each capacity of its workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from rich.console import Console
from rich.table import Table

from spotune.deadline.policy import HISTORY_SECONDS, decide
from spotune.deadline.simulation import PoolTrace, Run, Strategy, TraceEndedError, sampled, simulate
from spotune.deadline.terms import Choice, Decision, JobState, Outlook, Switching
from spotune.errors import UsageError
from spotune.formatting import duration
from spotune.simulate.terms import Timings
from spotune.simulate.trace import Trace, read_trace

INTERVAL: Final = 60.0
"""Seconds between two decisions of the operator on a job with a deadline."""
AT_RISK: Final = 300.0
"""Assumed seconds between two commits: what a loss without notice undoes."""
BEGINS: Final = 48
"""Simulated begins, evenly spread over the traces."""
ASSUMED_PRICES: Final = (1.0, 3.0)
"""Of spot and on-demand nodes, if they are not given: their ratio is what the policy needs."""


@dataclass(frozen=True)
class Odds:
    """What became of the simulated jobs of one capacity.

    Attributes:
        capacity: `workers.capacity`.
        begins: Number of jobs.
        met: How many ended by the deadline.
        runs: Those that ended at all.
        has_prices: Whether the costs are in the user's prices.
    """

    capacity: str
    begins: int
    met: int
    runs: Sequence[Run]
    has_prices: bool

    @property
    def mean_cost(self) -> float | None:
        """Mean cost of the jobs that ended; None without prices, or if none ended."""
        return fmean(run.cost for run in self.runs) if self.runs and self.has_prices else None

    def cost_of(self, share: float) -> float | None:
        """Cost that this share of the ended jobs does not exceed; None without prices, or if none ended."""
        if not (self.runs and self.has_prices):
            return None
        costs = sorted(run.cost for run in self.runs)
        return costs[min(len(costs) - 1, int(share * len(costs)))]

    @property
    def on_demand_share(self) -> float:
        """Share of the time with nodes that was on on-demand nodes."""
        held = sum(run.spot_seconds + run.on_demand_seconds for run in self.runs)
        return sum(run.on_demand_seconds for run in self.runs) / held if held else 0.0

    def as_json(self) -> dict[str, Any]:
        """The odds for ``--output json``."""
        return {
            "capacity": self.capacity,
            "begins": self.begins,
            "met": self.met,
            "meanCost": _rounded(self.mean_cost),
            "cost95th": _rounded(self.cost_of(0.95)),
            "onDemandShare": round(self.on_demand_share, 4),
            "meanSeconds": round(fmean(run.finished_after for run in self.runs), 1) if self.runs else None,
        }


def _rounded(cost: float | None) -> float | None:
    return None if cost is None else round(cost, 4)


def read_markets(files: Sequence[Path]) -> dict[str, Trace]:
    """The traces of spot markets, by the names of their files.

    Raises:
        UsageError: A file is no trace, or two have the same name.
    """
    names = [file.stem for file in files]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"{', '.join(twice)}: each market needs a trace of another name.")
    return {file.stem: read_trace(file) for file in files}


def switching_of(times: Timings, on_demand_start: float) -> Switching:
    """How long starts take, from the timings of a simulation or a run.

    A start on spot nodes is that of a lost group: its detection, the arrival of nodes, a start and a restore.
    """
    start = times.detection + times.join + times.start_up + times.restore
    return Switching(start, max(start, on_demand_start), INTERVAL, at_risk=times.commit + AT_RISK)


def deadline_odds(
    traces: Mapping[str, Trace],
    *,
    nodes: int,
    work: float,
    to_deadline: float,
    switching: Switching,
    prices: tuple[float | None, float | None],
) -> list[Odds]:
    """The odds of each capacity: `spot-then-on-demand` by the policy, `spot` alone, and `on-demand` alone.

    Args:
        traces: Available spot nodes over time, by market. They are repeated, so that a job may begin near their end.
        nodes: Nodes that the job has; a market counts while it has nodes for all of it.
        work: Seconds of training on them.
        to_deadline: Seconds from the begin to the deadline.
        switching: How long starts take.
        prices: Price of a node per hour on spot and on demand; None if not known.
    """
    given = None not in prices
    spot, on_demand = (price * nodes for price in (prices if given else ASSUMED_PRICES) if price is not None)
    count = max(1, int(min(trace.seconds for trace in traces.values()) / INTERVAL))
    columns = [sampled(trace, INTERVAL, count, nodes) for trace in traces.values()]
    longest = int(2 * max(to_deadline, work + switching.on_demand_start) / INTERVAL) + 2
    rows = list(zip(*columns, strict=True))
    repeated = (rows * (longest // count + 2))[: count + longest]
    trace = PoolTrace.observed(list(traces), [spot] * len(traces), on_demand, INTERVAL, repeated, HISTORY_SECONDS)
    begins = sorted({index * count // BEGINS for index in range(BEGINS)})
    strategies: dict[str, Strategy] = {
        "spot-then-on-demand": partial(decide, switching=switching),
        "spot": _spot_alone,
        "on-demand": lambda _: Decision(Choice.ON_DEMAND, "", Outlook.IN_TIME, ""),
    }
    found = []
    for capacity, strategy in strategies.items():
        runs = []
        for begin in begins:
            try:
                runs.append(simulate(trace, begin, work, to_deadline, switching, strategy))
            except TraceEndedError:
                continue  # spot nodes alone may never be enough
        found.append(Odds(capacity, len(begins), sum(run.met for run in runs), runs, given))
    return found


def _spot_alone(state: JobState) -> Decision:
    """Spot nodes while there are any, and waiting."""
    available = [market for market in state.markets if market.available]
    held = [market for market in available if market.name == state.holds]
    if not available:
        return Decision(Choice.WAIT, "", Outlook.IN_TIME, "")
    chosen = held[0] if held else max(available, key=lambda market: market.expected_lifetime)
    return Decision(Choice.SPOT, chosen.name, Outlook.IN_TIME, "")


def print_odds(odds: Sequence[Odds], work: float, to_deadline: float, switching: Switching, console: Console) -> None:
    """Print one row per capacity, and what was assumed."""
    table = Table(title="Jobs begun at times spread over the traces", title_justify="left", title_style="dim")
    table.add_column("Capacity", no_wrap=True)
    for name in ("In time", "Mean cost", "95 % cost at most", "On demand", "Mean time"):
        table.add_column(name, justify="right")
    for each in odds:
        costs = (f"{cost:,.2f}" if cost is not None else "-" for cost in (each.mean_cost, each.cost_of(0.95)))
        ended = [run.finished_after for run in each.runs]
        mean = duration(fmean(ended)) if ended else "-"
        table.add_row(each.capacity, f"{each.met} of {each.begins}", *costs, f"{each.on_demand_share:.1%}", mean)
    console.print(table)
    slack = to_deadline / work if work else 0.0
    console.print(
        f"{duration(work)} of training in {duration(to_deadline)} (slack {slack:.2f}); a start takes "
        f"{duration(switching.spot_start)} on spot and {duration(switching.on_demand_start)} on demand.",
        style="dim",
        highlight=False,
    )
    if to_deadline < work + switching.on_demand_start:
        console.print("Not even on-demand nodes keep this deadline: give more time or workers.", style="bold red")
