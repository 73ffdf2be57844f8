"""The deadline holds with any history of spot pools: the policy and the choice between pools, together over time.

Pods come and go as KubeRay makes them. The group trains while at least one worker is ready, in proportion to their
number, and pauses whenever they change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from spotune.job import DeadlineStatus, FinetuneJob, FinetuneJobStatus
from spotune.pools.of_job import pools_of
from spotune.pools.on_demand import OnDemandUse, with_on_demand
from spotune.pools.terms import Wish
from spotune_operator.observe.state import Pod
from spotune_operator.observe.supervisor_status import parse_progress
from spotune_operator.reconcile.limits.deadline import DeadlineDecision, deadline_status, decide_deadline
from tests.api.support.simulated_pools import SimulatedPools
from tests.operator.support.scenarios import SETTINGS, a_cluster_job

BEGIN = 1_800_000_000.0
WORK = 6000
"""Steps of a second with both workers."""
EVERY = 20.0
"""Seconds between two reconciles: the operator's are at most 60 apart."""
PAUSE = 40.0
"""Seconds without a step after each change of the group."""
START = 120.0
"""What the operator expects a start to take: more than a pod (30 s), a pause, and the time between reconciles."""
OPERATOR = replace(SETTINGS, spot_start_seconds=START, on_demand_start_seconds=START)
COUNT = 2
POOLS = [
    {"name": "a", "zone": "a", "price": "1.00 USD"},
    {"name": "b", "zone": "b", "price": "1.20 USD"},
    {"name": "sure", "capacity": "on-demand", "price": "3.00 USD"},
]


class Training:
    """A job in simulated pools, whose operator decides by the deadline."""

    def __init__(self, slack: float) -> None:
        workers = {"count": COUNT, "min": 1, "pools": POOLS, "poolPatience": "2m", "resizeCooldown": "2m"}
        self.job: FinetuneJob = a_cluster_job(workers=workers, deadline=f"{WORK + slack:.0f}s")
        self.listed = pools_of(self.job.spec.workers)
        self.cluster = SimulatedPools(self.listed, Wish(COUNT, 1, 120.0), {"a": 0, "b": 0, "sure": COUNT}, BEGIN)
        self.status = FinetuneJobStatus(deadline=DeadlineStatus(seconds_per_step=1.0, measured_workers=COUNT))
        self.done, self.ready, self.paused_until = 0.0, frozenset[str](), 0.0
        self.uses: set[OnDemandUse] = set()

    @property
    def ended(self) -> bool:
        return self.done >= WORK

    def pods(self) -> list[Pod]:
        return [
            Pod(
                worker.name, "ns", worker.name, "job", "workers", worker.pool, "",
                node="n" if worker.has_node else "", phase="Running" if worker.ready else "Pending",
                ready=worker.ready, created=worker.created,
            )
            for worker in self.cluster.workers.values()
        ]  # fmt: skip

    def decide(self) -> DeadlineDecision:
        now, pods = self.cluster.now, self.pods()
        steps = int(self.done)
        progress = parse_progress({"step": steps, "totalSteps": WORK, "lastCheckpoint": {"step": steps, "time": now}})
        measured = deadline_status(
            self.job, self.status, progress, pods, created=BEGIN, now=now, active=bool(self.ready)
        )
        self.status = self.status.model_copy(update={"deadline": measured})
        decided = decide_deadline(
            self.job, self.status, progress, measured, pods, created=BEGIN, now=now, settings=OPERATOR
        )
        assert decided is not None
        return decided

    def step(self, nodes: tuple[int, int]) -> None:
        use = self.decide().on_demand_pools
        self.uses.add(use)
        self.cluster.wish = Wish(COUNT, 1, 0.0 if use is OnDemandUse.FIRST else 120.0)
        self.cluster.pools, self.cluster.memory = with_on_demand(self.listed, self.cluster.memory, use)
        self.cluster.nodes |= {"a": nodes[0], "b": nodes[1]}
        self.cluster.step(EVERY)
        ready = frozenset(worker.name for worker in self.cluster.workers.values() if worker.ready)
        group = self.ready if self.ready <= ready and len(self.ready) == COUNT else frozenset(sorted(ready)[:COUNT])
        if group != self.ready:
            self.ready, self.paused_until = group, self.cluster.now + PAUSE
        elif self.cluster.now > self.paused_until:
            self.done += EVERY * len(self.ready) / COUNT


def train(history: Sequence[tuple[int, int]], slack: float) -> Training:
    """Train with nodes of the spot pools that change every ten minutes, again and again."""
    training = Training(slack)
    while not training.ended:
        index = int((training.cluster.now - BEGIN) / 600) % len(history)
        training.step(history[index])
        assert training.cluster.now - BEGIN < 3 * WORK, "it never ends"
    return training


@settings(max_examples=30, deadline=None)
@given(
    history=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2)), min_size=1, max_size=18),
    slack=st.floats(2 * START + 60, WORK / 2),
)
def test_deadline_holds_with_any_history_of_spot_pools(history: list[tuple[int, int]], slack: float) -> None:
    training = train(history, slack)
    assert training.cluster.now - BEGIN <= WORK + slack


def test_slack_is_used_before_money_is_spent() -> None:
    """Without a spot node for half an hour in the middle, the job waits if it can, and pays if it must."""
    away = [(2, 2), (2, 2), (0, 0), (0, 0), (0, 0), (2, 2), (2, 2), (2, 2), (2, 2), (2, 2), (2, 2), (2, 2)]
    patient, urgent = train(away, 3000), train(away, 400)
    assert patient.uses == {OnDemandUse.NOT_YET}
    assert OnDemandUse.FIRST in urgent.uses
