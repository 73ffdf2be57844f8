"""docs/proof.md: every schedule and every control, and what became of it in the last `make proof`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence

from tests.proof.checker import NEXT_LOSSES, WHOLE_CURVE
from tests.proof.records import Blow, Controlled, Proven, Record
from tests.proof.schedules import COMMIT_EVERY, COMPARED_STEPS, STEPS, Deed, Moment

_TEXT = f"""# The proof

Written by `make proof`; not to be edited. A run is disturbed by a seeded schedule of kills and changes of the world
size, and compared with runs that nobody disturbed. The code is in [tests/proof](../tests/proof).

Each schedule is played on the product itself: `spotune run` with its supervisor, its Ray, its driver and up to four
CPU workers, which train a tiny T5 in fp32 with dropout for {STEPS} steps at one of the four ZeRO stages, and commit
every {COMMIT_EVERY} steps to a volume that is made as slow as one over a network. Kills are SIGKILL. A command
that was killed, or that left because it was told to, is started again, as the kubelet does; nothing else is done for
the run.

Of every schedule is asserted:

- the hash over the rows of every step, also of a step that was lost and made again, is that of the undisturbed run;
- the surviving steps are every step once, and the rows of every epoch are every row of the data once;
- at each world size all losses, and the checkpoint that ends its steps or the exported weights, are those that as many
  undisturbed workers make from the same start, bit for bit; so a schedule that keeps its world size ends with the
  SHA-256 of the undisturbed run;
- after a change of world size each of the next {COMPARED_STEPS} losses is within {NEXT_LOSSES:.0e} (relative) of what
  the world size before computes from the same checkpoint, and no loss of the whole curve is further than
  {WHOLE_CURVE:.0e} from the undisturbed run of the first world size;
- no worker group went on from a commit of a superseded generation, from one that is corrupt, or from one that was not
  complete, and no superseded generation exported the model;
- every failure was put down to a loss, the command ended with 0, and no process or file was left behind.
"""
_CONTROLS = """## Negative controls

The same oracle, where the trainer really is broken in one place or a checkpoint is damaged. In "ranks" a real worker
group without Ray goes on from a checkpoint; in "product" the whole product runs with the broken part in its processes,
and is hit by a kill.
"""


def report(records: Sequence[Record], machine: str) -> str:
    """The page.

    Args:
        records: what became of schedules and controls.
        machine: where they were played, and when.
    """
    proven = sorted((record for record in records if isinstance(record, Proven)), key=lambda record: record.seed)
    controls = [record for record in records if isinstance(record, Controlled)]
    return "\n".join([_TEXT, *_summary(proven, controls, machine), "", *_schedules(proven), "", *_controls(controls)])


def _summary(proven: Sequence[Proven], controls: Sequence[Controlled], machine: str) -> Iterator[str]:
    good = sum(not record.findings for record in proven)
    caught = sum(control.caught is not None for control in controls)
    records: list[Record] = [*proven, *controls]
    seconds = sum(record.seconds for record in records)
    commits = Counter(record.commit for record in records)
    tried = " and ".join(f"{commit} ({count})" for commit, count in commits.most_common())
    yield f"{good} of {len(proven)} schedules proven, {caught} of {len(controls)} controls caught, of commit {tried}."
    yield f"{machine} {seconds / 60:.0f} minutes, were it one at a time."
    yield ""
    blows = [blow for record in proven for blow in record.blows]
    changes = [pair for record in proven for pair in zip(record.world_sizes, record.world_sizes[1:], strict=False)]
    lost = sum(record.steps_lost for record in proven)
    yield (
        f"{len(blows)} disturbances, {sum(record.generations for record in proven)} starts of a worker group, "
        f"{lost} steps made again, {len(changes)} changes of world size ({len(set(changes))} of the 12 there are)."
    )
    yield (
        f"Largest difference of a loss after a change: {_most(record.next_loss for record in proven)}; "
        f"of any curve: {_most(record.curve for record in proven)}."
    )
    yield ""
    yield from _moments(blows)


def _moments(blows: Sequence[Blow]) -> Iterator[str]:
    """How often what was hit when."""
    counted = Counter((blow.deed, blow.moment) for blow in blows)
    missed = sum(not blow.hit for blow in blows)
    yield "| disturbances | " + " | ".join(Moment) + " |"
    yield "|---" * (len(Moment) + 1) + "|"
    for deed in Deed:
        yield f"| {deed} | " + " | ".join(str(counted[deed, moment] or "") for moment in Moment) + " |"
    yield ""
    yield f"In {missed} of {len(blows)} the moment was over when the blow fell: these are in brackets below."


def _schedules(proven: Sequence[Proven]) -> Iterator[str]:
    yield "## Schedules"
    yield ""
    yield "| seed | ZeRO | workers | what, when (at step) | generations | steps lost | next losses | curve | verdict |"
    yield "|---" * 9 + "|"
    for record in proven:
        cells = (
            str(record.seed),
            str(record.zero_stage),
            " → ".join(str(size) for size in record.world_sizes),
            "; ".join(_blow(blow) for blow in record.blows),
            str(record.generations),
            str(record.steps_lost),
            _difference(record.next_loss),
            _difference(record.curve),
            "proven" if not record.findings else f"**not proven**: {_some(record.findings)}",
        )
        yield f"| {' | '.join(cells)} |"


def _blow(blow: Blow) -> str:
    when = "" if blow.moment == Moment.STEP else f" {blow.moment}"
    return f"{blow.deed}{when if blow.hit else f' [{when.strip()}]'} ({blow.step})"


def _controls(controls: Sequence[Controlled]) -> Iterator[str]:
    yield _CONTROLS
    yield "| what is broken | in | what the oracle says |"
    yield "|---|---|---|"
    for control in sorted(controls, key=lambda control: control.live):
        others = [finding for finding in control.findings if finding != control.caught]
        said = f"**not caught**: {_some(others)}" if control.caught is None else _some([control.caught, *others], 1)
        yield f"| {control.control} | {'product' if control.live else 'ranks'} | {said} |"
    yield ""


def _some(findings: Sequence[str], most: int = 2) -> str:
    """The first of them, and how many more there are."""
    shown = re.sub(r"\s+", " ", "; ".join(findings[:most])).replace("|", "\\|")
    more = len(findings) - most
    return f"{shown} (and {more} more)" if more > 0 else shown


def _difference(value: float | None) -> str:
    if value is None:
        return ""
    return "0" if value == 0 else f"{value:.0e}"


def _most(values: Iterator[float | None]) -> str:
    known = [value for value in values if value is not None]
    return f"{max(known):.1e}" if known else "none"
