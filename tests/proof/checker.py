"""The checker: compares the evidence of one run with the exactness guarantee. Pure; no findings mean a proven run.

The guarantee:
- every step trains on the same samples as in an undisturbed run, and every sample once per epoch, or in a mixture on
  those that an independent walk through it finds;
- at a constant world size the result is bit-identical;
- after a change of world size the losses are those that the old world size would have had;
- work of a superseded worker group never counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from spotune_trainer.checkpoint.layout import CheckpointName
from tests.proof.history import Generation, Record, Segment, epoch_hashes, losses_of, surviving
from tests.proof.schedules import COMPARED_STEPS

NEXT_LOSSES = 1e-6
"""Relative tolerance for the losses after a change of world size, in fp32 with dropout."""
WHOLE_CURVE = 1e-3
"""Relative tolerance for any loss, against the undisturbed run of the first world size."""
EXPECTED_CAUSES = frozenset({"workerLost", "headLost", "communication", "infrastructure", "preempted"})


@dataclass(frozen=True)
class ComparedSegment:
    """Consecutive steps at one world size, and the reference runs to compare them with.

    Attributes:
        again: the same steps from the same checkpoint in an undisturbed run of as many workers; empty if there is none.
        same_bits: whether both ended with the same bytes: those of the checkpoint from which the next segment started,
            or of the exported weights for the last segment.
        by_old_world: the first steps as the previous world size computes them from the same checkpoint; None for the
            first segment.
    """

    segment: Segment
    again: Sequence[Record]
    same_bits: bool
    by_old_world: Sequence[Record] | None


@dataclass(frozen=True)
class Evidence:
    """Everything that the checker needs about one run.

    Attributes:
        exit_code: exit code of the last command.
        planned_steps: number of steps that the job asks for.
        steps_per_epoch: steps per epoch of the data.
        epoch_hash: hash over all rows, each once; None for a mixture, whose epochs have no such rows.
        mixture: for a mixture, hash over the rows of each step, by an independent walk; empty without a mixture.
        generations: all generations, oldest first.
        undisturbed: steps of an undisturbed run of the first world size.
        compared: the surviving steps by world size, with their reference runs.
        corrupt: corrupt checkpoints from which training resumed, with the reason.
        committed: Unix time at which each checkpoint from which training resumed was committed.
        export_sha256: SHA-256 of the exported weights; None if there are none.
        claimed_sha256: SHA-256 that the run reported.
        causes: causes of all failures in the ledger.
        left_behind: processes and files that should be gone.
    """

    exit_code: int
    planned_steps: int
    steps_per_epoch: int
    epoch_hash: int | None
    generations: Sequence[Generation]
    undisturbed: Sequence[Record]
    compared: Sequence[ComparedSegment]
    corrupt: Mapping[CheckpointName, str]
    committed: Mapping[CheckpointName, float]
    export_sha256: str | None
    claimed_sha256: str | None
    causes: Sequence[str]
    left_behind: Sequence[str]
    mixture: Mapping[int, int] = field(default_factory=dict)


def findings(evidence: Evidence) -> list[str]:
    """Return a message per violation of the guarantee; empty if the run is proven."""
    checks = (_end, _history, _samples, _epochs, _mixture, _curve, _bits, _next_losses, _lineage, _checkpoints, _export)
    return [finding for check in checks for finding in check(evidence)]


def max_next_loss_difference(evidence: Evidence) -> float | None:
    """Largest relative difference of a loss after a change of world size; None without a change."""
    changed = [each for each in evidence.compared if each.by_old_world is not None]
    return max(
        (_largest(each.segment.steps, each.by_old_world or ()) for each in changed),
        default=None,
    )


def max_curve_difference(evidence: Evidence) -> float:
    """Largest relative difference of any loss from the undisturbed run's."""
    return _largest(surviving(evidence.generations), evidence.undisturbed)


def _end(evidence: Evidence) -> Iterator[str]:
    if evidence.exit_code != 0:
        yield f"the command exited with {evidence.exit_code}"
    for cause in sorted(set(evidence.causes) - EXPECTED_CAUSES):
        yield f"a failure has the unexpected cause {cause}"
    for left in evidence.left_behind:
        yield f"left behind: {left}"


def _history(evidence: Evidence) -> Iterator[str]:
    found = [record["step"] for record in surviving(evidence.generations)]
    expected = list(range(1, evidence.planned_steps + 1))
    if found != expected:
        missing, repeated = sorted(set(expected) - set(found)), len(found) - len(set(found))
        yield f"of {len(expected)} steps, {len(missing)} are missing and {repeated} are counted twice"


def _samples(evidence: Evidence) -> Iterator[str]:
    """Checks every step, including lost steps that were repeated."""
    expected = {record["step"]: record["samples"] for record in evidence.undisturbed}
    for generation in evidence.generations:
        wrong = [record["step"] for record in generation.steps if record["samples"] != expected.get(record["step"])]
        if wrong:
            who = f"generation {generation.number}"
            yield f"{who} trained on different samples than the undisturbed run in {_steps(wrong)}"


def _epochs(evidence: Evidence) -> Iterator[str]:
    if evidence.epoch_hash is None:
        return
    by_epoch = epoch_hashes(evidence.generations, evidence.steps_per_epoch)
    wrong = [epoch for epoch, total in by_epoch.items() if total != evidence.epoch_hash]
    if wrong:
        yield f"not every sample was trained on exactly once in epoch {', '.join(map(str, wrong))}"


def _mixture(evidence: Evidence) -> Iterator[str]:
    """Checks every step of a mixture, including lost steps that were repeated."""
    for generation in evidence.generations if evidence.mixture else ():
        wrong = [
            record["step"]
            for record in generation.steps
            if int(record["samples"], 16) != evidence.mixture.get(record["step"])
        ]
        if wrong:
            yield f"generation {generation.number} trained on other samples than the mixture has in {_steps(wrong)}"


def _curve(evidence: Evidence) -> Iterator[str]:
    worst = max_curve_difference(evidence)
    if not worst <= WHOLE_CURVE:
        yield f"the curve differs by {worst:.1e} from the undisturbed one ({WHOLE_CURVE:.0e} allowed)"


def _bits(evidence: Evidence) -> Iterator[str]:
    for each in evidence.compared:
        segment = each.segment
        what = f"the {len(segment.steps)} steps of {segment.world_size} workers after step {segment.first_step}"
        again, found = losses_of(each.again), segment.losses
        if again != found:
            differ = [r["step"] for r, a in zip(segment.steps, again, strict=False) if r["loss"] != a]
            yield f"{what} have different losses than the undisturbed run in {_steps(differ) or 'their number'}"
        if not each.same_bits:
            yield f"{what} end with different bits than the undisturbed run"


def _next_losses(evidence: Evidence) -> Iterator[str]:
    for before, after in zip(evidence.compared, evidence.compared[1:], strict=False):
        old, segment = before.segment.world_size, after.segment
        change = f"after the change from {old} to {segment.world_size} workers at step {segment.first_step}"
        compared = after.by_old_world or ()
        if len(compared) < COMPARED_STEPS or len(segment.steps) < COMPARED_STEPS:
            yield f"{change} fewer than {COMPARED_STEPS} steps could be compared"
            continue
        worst = _largest(segment.steps, compared)
        if not worst <= NEXT_LOSSES:
            yield f"{change} a loss differs by {worst:.1e} from that of {old} workers ({NEXT_LOSSES:.0e} allowed)"


def _lineage(evidence: Evidence) -> Iterator[str]:
    """A commit counts only if no later generation had started from an older step."""
    generations = evidence.generations
    for generation in generations:
        name = generation.restored
        if name is None:
            continue
        for later in generations:
            if name.generation < later.number < generation.number and later.first_step < name.step:
                yield (
                    f"generation {generation.number} resumed from {name} of a superseded generation: "
                    f"generation {later.number} had started from step {later.first_step}"
                )
                break
    for earlier in generations:
        later_claims = [later.claimed for later in generations if later.number > earlier.number]
        if earlier.exported is not None and any(claimed < earlier.exported for claimed in later_claims):
            yield f"generation {earlier.number} exported the model after it was superseded"


def _checkpoints(evidence: Evidence) -> Iterator[str]:
    for name, reason in evidence.corrupt.items():
        yield f"training resumed from {name}, which is corrupt: {reason}"
    for generation in evidence.generations:
        restored = generation.restored if generation.made_progress else None
        if restored is not None and evidence.committed.get(restored, math.inf) > generation.claimed:
            yield f"generation {generation.number} resumed from {restored} before it was committed"


def _export(evidence: Evidence) -> Iterator[str]:
    if evidence.export_sha256 is None:
        yield "no model was exported"
    elif evidence.export_sha256 != evidence.claimed_sha256:
        yield "the exported weights do not have the SHA-256 that the run reported"


def _largest(found: Sequence[Record], expected: Sequence[Record]) -> float:
    """Largest relative difference of the losses over the common steps; infinite if a loss is not finite."""
    pairs = zip(losses_of(found), losses_of(expected), strict=False)
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return max((math.inf if math.isnan(each) else each for each in differences), default=math.inf)


def _steps(numbers: Sequence[int], most: int = 4) -> str:
    if not numbers:
        return ""
    shown = ", ".join(str(number) for number in numbers[:most])
    return f"step{'s' if len(numbers) > 1 else ''} {shown}" + (" ..." if len(numbers) > most else "")
