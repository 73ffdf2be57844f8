"""What deadlines cost on recorded spot markets: our policy, the ones that it is compared with, and the optimum.

python -m benchmarks.deadline --traces FOLDER --output benchmarks/results/deadline.json [--tune]

FOLDER has the nine zones of SkyPilot's V100 trace of 2023-02-15 as `skypilot-availability_1-node_aws-02-15-2023_ZONE
_v100_1.csv` (columns seconds, nodes), from skypilot-org/spot-traces, commit 221da1a. That repository names no licence,
so the trace is not in this one.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from random import Random
from statistics import fmean, quantiles
from typing import Any, Final

from benchmarks.deadline_baselines import Greedy, UniformProgress, on_demand_only, optimum
from benchmarks.machine import describe_machine
from spotune.deadline.policy import HISTORY_SECONDS, decide
from spotune.deadline.simulation import PoolTrace, Run, Strategy, simulate
from spotune.deadline.terms import TUNED, Switching, Tuning
from spotune.simulate.trace import read_trace

INTERVAL: Final = 195.0
"""Seconds between two probes of the trace, and between two decisions."""
START: Final = 2 * INTERVAL
"""Seconds of a start, of spot and on-demand nodes."""
WORK: Final = 443
"""Intervals of training: 24 h."""
SLACKS: Final = (1.05, 1.25, 1.5)
"""Time to the deadline over training time."""
RUNS: Final = 1000
FEWER_RUNS: Final = 250
"""Of these, those that single zones and other assumptions are simulated for."""
PARTS: Final = 10
"""The trace is cut into so many parts of 4.5 days; parts 2, 4, ... are for tuning, and 1, 3, ... are held out."""
_FIRST_PART: Final = {"tuning": 1, "heldOut": 0}
SPOT_PRICE: Final = 0.918
ON_DEMAND_PRICE: Final = 3.06
"""Of a p3.2xlarge per hour in USD: on demand in us-east-1 and us-west-2, and 30 % of it, because the trace has none."""
BY_REGION: Final = {"us-east-1": 0.9, "us-east-2": 1.0, "us-west-2": 1.1}
"""Spot prices of a variant, in multiples of `SPOT_PRICE`: assumed, to see what the policy does for a cheaper zone."""
WINDOW_HOURS: Final = (24, 48, 96)
RESERVES: Final = (1.0, 2.0, 4.0)
PATIENCES: Final = (1.0, 2.0, 4.0)
TUNING_RUNS: Final = 40
_FILES: Final = "skypilot-availability_1-node_aws-02-15-2023_*_v100_1.csv"

SWITCHING: Final = Switching(spot_start=START, on_demand_start=START, interval=INTERVAL)
Policy = Callable[[Switching, float, float], Strategy]
"""A new strategy for a job, from the start times, its work and its deadline in seconds."""


def ours(switching: Switching, work: float, deadline: float, tuning: Tuning = TUNED) -> Strategy:
    """The policy of `spotune.deadline`."""
    return partial(decide, switching=switching, tuning=tuning)


def greedy(switching: Switching, work: float, deadline: float) -> Strategy:
    """Cheapest first."""
    return Greedy(switching)


@dataclass(frozen=True)
class Case:
    """One simulated job: the interval of its begin, and its deadline and start times."""

    begin: int
    deadline: int
    switching: Switching = SWITCHING

    def run(self, trace: PoolTrace, policy: Policy) -> Run:
        """The job under a policy."""
        work, deadline = WORK * INTERVAL, self.deadline * INTERVAL
        return simulate(trace, self.begin, work, deadline, self.switching, policy(self.switching, work, deadline))


def read_pool(folder: Path, window_hours: float = HISTORY_SECONDS / 3600) -> PoolTrace:
    """The nine zones."""
    traces = {path.name.split("_")[3]: read_trace(path) for path in sorted(folder.glob(_FILES))}
    prices = [SPOT_PRICE] * len(traces)
    return PoolTrace.from_traces(traces, prices, ON_DEMAND_PRICE, INTERVAL, window_hours * 3600)


def cases(intervals: int, slack: float, count: int, *, held_out: bool, switching: Switching = SWITCHING) -> list[Case]:
    """Jobs that begin at random in the parts for tuning or the parts that are held out, and end within the part."""
    deadline, length, random = int(WORK * slack), intervals // PARTS, Random(f"{slack} {held_out}")
    found = []
    for _ in range(count):
        part = 2 * random.randrange(PARTS // 2) + (not held_out)
        found.append(Case(part * length + random.randrange(length - deadline), deadline, switching))
    return found


def summary(runs: Sequence[Run], optima: Sequence[float]) -> dict[str, Any]:
    """Means over runs, and their cost over that of the optimum."""
    ratios = [run.cost / best for run, best in zip(runs, optima, strict=True)]
    return {
        "met": sum(run.met for run in runs),
        "cost": round(fmean(run.cost for run in runs), 3),
        "overOptimum": round(sum(run.cost for run in runs) / sum(optima), 4),
        "overOptimumMedian": round(quantiles(ratios, n=100)[49], 4),
        "overOptimum95th": round(quantiles(ratios, n=100)[94], 4),
        "within10Percent": sum(ratio <= 1.10 for ratio in ratios),
        "availability": round(sum(r.spot_seconds + r.on_demand_seconds for r in runs) / _seconds(runs), 4),
        "spotHours": round(fmean(run.spot_seconds for run in runs) / 3600, 2),
        "onDemandHours": round(fmean(run.on_demand_seconds for run in runs) / 3600, 2),
        "hours": round(_seconds(runs) / 3600 / len(runs), 2),
        "starts": round(fmean(run.starts for run in runs), 2),
    }


def _seconds(runs: Sequence[Run]) -> float:
    return sum(run.finished_after for run in runs)


def compared(trace: PoolTrace, tried: Sequence[Case]) -> dict[str, Any]:
    """All policies on the same jobs. Single zones: the zone whose mean cost was least in these very runs."""
    best = [optimum(trace, case.begin, WORK, case.deadline, case.switching) for case in tried]
    found: dict[str, Any] = {"optimum": {"cost": round(fmean(best), 3)}, "zones": {}}
    found["ours"] = summary([case.run(trace, ours) for case in tried], best)
    found["oursWithoutHistory"] = summary([_without_history(trace, case) for case in tried], best)
    found["onDemandOnly"] = summary([case.run(trace, lambda *_: on_demand_only) for case in tried], best)
    found["cheapestFirst"] = summary([case.run(trace, greedy) for case in tried], best)
    tried, best = tried[:FEWER_RUNS], best[:FEWER_RUNS]
    for zone in trace.names:
        alone = trace.only([zone])
        policies: dict[str, Policy] = {"ours": ours, "uniformProgress": UniformProgress}
        found["zones"][zone] = {
            name: summary([case.run(alone, policy) for case in tried], best) for name, policy in policies.items()
        }
    for name, key in (("uniformProgress", "uniformProgress"), ("bestZone", "ours")):
        zone = min(trace.names, key=lambda zone: found["zones"][zone][key]["cost"])
        found[name] = {"zone": zone} | found["zones"][zone][key]
    return found


def _without_history(trace: PoolTrace, case: Case) -> Run:
    """Our policy, if nothing is known of the markets before the job begins."""
    rows = trace.available[case.begin : case.begin + case.deadline]
    fresh = PoolTrace.observed(trace.names, trace.prices, trace.on_demand_price, INTERVAL, rows, HISTORY_SECONDS)
    return replace(case, begin=0).run(fresh, ours)


def tuned(folder: Path) -> Iterator[dict[str, Any]]:
    """Costs for values of the tuned numbers, on the parts for tuning: first of the window, then of the two others.

    Of each the mean over the slacks: of all zones, and of all zones with prices by region, over the optimum; of single
    zones over Uniform Progress on the same zone.
    """
    pairs = [(reserve, patience) for reserve in RESERVES for patience in PATIENCES]
    tries: list[tuple[float, Tuning]] = [(window, TUNED) for window in WINDOW_HOURS]
    tries += [(HISTORY_SECONDS / 3600, Tuning(*pair)) for pair in pairs if Tuning(*pair) != TUNED]
    for window, tuning in tries:
        trace = read_pool(folder, window)
        costs = [_tuning_costs(trace, partial(ours, tuning=tuning), slack) for slack in SLACKS]
        all_zones, by_region, alone = (round(fmean(column), 4) for column in zip(*costs, strict=True))
        found = {"windowHours": window, "reserve": tuning.reserve, "patience": tuning.patience}
        yield found | {"allZones": all_zones, "pricesByRegion": by_region, "overUniformProgress": alone}


def _tuning_costs(trace: PoolTrace, policy: Policy, slack: float) -> tuple[float, float, float]:
    tried = cases(len(trace.available), slack, TUNING_RUNS, held_out=False)
    over = []
    for pool in (trace, priced_by_region(trace)):
        best = sum(optimum(pool, case.begin, WORK, case.deadline, case.switching) for case in tried)
        over.append(_cost(pool, policy, tried) / best)
    zones = [trace.only([zone]) for zone in trace.names]
    alone = fmean(_cost(zone, policy, tried) / _cost(zone, UniformProgress, tried) for zone in zones)
    return over[0], over[1], alone


def _cost(trace: PoolTrace, policy: Policy, tried: Sequence[Case]) -> float:
    return sum(case.run(trace, policy).cost for case in tried)


def priced_by_region(trace: PoolTrace) -> PoolTrace:
    """The trace with the spot prices of `BY_REGION`."""
    return replace(trace, prices=tuple(round(SPOT_PRICE * BY_REGION[zone[:-1]], 4) for zone in trace.names))


def variants(trace: PoolTrace, slack: float, count: int) -> list[dict[str, Any]]:
    """Ours and cheapest first under other assumptions: starts of 13 minutes, and zones with other prices."""
    slow = replace(SWITCHING, spot_start=2 * START, on_demand_start=2 * START)
    found = []
    for name, pool, switching in (
        ("starts of 13 min", trace, slow),
        ("us-east-1 10 % cheaper, us-west-2 10 % dearer", priced_by_region(trace), SWITCHING),
    ):
        tried = cases(len(trace.available), slack, min(count, FEWER_RUNS), held_out=True, switching=switching)
        best = [optimum(pool, case.begin, WORK, case.deadline, switching) for case in tried]
        both = {"ours": ours, "cheapestFirst": greedy}
        results = {key: summary([case.run(pool, policy) for case in tried], best) for key, policy in both.items()}
        found.append({"variant": name, "slack": slack, "runs": len(tried), **results})
    return found


def held_out(folder: Path, count: int, slack: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The comparison and the variants of one slack."""
    trace = read_pool(folder)
    return compared(trace, cases(len(trace.available), slack, count, held_out=True)), variants(trace, slack, count)


def measure(folder: Path, count: int, tuning: list[dict[str, Any]]) -> dict[str, Any]:
    """All results, as JSON; one process for each slack.

    Args:
        folder: The traces.
        count: Jobs for each slack.
        tuning: Results of `tuned`.
    """
    with ProcessPoolExecutor(len(SLACKS)) as pool:
        of_slacks = list(pool.map(partial(held_out, folder, count), SLACKS))
    trace = read_pool(folder)
    intervals = len(trace.available)
    parts = [trace.available[part * (intervals // PARTS) : (part + 1) * (intervals // PARTS)] for part in range(PARTS)]
    return {
        "machine": describe_machine(),
        "runs": count,
        "settings": {
            "intervalSeconds": INTERVAL,
            "startSeconds": START,
            "workHours": round(WORK * INTERVAL / 3600, 3),
            "spotPrice": SPOT_PRICE,
            "onDemandPrice": ON_DEMAND_PRICE,
            "windowHours": HISTORY_SECONDS / 3600,
            "reserve": TUNED.reserve,
            "patience": TUNED.patience,
            "traceHours": round(intervals * INTERVAL / 3600, 1),
        },
        "zones": {
            name: {
                key: round(fmean(row[index] for part in parts[first::2] for row in part), 4)
                for key, first in _FIRST_PART.items()
            }
            for index, name in enumerate(trace.names)
        },
        "anyZone": {
            key: round(fmean(any(row) for part in parts[first::2] for row in part), 4)
            for key, first in _FIRST_PART.items()
        },
        "tuning": tuning,
        "heldOut": {str(slack): found for slack, (found, _) in zip(SLACKS, of_slacks, strict=True)},
        "variants": [variant for _, found in of_slacks for variant in found],
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True, help="folder with the traces of the nine zones")
    parser.add_argument("--output", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--runs", type=int, default=RUNS, help="simulated jobs for each slack")
    parser.add_argument("--tune", action="store_true", help="tune anew; otherwise the output file's tuning is kept")
    given = parser.parse_args()
    earlier = json.loads(given.output.read_text(encoding="utf-8")) if given.output.exists() else {}
    tuning = list(tuned(given.traces)) if given.tune or "tuning" not in earlier else earlier["tuning"]
    results = measure(given.traces, given.runs, tuning)
    given.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
