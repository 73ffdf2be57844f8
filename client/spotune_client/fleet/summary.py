"""What the jobs of each team have used: GPU hours, cost, goodput and waste, added up from the statuses of the jobs."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from spotune.custom_resource.object_names import TEAM_LABEL
from spotune_client.cluster.jobs import Job, outcome, phase, status_of
from spotune_client.cluster.resources import label_of

By = Literal["team", "namespace"]
NOT_COUNTED: Final = ("deleted jobs", "ModelServices")
"""What uses GPUs and is not in the figures: the status of a service has neither GPU hours nor a cost."""
_SECONDS_PER_HOUR: Final = 3600.0


@dataclass
class Money:
    """Costs of one currency.

    Attributes:
        spent: What the GPUs have cost.
        saved: What they would have cost more on-demand.
        wasted: Part of ``spent`` outside of steps that count, at most.
    """

    spent: float = 0.0
    saved: float = 0.0
    wasted: float = 0.0


@dataclass
class Usage:
    """What a group of jobs has used.

    Attributes:
        team: Name of the team; empty: all teams.
        phases: Number of jobs by phase.
        spot_hours: GPU hours on spot nodes.
        on_demand_hours: GPU hours on on-demand nodes.
        steps_lost: Steps that were made and had to be repeated.
        money: Costs by currency.
        without_cost: Number of jobs with GPU hours and without a cost in their status.
        cost_problem: Why the first of them has none, as its status says it; empty if it does not.
        measured_hours: GPU hours of jobs whose goodput is known.
        productive_hours: Part of them in steps that count, by goodput.
    """

    team: str = ""
    phases: Counter[str] = field(default_factory=Counter)
    spot_hours: float = 0.0
    on_demand_hours: float = 0.0
    steps_lost: int = 0
    money: dict[str, Money] = field(default_factory=lambda: defaultdict(Money))
    without_cost: int = 0
    cost_problem: str = ""
    measured_hours: float = 0.0
    productive_hours: float = 0.0

    @property
    def jobs(self) -> int:
        """Number of jobs."""
        return self.phases.total()

    @property
    def gpu_hours(self) -> float:
        """GPU hours of running worker pods: the time that a cloud bills."""
        return self.spot_hours + self.on_demand_hours

    @property
    def goodput(self) -> float | None:
        """Goodput of the jobs, weighted by their GPU hours, 0 to 1; None before any is known."""
        return self.productive_hours / self.measured_hours if self.measured_hours else None

    @property
    def wasted_hours(self) -> float | None:
        """GPU hours outside of steps that count, at most; None before any goodput is known.

        They are GPU hours x (1 - goodput). Goodput is a share of the wall clock. While a job waits for workers, it has
        fewer GPUs or none, so the waste is lower than this.
        """
        return self.measured_hours - self.productive_hours if self.measured_hours else None

    def add(self, job: Job) -> None:
        """Count a job."""
        status = status_of(job)
        seconds = status.get("gpuSeconds") or {}
        spot, on_demand = (float(seconds.get(kind) or 0) / _SECONDS_PER_HOUR for kind in ("spot", "onDemand"))
        hours, goodput = spot + on_demand, status.get("goodput")
        self.phases[outcome(job) or phase(job)] += 1
        self.spot_hours += spot
        self.on_demand_hours += on_demand
        self.steps_lost += status.get("stepsLost") or 0
        if goodput is not None:
            self.measured_hours += hours
            self.productive_hours += hours * goodput
        cost: Mapping[str, Any] = status.get("cost") or {}
        if cost.get("spent") is not None:
            money = self.money[str(cost.get("currency") or "")]
            money.spent += float(cost["spent"])
            money.saved += float(cost.get("saved") or 0)
            money.wasted += float(cost["spent"]) * (1 - goodput) if goodput is not None else 0.0
        elif hours:
            self.without_cost += 1
            self.cost_problem = self.cost_problem or str(cost.get("unknown") or "")

    def as_json(self) -> dict[str, Any]:
        """The figures with camelCase keys for ``--output json``."""
        return {
            "team": self.team,
            "jobs": dict(self.phases),
            "gpuHours": {"spot": self.spot_hours, "onDemand": self.on_demand_hours, "wasted": self.wasted_hours},
            "goodput": self.goodput,
            "stepsLost": self.steps_lost,
            "cost": [{"currency": currency, **vars(money)} for currency, money in sorted(self.money.items())],
            "jobsWithoutCost": self.without_cost,
        }


@dataclass(frozen=True)
class Fleet:
    """The usage of all teams.

    Attributes:
        teams: A usage for each team, the one with the most GPU hours first.
        total: The usage of all jobs.
    """

    teams: list[Usage]
    total: Usage

    @property
    def note(self) -> str:
        """Why costs are incomplete; empty if they are not."""
        if not self.total.without_cost:
            return ""
        which = f"{self.total.without_cost} of {self.total.jobs} jobs"
        why = self.total.cost_problem or "the operator knows no price of their nodes, or is older than this command"
        return f"{which} have no cost: {why}"

    def as_json(self) -> dict[str, Any]:
        """The figures with camelCase keys for ``--output json``."""
        return {
            "teams": [usage.as_json() for usage in self.teams],
            "total": self.total.as_json(),
            "note": self.note,
            "notCounted": [*NOT_COUNTED],
        }


def fleet_of(jobs: Iterable[Job], by: By = "team", label: str = TEAM_LABEL) -> Fleet:
    """The usage of jobs by team.

    Args:
        jobs: The jobs as the API server returns them.
        by: ``team``: the value of the label, or without it the namespace. ``namespace``: the namespace alone.
        label: The label.
    """
    total, teams = Usage(), dict[str, Usage]()
    for job in jobs:
        namespace = job["metadata"]["namespace"]
        team = namespace if by == "namespace" else label_of(job, label) or namespace
        for usage in (total, teams.setdefault(team, Usage(team))):
            usage.add(job)
    return Fleet(sorted(teams.values(), key=lambda usage: (-usage.gpu_hours, usage.team)), total)


COLUMNS: Final = ("team", "jobs", "running", "failed", "GPU hours", "on spot", "goodput", "waste", "cost", "saved")


def cells(usage: Usage, name: str = "") -> list[str]:
    """The cells of a team for display, in the order of ``COLUMNS``; ``-`` is not known."""
    ended = sum(usage.phases[each] for each in ("Complete", "Failed", "Suspended"))
    spot = f"{usage.spot_hours / usage.gpu_hours:.0%}" if usage.gpu_hours else "-"
    waste = f"<= {usage.wasted_hours:,.1f} h" if usage.wasted_hours is not None else "-"
    return [
        name or usage.team,
        str(usage.jobs),
        str(usage.jobs - ended),
        str(usage.phases["Failed"]),
        f"{usage.gpu_hours:,.1f}",
        spot,
        f"{usage.goodput:.0%}" if usage.goodput is not None else "-",
        waste,
        _amounts({currency: money.spent for currency, money in usage.money.items()}),
        _amounts({currency: money.saved for currency, money in usage.money.items()}),
    ]


def _amounts(values: Mapping[str, float]) -> str:
    return " + ".join(f"{value:,.2f} {currency}".rstrip() for currency, value in sorted(values.items())) or "-"
