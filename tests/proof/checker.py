"""The oracle: what the evidence of one disturbed run says against the promise. Pure; nothing found is a run proven.

The promise: every step on the same samples as without disturbance, each sample once per epoch; at one world size the
same bits; after a change of it the losses that the old world size would have had; and nothing that a lost worker group
still did counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from spotune_trainer.checkpoint.layout import CheckpointName
from tests.proof.history import Generation, Record, Segment, losses_of, surviving
from tests.proof.schedules import COMPARED_STEPS

NEXT_LOSSES = 1e-6
"""Relative; of the steps after a change of world size, in fp32 with dropout."""
WHOLE_CURVE = 1e-3
"""Relative; of any step, beside the undisturbed run of the first world size."""
EXPECTED_CAUSES = frozenset({"workerLost", "headLost", "communication", "infrastructure", "preempted"})


@dataclass(frozen=True)
class Stretch:
    """Steps in a row at one world size, and what they are compared with.

    Attributes:
        again: the same steps from the same checkpoint by as many workers, undisturbed; empty where there is none.
        same_bits: whether that ended with the same bytes: in the checkpoint that the next stretch started from, or
            for the last stretch in the exported weights.
        by_old_world: the first steps as the world size before computes them from the same checkpoint; None for the
            first stretch.
    """

    segment: Segment
    again: Sequence[Record]
    same_bits: bool
    by_old_world: Sequence[Record] | None


@dataclass(frozen=True)
class Evidence:
    """All there is to say about one run.

    Attributes:
        exit_code: of the last command.
        planned_steps: that the job asks for.
        steps_per_epoch: of the data.
        epoch_hash: over all rows, each once.
        generations: all, oldest first.
        undisturbed: steps of a run of the first world size that nobody disturbed.
        stretches: the surviving steps by world size.
        corrupt: checkpoints that were gone on from and do not hold what their manifests say.
        committed: seconds since the epoch at which each checkpoint that was gone on from was committed.
        export_sha256: of the weights that were exported; None: there are none.
        claimed_sha256: what the run says of it.
        causes: of all failures in the ledger.
        left_behind: processes and files that should be gone.
    """

    exit_code: int
    planned_steps: int
    steps_per_epoch: int
    epoch_hash: int
    generations: Sequence[Generation]
    undisturbed: Sequence[Record]
    stretches: Sequence[Stretch]
    corrupt: Mapping[CheckpointName, str]
    committed: Mapping[CheckpointName, float]
    export_sha256: str | None
    claimed_sha256: str | None
    causes: Sequence[str]
    left_behind: Sequence[str]


def findings(evidence: Evidence) -> list[str]:
    """What is wrong, a sentence each; nothing where the run is proven."""
    checks = (_end, _history, _samples, _epochs, _curve, _bits, _next_losses, _lineage, _checkpoints, _export)
    return [finding for check in checks for finding in check(evidence)]


def worst_next_loss(evidence: Evidence) -> float | None:
    """Largest relative difference of a loss after a change of world size; None where there was no change."""
    changed = [stretch for stretch in evidence.stretches if stretch.by_old_world is not None]
    return max((_largest(stretch.segment.steps, stretch.by_old_world or ()) for stretch in changed), default=None)


def worst_of_curve(evidence: Evidence) -> float:
    """Largest relative difference of any loss from the undisturbed run's."""
    return _largest(surviving(evidence.generations), evidence.undisturbed)


def _end(evidence: Evidence) -> Iterator[str]:
    if evidence.exit_code != 0:
        yield f"the command ended with {evidence.exit_code}"
    for cause in sorted(set(evidence.causes) - EXPECTED_CAUSES):
        yield f"a failure was put down to {cause}"
    for left in evidence.left_behind:
        yield f"left behind: {left}"


def _history(evidence: Evidence) -> Iterator[str]:
    found = [record["step"] for record in surviving(evidence.generations)]
    expected = list(range(1, evidence.planned_steps + 1))
    if found != expected:
        missing, repeated = sorted(set(expected) - set(found)), len(found) - len(set(found))
        yield f"of {len(expected)} steps {len(missing)} are missing and {repeated} counted twice"


def _samples(evidence: Evidence) -> Iterator[str]:
    """Every step, also one that was lost and made again."""
    expected = {record["step"]: record["samples"] for record in evidence.undisturbed}
    for generation in evidence.generations:
        wrong = [record["step"] for record in generation.steps if record["samples"] != expected.get(record["step"])]
        if wrong:
            yield f"generation {generation.number} trained on other samples than undisturbed in {_steps(wrong)}"


def _epochs(evidence: Evidence) -> Iterator[str]:
    by_epoch: dict[int, int] = {}
    for record in surviving(evidence.generations):
        epoch = (record["step"] - 1) // evidence.steps_per_epoch + 1
        by_epoch[epoch] = (by_epoch.get(epoch, 0) + int(record["samples"], 16)) % (1 << 64)
    wrong = [epoch for epoch, total in by_epoch.items() if total != evidence.epoch_hash]
    if wrong:
        yield f"not every sample was trained on exactly once in epoch {', '.join(map(str, wrong))}"


def _curve(evidence: Evidence) -> Iterator[str]:
    worst = worst_of_curve(evidence)
    if not worst <= WHOLE_CURVE:
        yield f"the curve is {worst:.1e} from the undisturbed one ({WHOLE_CURVE:.0e} allowed)"


def _bits(evidence: Evidence) -> Iterator[str]:
    for stretch in evidence.stretches:
        segment = stretch.segment
        what = f"the {len(segment.steps)} steps of {segment.world_size} workers after step {segment.first_step}"
        again, found = losses_of(stretch.again), segment.losses
        if again != found:
            differ = [r["step"] for r, a in zip(segment.steps, again, strict=False) if r["loss"] != a]
            yield f"{what} have other losses than undisturbed in {_steps(differ) or 'their number'}"
        if not stretch.same_bits:
            yield f"{what} end with other bits than undisturbed"


def _next_losses(evidence: Evidence) -> Iterator[str]:
    for before, after in zip(evidence.stretches, evidence.stretches[1:], strict=False):
        old, segment = before.segment.world_size, after.segment
        change = f"after the change from {old} to {segment.world_size} workers at step {segment.first_step}"
        compared = after.by_old_world or ()
        if len(compared) < COMPARED_STEPS or len(segment.steps) < COMPARED_STEPS:
            yield f"{change} fewer than {COMPARED_STEPS} steps could be compared"
            continue
        worst = _largest(segment.steps, compared)
        if not worst <= NEXT_LOSSES:
            yield f"{change} a loss is {worst:.1e} from that of {old} workers ({NEXT_LOSSES:.0e} allowed)"


def _lineage(evidence: Evidence) -> Iterator[str]:
    """A commit counts only if no later generation had started from something older."""
    generations = evidence.generations
    for generation in generations:
        name = generation.restored
        if name is None:
            continue
        for later in generations:
            if name.generation < later.number < generation.number and later.first_step < name.step:
                yield (
                    f"generation {generation.number} went on from {name} of a superseded generation: "
                    f"generation {later.number} had started from step {later.first_step}"
                )
                break
    for earlier in generations:
        later_claims = [later.claimed for later in generations if later.number > earlier.number]
        if earlier.exported is not None and any(claimed < earlier.exported for claimed in later_claims):
            yield f"generation {earlier.number} exported the model when it was superseded"


def _checkpoints(evidence: Evidence) -> Iterator[str]:
    for name, reason in evidence.corrupt.items():
        yield f"training went on from {name}, which is corrupt: {reason}"
    for generation in evidence.generations:
        restored = generation.restored if generation.went_on else None
        if restored is not None and evidence.committed.get(restored, math.inf) > generation.claimed:
            yield f"generation {generation.number} went on from {restored} before it was committed"


def _export(evidence: Evidence) -> Iterator[str]:
    if evidence.export_sha256 is None:
        yield "no model was exported"
    elif evidence.export_sha256 != evidence.claimed_sha256:
        yield "the exported weights do not have the SHA-256 that the run says they have"


def _largest(found: Sequence[Record], expected: Sequence[Record]) -> float:
    """Largest relative difference of two curves' losses, as far as both go; infinite where one is not finite."""
    pairs = zip(losses_of(found), losses_of(expected), strict=False)
    differences = [abs(a - b) / abs(b) for a, b in pairs]
    return max((math.inf if math.isnan(each) else each for each in differences), default=math.inf)


def _steps(numbers: Sequence[int], most: int = 4) -> str:
    if not numbers:
        return ""
    shown = ", ".join(str(number) for number in numbers[:most])
    return f"step{'s' if len(numbers) > 1 else ''} {shown}" + (" ..." if len(numbers) > most else "")
