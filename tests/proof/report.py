"""Writes docs/proof.md: the result of every schedule and every negative control of the last `make proof`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.proof.checker import NEXT_LOSSES, WHOLE_CURVE
from tests.proof.records import ControlRecord, FaultRecord, Record, ScheduleRecord
from tests.proof.schedules import (
    COMMIT_EVERY,
    COMPARED_STEPS,
    FIRST_LABELS_SEED,
    FIRST_MIXTURE_SEED,
    FIRST_PAIRS_SEED,
    STEPS,
    FaultKind,
    InjectionPoint,
)

_TEXT = f"""# The proof

`make proof` writes this page. Do not edit it. The code is in [tests/proof](../tests/proof).

The proof shows that faults do not change the result of training. It runs seeded schedules of faults
(kills, termination notices, changes of the world size) and compares each run with undisturbed
reference runs.

Each schedule runs the whole product: `spotune run` with its supervisor, Ray, driver and up to four
CPU workers. The workers train a tiny T5 in fp32 with dropout for {STEPS} steps, at one of the four
ZeRO stages. They commit every {COMMIT_EVERY} steps to a volume that is slowed down to the speed of a network
volume. All kills are SIGKILL. A command that was killed, or that exited after a termination notice,
is started again, as the kubelet would do. Nothing else helps the run.

The checker requires of every schedule:

- **Samples.** Every step, including steps that were lost and repeated, trains on the same rows as
  the undisturbed run (hash over the rows).
- **Epochs.** The surviving steps contain each step once. The rows of each epoch are all rows of the
  data, each once.
- **Mixtures.** Schedules from seed {FIRST_MIXTURE_SEED} on train on three sources, which change during the run. The
  rows of every step are those that an independent walk through the mixture finds.
- **Pairs.** Schedules from seed {FIRST_PAIRS_SEED} on train on pairs by DPO, whose reference model runs once.
- **Labels.** Schedules from seed {FIRST_LABELS_SEED} on train a tiny BERT to classify texts, with a new head.
- **Same world size, same bits.** For each world size, all losses are bit-identical to those of an
  undisturbed run from the same start. So is the checkpoint at the end of its steps, or the exported
  weights. A schedule that keeps its world size therefore ends with the SHA-256 of the undisturbed
  run.
- **Changed world size, same losses.** Each of the next {COMPARED_STEPS} losses is within {NEXT_LOSSES:.0e} (relative)
  of the loss that the previous world size computes from the same checkpoint. No loss of the
  whole curve differs by more than {WHOLE_CURVE:.0e} from the undisturbed run of the first world size.
- **Fencing.** No worker group resumed from a checkpoint that was corrupt, incomplete or committed
  by a superseded generation. No superseded generation exported the model.
- **Clean end.** Every failure has an expected cause, the command exited with 0, and no process or
  file was left behind.
"""
_CONTROLS = """## Negative controls

Each control breaks the trainer in one place or damages a checkpoint. The same checker must find it.
Controls on pairs train by DPO, those on mixtures on three sources, and those of a head on texts with
labels. The tests also check that the same runs with an intact trainer have no findings.

- "ranks": a real worker group without Ray resumes from a checkpoint.
- "product": the whole product runs with the broken part, and a fault is injected.
"""


def report(records: Sequence[Record], machine: str) -> str:
    """Return the page as Markdown.

    Args:
        records: results of schedules and controls.
        machine: the machine and date of the run.
    """
    proven = sorted(
        (record for record in records if isinstance(record, ScheduleRecord)), key=lambda record: record.seed
    )
    controls = [record for record in records if isinstance(record, ControlRecord)]
    return "\n".join(
        [_TEXT, *_summary(proven, controls, machine), "", *_schedules(proven), "", *control_table(_CONTROLS, controls)]
    )


def _summary(proven: Sequence[ScheduleRecord], controls: Sequence[ControlRecord], machine: str) -> Iterator[str]:
    good = sum(not record.findings for record in proven)
    caught = sum(control.caught is not None for control in controls)
    records: list[Record] = [*proven, *controls]
    seconds = sum(record.seconds for record in records)
    commits = Counter(record.commit for record in records)
    tested = " and ".join(f"{commit} ({count})" for commit, count in commits.most_common())
    yield f"**{good} of {len(proven)} schedules proven, {caught} of {len(controls)} controls caught.** Commit {tested}."
    yield f"{machine} {seconds / 60:.0f} minutes in total, one run at a time."
    yield ""
    blows = [blow for record in proven for blow in record.blows]
    changes = [pair for record in proven for pair in zip(record.world_sizes, record.world_sizes[1:], strict=False)]
    lost = sum(record.steps_lost for record in proven)
    yield (
        f"{len(blows)} faults, {sum(record.generations for record in proven)} worker group starts, {lost} repeated "
        f"steps, {len(changes)} changes of world size ({len(set(changes))} of the 12 possible ones)."
    )
    yield (
        f"Largest relative difference of a loss: {_largest(record.next_loss for record in proven)} after a change of "
        f"world size, {_largest(record.curve for record in proven)} over whole curves."
    )
    yield ""
    yield from _coverage(blows)


def _coverage(blows: Sequence[FaultRecord]) -> Iterator[str]:
    """How often each fault was injected at each injection point."""
    counted = Counter((blow.deed, blow.moment) for blow in blows)
    missed = sum(not blow.hit for blow in blows)
    yield "| fault | " + " | ".join(InjectionPoint) + " |"
    yield "|---" * (len(InjectionPoint) + 1) + "|"
    for kind in FaultKind:
        yield f"| {kind} | " + " | ".join(str(counted[kind, point] or "") for point in InjectionPoint) + " |"
    yield ""
    yield f"In {missed} of {len(blows)} cases the injection point had passed when the fault hit: in brackets below."


def _schedules(proven: Sequence[ScheduleRecord]) -> Iterator[str]:
    yield "## Schedules"
    yield ""
    yield "| seed | ZeRO | workers | faults (at step) | generations | steps lost | next losses | curve | verdict |"
    yield "|---" * 9 + "|"
    for record in proven:
        cells = (
            str(record.seed),
            str(record.zero_stage),
            " → ".join(str(size) for size in record.world_sizes),
            "; ".join(_fault(blow) for blow in record.blows),
            str(record.generations),
            str(record.steps_lost),
            _difference(record.next_loss),
            _difference(record.curve),
            "proven" if not record.findings else f"**not proven**: {some_findings(record.findings)}",
        )
        yield f"| {' | '.join(cells)} |"


def _fault(blow: FaultRecord) -> str:
    when = "" if blow.moment == InjectionPoint.STEP else f" {blow.moment}"
    return f"{blow.deed}{when if blow.hit else f' [{when.strip()}]'} ({blow.step})"


def control_table(text: str, controls: Sequence[ControlRecord]) -> Iterator[str]:
    """A text and what the checker found of each control; those without the whole product first."""
    yield text
    yield "| what is broken | in | what the checker finds |"
    yield "|---|---|---|"
    for control in sorted(controls, key=lambda control: control.live):
        others = [finding for finding in control.findings if finding != control.caught]
        result = (
            f"**not caught**: {some_findings(others)}"
            if control.caught is None
            else some_findings([control.caught, *others], 1)
        )
        yield f"| {control.control} | {'product' if control.live else 'ranks'} | {result} |"
    yield ""


def some_findings(findings: Sequence[str], most: int = 2) -> str:
    """The first findings, and the number of further ones."""
    shown = re.sub(r"\s+", " ", "; ".join(findings[:most])).replace("|", "\\|")
    more = len(findings) - most
    return f"{shown} (and {more} more)" if more > 0 else shown


def _difference(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}"


def _largest(values: Iterator[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.1e}" if known else "none"
