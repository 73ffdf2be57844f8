"""Collects the evidence of a run from its job directory and its reference runs."""

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
from spotune_trainer.supervisor.ray_head.local import process_marker
from spotune_trainer.supervisor.ray_head.processes import ProcessFamily, boot_id, command_line
from tests.proof.checker import ComparedSegment, Evidence
from tests.proof.history import Segment, committed, read_generations, segments
from tests.proof.references import Reference, References, checksums
from tests.proof.schedules import COMPARED_STEPS
from tests.trainer.support.runs import Layout


@dataclass(frozen=True)
class _EvidenceCollector:
    """One run and its reference runs.

    Attributes:
        corrupt: corrupt checkpoints, with the reason.
    """

    directory: JobDirectory
    references: References
    zero_stage: int
    segments: Sequence[Segment]
    corrupt: dict[CheckpointName, str]

    def compared(self) -> list[ComparedSegment]:
        return [self._compare(number) for number in range(len(self.segments))]

    def _compare(self, number: int) -> ComparedSegment:
        segment = self.segments[number]
        last = number == len(self.segments) - 1
        end = None if last else self.segments[number + 1].start
        layout = Layout(segment.world_size, self.zero_stage)
        if segment.start is None:
            return self._first(segment, end, self.references.undisturbed(layout))
        if segment.start in self.corrupt:
            return ComparedSegment(segment, (), same_bits=False, by_old_world=())
        path = self.directory.checkpoints / str(segment.start)
        steps = None if end is None else end.step - segment.start.step
        again = self.references.from_checkpoint(path, layout, steps)
        old = Layout(self.segments[number - 1].world_size, self.zero_stage)
        by_old = self.references.from_checkpoint(path, old, min(COMPARED_STEPS, len(segment.steps)))
        same = self._exported() == again.export_sha256 if end is None else self._checksums(end) == again.checksums
        return ComparedSegment(segment, again.records, same, by_old.records)

    def _first(self, segment: Segment, end: CheckpointName | None, undisturbed: Reference) -> ComparedSegment:
        if end is None:
            return ComparedSegment(segment, undisturbed.records, self._exported() == undisturbed.export_sha256, None)
        assert undisturbed.directory is not None
        path = undisturbed.directory.checkpoints / str(CheckpointName(end.step, 1))
        same = self._checksums(end) == checksums(path)
        return ComparedSegment(segment, undisturbed.records[: end.step], same, None)

    def _exported(self) -> str | None:
        return exported_sha256(self.directory)

    def _checksums(self, name: CheckpointName) -> tuple[str, ...]:
        """Checksums from the manifest; empty if the checkpoint is corrupt."""
        return () if name in self.corrupt else checksums(self.directory.checkpoints / str(name))


def collect_evidence(
    directory: JobDirectory, references: References, zero_stage: int, exit_code: int = 0, *, any_size: bool = False
) -> Evidence:
    """Return the evidence of a finished run.

    Args:
        directory: job directory; must still hold all checkpoints from which the run resumed.
        references: reference runs of the same job.
        zero_stage: ZeRO stage of the run.
        exit_code: exit code of its command.
        any_size: whether the job is to have the same bits at any world size (`execution.reproducible: worldSize`).

    Raises:
        ValueError: no step has survived.
    """
    generations = read_generations(directory)
    restored = {each.restored for each in generations if each.restored is not None and each.made_progress}
    corrupt = {name: reason for name in sorted(restored) if (reason := _problem(directory, name)) is not None}
    found = segments(generations, any_size=any_size)
    if not found:
        raise ValueError("no step has survived")
    collector = _EvidenceCollector(directory, references, zero_stage, found, corrupt)
    undisturbed = references.undisturbed(Layout(found[0].world_size, zero_stage))
    return Evidence(
        exit_code=exit_code,
        planned_steps=len(undisturbed.records),
        steps_per_epoch=references.steps_per_epoch(),
        epoch_hash=references.epoch_hash(),
        mixture=references.mixture_hashes(),
        generations=generations,
        undisturbed=undisturbed.records,
        compared=collector.compared(),
        corrupt=corrupt,
        committed={name: _commit_time(directory, name) for name in restored & set(committed(directory))},
        export_sha256=exported_sha256(directory),
        claimed_sha256=_claimed_sha256(directory),
        causes=[str(record["cause"]) for record in Ledger(directory).records("failure")],
        left_behind=_left_behind(directory),
    )


def exported_sha256(directory: JobDirectory) -> str | None:
    """SHA-256 of the exported weights; None if there are none."""
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
    """The SHA-256 in result.json, or in the events of a worker group that ran without the command."""
    if directory.result.exists():
        return str(json.loads(directory.result.read_text())["exportSha256"])
    events = sorted(directory.logs.glob("gen-*/events.jsonl"), key=lambda path: int(path.parent.name[4:]))
    events_logged = [json.loads(line) for path in events for line in path.read_text().splitlines()]
    return next((str(event["sha256"]) for event in reversed(events_logged) if event["event"] == "exported"), None)


def _left_behind(directory: JobDirectory) -> list[str]:
    running = [
        command_line(process) for process in ProcessFamily(None, boot_id(), process_marker(directory.root)).members()
    ]
    names = (directory.supervisor, *directory.root.glob(f".{directory.export.name}.*"))
    return [*(f"process {line[:80]}" for line in running), *(str(Path(name).name) for name in names if name.exists())]
