"""The content of a report, read from the files of a job's folder; the job may still be running."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune.errors import UsageError
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.data.manifests import MANIFEST
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.logs.event_messages import event_message

_NODE_EVENTS = ("node-unfit", "straggler", "straggler-replaced")


@dataclass(frozen=True)
class WorkerGroup:
    """One worker group, from its start to its end.

    Attributes:
        generation: Its number.
        start: Unix time.
        end: Unix time; None while it runs.
        world_size: Number of workers.
        first_step: Number of steps already done when it started.
        steps: Number of steps that it logged; 0 while it runs.
        outcome: How it ended: the cause of its failure, `left` (for a group of another size), or `done`. Empty while it
            runs, or if the ledger has no reason.
        message: Details of the outcome.
    """

    generation: int
    start: float
    end: float | None
    world_size: int
    first_step: int
    steps: int
    outcome: str
    message: str

    def seconds(self, now: float) -> float:
        """Seconds that it ran, or has run until `now` (Unix time)."""
        return (self.end or now) - self.start

    @property
    def description(self) -> str:
        """The outcome with its message; empty if it is not known."""
        if not self.outcome:
            return "" if self.end else "running"
        return f"{self.outcome}: {self.message}" if self.message else self.outcome


@dataclass(frozen=True)
class RunSummary:
    """A job so far.

    Attributes:
        name: Of the job.
        job: `job.json`.
        updated: Unix time of the newest event or status.
        status: `status.json`.
        plan: `plan.json`.
        result: `result.json`; empty until the job is finished.
        steps: Records of the steps that led to the model, in order, each step once.
        groups: Worker groups in order.
        commits: Events `committed` in order.
        evaluations: Events `evaluated` by step, each step once: a later worker group may have repeated one. The scores
            contain those of the events `harness`.
        nodes: Unix time and message of each event about nodes that are unfit, and workers that are slow.
        data: `manifest.json` of the training shards by source of a mixture; without a mixture the name is empty.
            Sources in a bucket, and those that were not made by spotune, are missing.
    """

    name: str
    job: Mapping[str, Any]
    updated: float
    status: Mapping[str, Any]
    plan: Mapping[str, Any]
    result: Mapping[str, Any]
    steps: Sequence[Mapping[str, Any]]
    groups: Sequence[WorkerGroup]
    commits: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    nodes: Sequence[tuple[float, str]]
    data: Mapping[str, Any]


def read_summary(root: Path) -> RunSummary:
    """The summary of the job in the folder `root`.

    Raises:
        UsageError: The folder holds no job.
    """
    directory = JobDirectory(root)
    job = files.read_json(directory.job)
    if job is None:
        raise UsageError(f"{root} is not the directory of a job: there is no job.json in it")
    events = Ledger(directory).records()
    status = files.read_json(directory.status) or {}
    with files.reading(directory.status):
        published = float(status.get("time", 0.0))
    with files.reading(directory.job):
        name, data = str(job["metadata"]["name"]), _read_manifests(job, directory)
    with files.reading(directory.ledger):
        groups, evaluations = _worker_groups(events), _evaluations(events)
        nodes = [(event["time"], event_message(event) or "") for event in events if event["event"] in _NODE_EVENTS]
    return RunSummary(
        name=name,
        job=job,
        updated=max([published, *(event["time"] for event in events if event.get("time"))]),
        status=status,
        plan=files.read_json(directory.plan) or {},
        result=files.read_json(directory.result) or {},
        steps=surviving_steps(directory) if directory.generations.exists() else [],
        groups=groups,
        commits=[event for event in events if event["event"] == "committed"],
        evaluations=evaluations,
        nodes=nodes,
        data=data,
    )


def _read_manifests(job: Mapping[str, Any], directory: JobDirectory) -> dict[str, Mapping[str, Any]]:
    """The manifest of the training shards of each source of a mixture, or of the only ones, whose name is empty.

    A job with a training function has none.
    """
    dataset = job["spec"].get("dataset")
    if dataset is None:
        return {}
    sources = {source["name"]: source for source in dataset.get("mixture") or ()} or {"": dataset}
    found = {name: _read_manifest(source, directory.prepared(name)) for name, source in sources.items()}
    return {name: manifest for name, manifest in found.items() if manifest is not None}


def _read_manifest(source: Mapping[str, Any], prepared: Path) -> Mapping[str, Any] | None:
    """The manifest of shards, which is in their folder or, if they are one of two splits, above it.

    Args:
        source: The dataset of a job, or a source of its mixture.
        prepared: Folder of the shards if the job makes them of raw rows.
    """
    train = source.get("train")
    folders = [prepared] if train is None else [Path(train["source"]), Path(train["source"]).parent]
    for path in (folder / MANIFEST for folder in folders):
        with suppress(files.UnreadableFileError):  # of another tool
            manifest = files.read_json(path) or {}
            if {"options", "splits"} <= manifest.keys():
                return manifest
    return None


def _evaluations(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The last event `evaluated` of each step, by step, with the scores of the last event `harness`."""
    newest: dict[int, dict[str, Any]] = {}
    tasks: dict[int, Mapping[str, float]] = {}
    for event in events:
        if event["event"] == "evaluated":
            newest[event["step"]] = dict(event)
        elif event["event"] == "harness":
            tasks[event["step"]] = event["scores"]
    for step, scores in tasks.items():
        evaluation = newest.setdefault(step, {"step": step})
        evaluation["scores"] = {**(evaluation.get("scores") or {}), **scores}
    return [newest[step] for step in sorted(newest)]


def _worker_groups(events: Sequence[Mapping[str, Any]]) -> list[WorkerGroup]:
    ended: dict[int, Mapping[str, Any]] = {}
    outcomes: dict[int, tuple[str, str]] = {}
    decisions: dict[int, str] = {}
    for event in events:
        generation = event.get("generation")
        if generation is None:
            continue
        match event["event"]:
            case "generation-ended":
                ended[generation] = event
            case "leaving":
                decisions[generation] = event.get("why", "")
            case "straggler-replaced":
                decisions[generation] = event["reason"]
            case "failure":
                of_notice = decisions.get(generation) if event["cause"] == FailureCause.PREEMPTED else None
                outcomes[generation] = (event["cause"], "; ".join(filter(None, (event["message"], of_notice))))
            case "left":
                message = "another number of workers continues"
                outcomes[generation] = ("left", "; ".join(filter(None, (message, decisions.get(generation)))))
            case "exported":
                outcomes[generation] = ("done", "")
    return [_worker_group(event, ended, outcomes) for event in events if event["event"] == "generation-started"]


def _worker_group(
    started: Mapping[str, Any], ended: Mapping[int, Mapping[str, Any]], outcomes: Mapping[int, tuple[str, str]]
) -> WorkerGroup:
    generation = started["generation"]
    ended_event = ended.get(generation, {})
    outcome, message = outcomes.get(generation, ("", ""))
    # The event may be written much later, by the next driver. So the end follows from the seconds that it records.
    end = started["time"] + ended_event["seconds"] if ended_event else None
    return WorkerGroup(
        generation,
        started["time"],
        end,
        started["worldSize"],
        started["step"],
        ended_event.get("steps", 0),
        outcome,
        message,
    )
