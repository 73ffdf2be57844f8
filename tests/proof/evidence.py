"""Evidence of a run: what is in its job directory, and what the reference runs say to it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, open_checkpoint
from spotune_trainer.checkpoint.reader import CorruptCheckpointError, verify
from spotune_trainer.export.huggingface import weights_sha256
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.supervisor.ray_head.local import mark
from spotune_trainer.supervisor.ray_head.processes import Family, boot_id, command_line
from tests.proof.checker import Evidence, Stretch
from tests.proof.history import Segment, committed, read_generations, segments
from tests.proof.references import Reference, References, checksums
from tests.proof.schedules import COMPARED_STEPS
from tests.trainer.support.runs import STEPS_PER_EPOCH, Layout


@dataclass(frozen=True)
class _Gathering:
    """One run and what it is compared with.

    Attributes:
        corrupt: checkpoints that cannot be gone on from, with the reason.
    """

    directory: JobDirectory
    references: References
    zero_stage: int
    segments: Sequence[Segment]
    corrupt: dict[CheckpointName, str]

    def stretches(self) -> list[Stretch]:
        return [self._stretch(number) for number in range(len(self.segments))]

    def _stretch(self, number: int) -> Stretch:
        segment = self.segments[number]
        last = number == len(self.segments) - 1
        end = None if last else self.segments[number + 1].start
        layout = Layout(segment.world_size, self.zero_stage)
        if segment.start is None:
            return self._first(segment, end, self.references.undisturbed(layout))
        if segment.start in self.corrupt:
            return Stretch(segment, (), same_bits=False, by_old_world=())
        path = self.directory.checkpoints / str(segment.start)
        steps = None if end is None else end.step - segment.start.step
        again = self.references.from_checkpoint(path, layout, steps)
        old = Layout(self.segments[number - 1].world_size, self.zero_stage)
        by_old = self.references.from_checkpoint(path, old, min(COMPARED_STEPS, len(segment.steps)))
        same = self._exported() == again.export_sha256 if end is None else self._checksums(end) == again.checksums
        return Stretch(segment, again.records, same, by_old.records)

    def _first(self, segment: Segment, end: CheckpointName | None, undisturbed: Reference) -> Stretch:
        if end is None:
            return Stretch(segment, undisturbed.records, self._exported() == undisturbed.export_sha256, None)
        assert undisturbed.directory is not None
        path = undisturbed.directory.checkpoints / str(CheckpointName(end.step, 1))
        same = self._checksums(end) == checksums(path)
        return Stretch(segment, undisturbed.records[: end.step], same, None)

    def _exported(self) -> str | None:
        return exported_sha256(self.directory)

    def _checksums(self, name: CheckpointName) -> tuple[str, ...]:
        """What the files hold according to the manifest; nothing where they do not."""
        return () if name in self.corrupt else checksums(self.directory.checkpoints / str(name))


def gather(directory: JobDirectory, references: References, zero_stage: int, exit_code: int = 0) -> Evidence:
    """The evidence of a run that has ended.

    Args:
        directory: of the run; all checkpoints that it went on from are still there.
        references: runs of the same job.
        zero_stage: that it was trained at.
        exit_code: of its command.

    Raises:
        ValueError: there is nothing to judge.
    """
    generations = read_generations(directory)
    restored = {each.restored for each in generations if each.restored is not None and each.went_on}
    corrupt = {name: reason for name in sorted(restored) if (reason := _problem(directory, name)) is not None}
    found = segments(generations)
    if not found:
        raise ValueError("no step has survived")
    gathering = _Gathering(directory, references, zero_stage, found, corrupt)
    undisturbed = references.undisturbed(Layout(found[0].world_size, zero_stage))
    return Evidence(
        exit_code=exit_code,
        planned_steps=len(undisturbed.records),
        steps_per_epoch=STEPS_PER_EPOCH,
        epoch_hash=references.epoch_hash(),
        generations=generations,
        undisturbed=undisturbed.records,
        stretches=gathering.stretches(),
        corrupt=corrupt,
        committed={name: _commit_time(directory, name) for name in restored & set(committed(directory))},
        export_sha256=exported_sha256(directory),
        claimed_sha256=_claimed_sha256(directory),
        causes=[str(record["cause"]) for record in Ledger(directory).records("failure")],
        left_behind=_left_behind(directory),
    )


def exported_sha256(directory: JobDirectory) -> str | None:
    """Of the exported weights; None where there are none."""
    return weights_sha256(directory.export) if any(directory.export.glob("*.safetensors")) else None


def _problem(directory: JobDirectory, name: CheckpointName) -> str | None:
    checkpoint = open_checkpoint(directory.checkpoints / str(name))
    if not isinstance(checkpoint, Checkpoint):
        return checkpoint.reason
    try:
        verify(checkpoint)
    except CorruptCheckpointError as error:
        return error.reason
    return None


def _commit_time(directory: JobDirectory, name: CheckpointName) -> float:
    return float(json.loads((directory.checkpoints / str(name) / "manifest.json").read_text())["time"])


def _claimed_sha256(directory: JobDirectory) -> str | None:
    """What the command's result says; a worker group without a command says it in its events."""
    if directory.result.exists():
        return str(json.loads(directory.result.read_text())["exportSha256"])
    events = sorted(directory.logs.glob("gen-*/events.jsonl"), key=lambda path: int(path.parent.name[4:]))
    said = [json.loads(line) for path in events for line in path.read_text().splitlines()]
    return next((str(event["sha256"]) for event in reversed(said) if event["event"] == "exported"), None)


def _left_behind(directory: JobDirectory) -> list[str]:
    running = [command_line(process) for process in Family(None, boot_id(), mark(directory.root)).members()]
    names = (directory.supervisor, *directory.root.glob(f".{directory.export.name}.*"))
    return [*(f"process {line[:80]}" for line in running), *(str(Path(name).name) for name in names if name.exists())]
