"""Writes docs/deadline.md and its plot from the results of `benchmarks/deadline.py`.

python -m benchmarks.deadline_page
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.figure import Figure

from benchmarks.deadline import FEWER_RUNS
from benchmarks.plotting import svg
from docs.wrapping import wrap_page

RESULTS = Path(__file__).parent / "results" / "deadline.json"
_DOCS = Path(__file__).parents[1] / "docs"
POLICIES: Final = {
    "ours": "ours, all zones",
    "oursWithoutHistory": "ours, all zones, no history before the job",
    "cheapestFirst": "cheapest first, all zones",
    "bestZone": "ours, best single zone",
    "uniformProgress": "Uniform Progress, best single zone",
    "onDemandOnly": "on-demand only",
}
_PLOTTED: Final = ("ours", "cheapestFirst", "bestZone", "uniformProgress", "onDemandOnly")
_COLORS: Final = ("#d1732c", "#8fb8de", "#e3b78f", "#5b83a8", "#9a9a9a")
COST_GOAL: Final = 1.10
AVAILABILITY_GOAL: Final = 0.98
_INTRO = """# Deadlines

What does a deadline cost on spot nodes? [deadline.py](../benchmarks/deadline.py) simulates jobs with
the policy of [`spec.deadline`](how-to/deadline.md) on recorded spot markets, and compares it with
other policies and with the least cost that was possible.

```console
$ python -m benchmarks.deadline --traces FOLDER \\
    --output benchmarks/results/deadline.json
$ python -m benchmarks.deadline_page
```
"""


def page(results: Mapping[str, Any]) -> str:
    """The page as Markdown.

    Args:
        results: of `benchmarks/deadline.py`.
    """
    sections = (_goals, _costs, _meaning, _zones, _variants, _tuning)
    lines = [_INTRO, *(line for section in sections for line in section(results))]
    return wrap_page("\n".join(lines)).rstrip("\n") + "\n"


def _goals(results: Mapping[str, Any]) -> Iterator[str]:
    held_out = results["heldOut"]
    ours = [found["ours"] for found in held_out.values()]
    total, met = results["runs"] * len(ours), sum(each["met"] for each in ours)
    others = [found[name]["met"] for found in held_out.values() for name in POLICIES if name != "ours"]
    of_others = len(held_out) * sum(runs(results, name) for name in POLICIES if name != "ours")
    worst, available = max(each["overOptimum"] for each in ours), min(each["availability"] for each in ours)
    yield "| goal | simulated | reached |"
    yield "|---|---|---|"
    yield f"| every deadline is met | {met:,} of {total:,} jobs | {_reached(met == total)} |"
    costs = f"{', '.join(_over(each) for each in ours)} at a slack of {', '.join(held_out)}"
    reached = _reached(worst <= COST_GOAL)
    yield f"| cost at most {COST_GOAL:.2f} of the offline optimum, in the mean | {costs} | {reached} |"
    shares = ", ".join(f"{each['availability']:.1%}" for each in ours)
    yield f"| a job has nodes for at least 98 % of its time | {shares} | {_reached(available >= AVAILABILITY_GOAL)} |"
    within = ", ".join(f"{each['within10Percent']:,}" for each in ours)
    yield ""
    yield f"Of {results['runs']:,} jobs at each slack, {within} cost at most {COST_GOAL:.2f} of their own optimum."
    yield f"The other policies met {sum(others):,} of {of_others:,} deadlines: all have the safety net."
    yield ""


def runs(results: Mapping[str, Any], policy: str) -> int:
    """Number of jobs that a policy was simulated for, at each slack."""
    count: int = results["runs"]
    return min(count, FEWER_RUNS) if policy in ("bestZone", "uniformProgress") else count


def _reached(is_reached: bool) -> str:
    return "yes" if is_reached else "**no**"


def _over(found: Mapping[str, Any]) -> str:
    return f"{found['overOptimum']:.3f}"


def _costs(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Cost over the optimum"
    yield ""
    yield "![Cost of each policy over the offline optimum, by slack](images/deadline.svg)"
    yield ""
    yield f"Means over {results['runs']:,} held-out jobs at each slack, of which single zones have the first"
    yield f"{runs(results, 'bestZone')}. The cost over the optimum is a sum over the sum of the same jobs."
    yield ""
    heads = ("slack", "policy", "cost", "over the optimum", "median", "95th", "has nodes", "on demand", "starts")
    yield from _table(heads, _cost_rows(results))
    yield ""
    yield "The best single zone is the one with the least mean cost in these very jobs, which nobody knows in"
    zones = (f"{found['bestZone']['zone']} at {slack}" for slack, found in results["heldOut"].items())
    yield f"advance: for ours {', '.join(zones)}."
    yield ""


def _cost_rows(results: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    for slack, found in results["heldOut"].items():
        yield slack, "offline optimum", f"{found['optimum']['cost']:.2f} USD", "1.000", "", "", "", "", ""
        for name, title in POLICIES.items():
            each = found[name]
            yield (
                *(slack, title, f"{each['cost']:.2f} USD", _over(each)),
                *(f"{each['overOptimumMedian']:.3f}", f"{each['overOptimum95th']:.3f}", f"{each['availability']:.1%}"),
                *(f"{each['onDemandHours']:.2f} h", f"{each['starts']:.1f}"),
            )


def _meaning(results: Mapping[str, Any]) -> Iterator[str]:
    settings = results["settings"]
    hours, probe = f"{settings['traceHours']:.0f} h", f"{settings['intervalSeconds']:.0f} s"
    start, window = f"{settings['startSeconds'] / 60:.1f} min", f"{settings['windowHours']:.0f} h"
    spot, on_demand = settings["spotPrice"], settings["onDemandPrice"]
    yield f"""## What is simulated

- **Trace.** SkyPilot's recording of AWS V100 spot nodes (p3.2xlarge) from 2023-02-15 on, in nine zones:
  {hours}, one probe in {probe}. It is from `skypilot-org/spot-traces`, which names no licence, so it is
  not in this repository. A zone has a node in an interval if the probe at its begin found one.
- **Job.** {settings["workHours"]:.1f} h of training on one node. Slack is the time to the deadline over that time.
- **Starts.** Spot or on demand, {start} pass from the request to the next new step; what a loss undoes
  is part of it. They are paid. A change between nodes costs a start, also if it is planned.
- **Decisions.** Once in each interval. A request that a zone cannot serve is refused within it.
- **Prices.** {spot} USD an hour on spot and {on_demand} USD on demand. The trace has no prices: these are the
  price on demand, and 30 % of it. They are the same in all zones and do not change.
- **Windows.** The trace is cut into ten parts of 4.5 days. The second, fourth, ... are for tuning, the
  first, third, ... are held out. Each job begins at a random time and has its deadline within its part.
  The policy knows the {window} of the trace before the job; a row of the table above is without.
- **What was seen before.** Earlier versions of the policy were looked at on held-out parts, with 200 and 20
  jobs, and two of its rules were revised afterwards. Its numbers were tuned on the parts for tuning alone.

**The offline optimum** is the least cost with which the job can end by its deadline for somebody who
knows the whole trace: dynamic programming over (interval, place, intervals of the start left, intervals
of work left), with the same intervals, starts and prices. It cannot be reached without that knowledge.

**The policies.** *Ours* is [`spotune.deadline`](adr/0073-deadlines-by-slack.md). *Cheapest first* takes
the cheapest spot node there is, of equal ones the first, waits if there is none, and pays from the last
moment on to the end. *Uniform Progress* is the policy of [Can't Be
Late](https://www.usenix.org/conference/nsdi24/presentation/wu-zhanghao) (NSDI 2024), for a single zone.
"""


def _zones(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Single zones"
    yield ""
    yield "How much of the time a zone has a node, and the cost over the optimum of all nine zones: ours and, in"
    yield "brackets, Uniform Progress."
    yield ""
    slacks = list(results["heldOut"])
    yield from _table(
        ("zone", "available for tuning", "held out", *(f"slack {slack}" for slack in slacks)),
        (
            (
                *(zone, f"{shares['tuning']:.1%}", f"{shares['heldOut']:.1%}"),
                *(_beside(results["heldOut"][slack]["zones"][zone]) for slack in slacks),
            )
            for zone, shares in results["zones"].items()
        ),
    )
    every = results["anyZone"]
    yield f"| any | {every['tuning']:.1%} | {every['heldOut']:.1%} |{' |' * len(slacks)}"
    pairs = [zone for slack in slacks for zone in results["heldOut"][slack]["zones"].values()]
    better = sum(zone["ours"]["cost"] <= zone["uniformProgress"]["cost"] for zone in pairs)
    most = max(zone["ours"]["cost"] / zone["uniformProgress"]["cost"] for zone in pairs)
    yield ""
    yield f"Ours costs at most as much as Uniform Progress in {better} of {len(pairs)} cases. The worst case costs"
    yield f"{most:.3f} of it."
    yield ""


def _beside(zone: Mapping[str, Any]) -> str:
    return f"{_over(zone['ours'])} ({_over(zone['uniformProgress'])})"


def _variants(results: Mapping[str, Any]) -> Iterator[str]:
    yield "## Other assumptions"
    yield ""
    yield "The same jobs, with one assumption changed. Each has an optimum of its own."
    yield ""
    yield from _table(
        ("assumption", "slack", "ours", "cheapest first", "deadlines met by ours"),
        (
            (
                *(each["variant"], each["slack"], _over(each["ours"]), _over(each["cheapestFirst"])),
                f"{each['ours']['met']:,} of {each['runs']:,}",
            )
            for each in results["variants"]
        ),
    )
    yield ""


def _tuning(results: Mapping[str, Any]) -> Iterator[str]:
    settings = results["settings"]
    used = f"{settings['windowHours']:.0f} h, {settings['reserve']:g} and {settings['patience']:g}"
    yield f"""## Tuning

Three numbers are tuned: how much of the past counts, for how many losses slack is kept (`reserve`, in
multiples of the expected ones), and how long an outage is waited for (`patience`, in multiples of its
share in the slack). Used: {used}. Means over the slacks, on the parts for tuning:
"""
    yield from _table(
        (
            *("window", "reserve", "patience", "all zones, over the optimum", "with prices by region"),
            "single zones, over Uniform Progress",
        ),
        (
            (
                *(f"{row['windowHours']:.0f} h", f"{row['reserve']:g}", f"{row['patience']:g}"),
                *(f"{row[key]:.3f}" for key in ("allZones", "pricesByRegion", "overUniformProgress")),
            )
            for row in results["tuning"]
        ),
    )
    yield ""
    machine = results["machine"]
    yield f"Machine: {machine['cores']} cores, Python {machine['python']}; the results do not depend on it. All values:"
    yield f"`benchmarks/results/{RESULTS.name}`."


def _table(heads: Sequence[str], rows: Iterator[Sequence[Any]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield "|---" * len(heads) + "|"
    for row in rows:
        yield f"| {' | '.join(str(value) for value in row)} |"


def plot(results: Mapping[str, Any]) -> str:
    """Bars of the cost over the optimum by slack and policy, as an SVG."""

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        slacks, width = list(results["heldOut"]), 0.8 / len(_PLOTTED)
        for index, (name, color) in enumerate(zip(_PLOTTED, _COLORS, strict=True)):
            values = [results["heldOut"][slack][name]["overOptimum"] for slack in slacks]
            places = [place + (index - (len(_PLOTTED) - 1) / 2) * width for place in range(len(slacks))]
            axes.bar(places, values, width=0.92 * width, color=color, label=POLICIES[name])
            for place, value in zip(places, values, strict=True):
                axes.annotate(f"{value:.2f}", (place, value), ha="center", va="bottom", fontsize=7)
        axes.axhline(COST_GOAL, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)), label=f"goal: {COST_GOAL:.2f}")
        axes.set(ylabel="cost over the offline optimum", ylim=(0.9, 3.6))
        axes.set_xticks(range(len(slacks)), [f"slack {slack}" for slack in slacks])
        figure.legend(loc="outside upper center", ncols=3, frameon=False, fontsize=8)

    return svg(draw, (7.0, 3.4))


def read_results() -> dict[str, Any]:
    """The committed results."""
    found: dict[str, Any] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def files() -> dict[Path, str]:
    """The page and its plot as they have to be, by path."""
    results = read_results()
    return {_DOCS / "deadline.md": page(results), _DOCS / "images" / "deadline.svg": plot(results)}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
