"""The checker: judges what a job made, and every second of its status, under overlapping faults. Pure.

The promise:
- the job ends with a model, after each step once and in order;
- every step of every worker group, lost ones included, has the rows and the loss of an undisturbed run, and each row
  is trained on once in each epoch;
- the exported weights have the SHA-256 of an undisturbed run, whatever the numbers of workers were
  (`execution.reproducible: worldSize`);
- the status says Ready and Training only while steps are made, never goes back within a generation, and shows no loss
  but that of its step.

A status may be 30 s old, and longer while the operator does not run or sees nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tests.cluster.chaos.object_faults import LOSS_OF_A_STRANGER
from tests.cluster.chaos.seconds import wrong_for_too_long
from tests.cluster.faults.status_invariants import SECONDS_APART, Times, invariant_violations
from tests.cluster.faults.timeline import TrainingInterval
from tests.cluster.status_history import ObservedJob
from tests.proof.history import Generation, Record, epoch_hashes, surviving

LONGEST_STEP_SECONDS = 15.0
"""In a longer step no steps are made: a rank is stopped, or the volume takes no writes."""
_NOT_STEPPING = frozenset(
    (
        *("Provisioning", "Starting", "Preflight", "Preparing", "WaitingForWorkers", "Loading"),
        *("Recovering", "Restarting", "Stalled", "Suspended", "Complete", "Failed"),
    )
)

_IsWrong = Callable[[ObservedJob, bool], bool]
"""Whether a status is wrong at a time at which steps are made, or not."""


@dataclass(frozen=True)
class ChaosEvidence:
    """Everything that the checker needs about one run.

    Attributes:
        problem: why the run did not come to its end; empty if it did.
        planned_steps: number of steps that the job asks for at its end.
        steps_per_epoch: steps per epoch of the data.
        epoch_hash: hash over all rows of the data, each once.
        generations: all generations, oldest first.
        reference: steps of an undisturbed run.
        sha256: of the exported weights; None if there are none.
        reference_sha256: of those of the undisturbed run.
        statuses: all observed statuses, oldest first.
        intervals: the times in which worker groups made steps.
        operator_downtime: the times in which the operator did not run, or could not see anything.
    """

    problem: str
    planned_steps: int
    steps_per_epoch: int
    epoch_hash: int
    generations: Sequence[Generation]
    reference: Sequence[Record]
    sha256: str | None
    reference_sha256: str | None
    statuses: Sequence[ObservedJob]
    intervals: Sequence[TrainingInterval]
    operator_downtime: Times


def findings(evidence: ChaosEvidence) -> list[str]:
    """Return a message per violation of the promise; empty if the run passed."""
    checks = (_end, _steps, _samples, _epochs, _losses, _weights, _invariants, _phases, _shown_losses, _stranger)
    return [finding for check in checks for finding in check(evidence)]


# -- the model -------------------------------------------------------------------------------------------------------


def _end(evidence: ChaosEvidence) -> Iterator[str]:
    if evidence.problem:
        yield evidence.problem


def _steps(evidence: ChaosEvidence) -> Iterator[str]:
    found = [record["step"] for record in surviving(evidence.generations)]
    planned = list(range(1, evidence.planned_steps + 1))
    if found != planned:
        missing, repeated = len(set(planned) - set(found)), len(found) - len(set(found))
        yield f"of {len(planned)} steps, {missing} are missing and {repeated} count twice, or they are not in order"


def _samples(evidence: ChaosEvidence) -> Iterator[str]:
    yield from _differences(evidence, "samples", "trained on other rows")


def _losses(evidence: ChaosEvidence) -> Iterator[str]:
    yield from _differences(evidence, "loss", "had another loss")


def _differences(evidence: ChaosEvidence, field: str, what: str) -> Iterator[str]:
    """Compares every step, including lost steps that were made again."""
    expected = {record["step"]: record[field] for record in evidence.reference}
    for generation in evidence.generations:
        wrong = [record["step"] for record in generation.steps if record[field] != expected.get(record["step"])]
        if wrong:
            steps = f"{len(wrong)} steps, the first of them {wrong[0]}"
            yield f"generation {generation.number} {what} than the undisturbed run in {steps}"


def _epochs(evidence: ChaosEvidence) -> Iterator[str]:
    """Checks whole epochs; a job may end within one."""
    by_epoch = epoch_hashes(evidence.generations, evidence.steps_per_epoch)
    whole = evidence.planned_steps // evidence.steps_per_epoch
    wrong = [epoch for epoch, total in by_epoch.items() if epoch <= whole and total != evidence.epoch_hash]
    if wrong:
        yield f"not every row was trained on exactly once in {len(wrong)} epochs, the first of them {wrong[0]}"


def _weights(evidence: ChaosEvidence) -> Iterator[str]:
    if evidence.sha256 is None:
        yield "no model was exported"
    elif evidence.sha256 != evidence.reference_sha256:
        yield "the exported weights differ from those of the undisturbed run"


# -- the status ------------------------------------------------------------------------------------------------------


def _own_statuses(evidence: ChaosEvidence) -> list[ObservedJob]:
    """The statuses that the operator wrote: without those that a stranger has changed."""
    return [each for each in evidence.statuses if _is_own(each)]


def _is_own(seen: ObservedJob) -> bool:
    return bool(seen.status.get("loss") != LOSS_OF_A_STRANGER)


def _invariants(evidence: ChaosEvidence) -> Iterator[str]:
    downtime = sorted(evidence.operator_downtime)
    yield from invariant_violations(evidence.statuses, evidence.intervals, downtime, is_own=_is_own)


def _phases(evidence: ChaosEvidence) -> Iterator[str]:
    """Compares the status of every second with the steps; it must not be wrong for longer than a status may be old.

    `Training: Unknown` claims nothing: the head is lost, and the workers may train on.
    """
    own = _own_statuses(evidence)
    yield from _too_long(evidence, own, _claims_steps, "said Training or Ready, but no steps were made")
    yield from _too_long(evidence, own, _denies_steps, "had a phase without steps, but steps were made")


def _claims_steps(status: ObservedJob, are_made: bool) -> bool:
    in_training = status.status.get("phase") == "Training"
    return not are_made and in_training and (status.holds("Training") or status.holds("Ready"))


def _denies_steps(status: ObservedJob, are_made: bool) -> bool:
    is_known = status.condition("Training").get("status") != "Unknown"
    return are_made and is_known and status.status.get("phase") in _NOT_STEPPING


def _too_long(evidence: ChaosEvidence, own: Sequence[ObservedJob], is_wrong: _IsWrong, what: str) -> Iterator[str]:
    """Yields a message for each time in which the status was wrong in every second for too long."""
    reported = [each for each in own if "phase" in each.status]
    yield from wrong_for_too_long(
        reported,
        lambda second, status: is_wrong(status, _are_made(evidence.intervals, second)),
        evidence.operator_downtime,
        what,
    )


def _are_made(intervals: Sequence[TrainingInterval], time: float) -> bool:
    """Whether a worker group made steps at a time: it was in a step that did not take too long."""
    for interval in intervals:
        if interval.begin - SECONDS_APART <= time <= interval.end + SECONDS_APART:
            done = sorted((interval.begin, *interval.steps.values()))
            after = bisect_left(done, time)
            if after in (0, len(done)):
                return True
            return done[after] - done[after - 1] <= LONGEST_STEP_SECONDS
    return False


def _shown_losses(evidence: ChaosEvidence) -> Iterator[str]:
    """A shown loss is that of the shown step, also after a worker group went back; step 0 has none."""
    made = {(each.number, record["step"]): record["loss"] for each in evidence.generations for record in each.steps}
    expected = {record["step"]: record["loss"] for record in evidence.reference}
    for seen in _own_statuses(evidence):
        loss, step, generation = seen.status.get("loss"), seen.status.get("step", 0), seen.status.get("generation", 0)
        if loss is not None and loss != shown(made.get((generation, step), expected.get(step))):
            when = f"{seen.time:.1f}, {seen.status.get('phase')}, generation {generation}, step {step}"
            yield f"{when}: the loss {loss} is shown, which is not that of the step"


def shown(loss: float | None) -> float | None:
    """A loss as the status shows it: with five significant digits."""
    return None if loss is None else float(f"{loss:.5g}")


def _stranger(evidence: ChaosEvidence) -> Iterator[str]:
    """What a stranger wrote into the status is replaced once the operator has something to write."""
    yield from _too_long(
        evidence,
        evidence.statuses,
        lambda status, are_made: are_made and status.status.get("loss") == LOSS_OF_A_STRANGER,
        "kept what a stranger wrote",
    )
