"""Weights & Biases and MLflow, by their own clients: one run for a job's directory, whatever drivers come and go."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from typing import Any

from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune.job.output import MlflowSpec, WandbSpec
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.observability.progress import Phase
from spotune_trainer.observability.tracking.remote import Kind, Point, RemoteTracker, history
from spotune_trainer.observability.tracking.tracker import TensorBoardTracker, Tracker

_MEANING = ("model", "adapter", "dataset", "training", "execution")
_LONGEST_PARAMETER = 6000  # characters that MLflow keeps
_RUN_TAG = "spotune.run"


def trackers_of(job: FinetuneJob, directory: JobDirectory) -> list[Tracker]:
    """The trackers that a job asks for."""
    tracking = job.spec.tracking
    found: list[Tracker] = [TensorBoardTracker(directory.tensorboard)] if tracking.tensorboard else []
    wandb, mlflow = tracking.wandb, tracking.mlflow
    if wandb is not None:
        found.append(
            RemoteTracker("Weights & Biases", lambda: Wandb(wandb, job, directory), lambda: history(directory))
        )
    if mlflow is not None:
        found.append(RemoteTracker("MLflow", lambda: Mlflow(mlflow, job, directory), lambda: history(directory)))
    return found


def run_id(directory: JobDirectory) -> str:
    """The name of a job directory's run on every server, 16 hexadecimal digits; made at the first call."""
    path = directory.logs / "tracking.json"
    known = files.read_json(path)
    if known is None:
        known = {"run": uuid.uuid4().hex[:16]}
        files.write_json(path, known)
    return str(known["run"])


class Wandb:
    """A run of Weights & Biases, online or offline as `WANDB_MODE` says, at the server of `WANDB_BASE_URL`.

    Offline, each driver leaves a folder of its own for `wandb sync`; how far they are is noted beside them.
    """

    def __init__(self, spec: WandbSpec, job: FinetuneJob, directory: JobDirectory) -> None:
        import wandb

        folder = directory.logs / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._progress = folder / "logged.json"
        # Nothing of the machine or the console: what a run is has its place in the job's directory.
        settings = wandb.Settings(
            console="off", disable_code=True, disable_git=True, save_code=False, silent=True, x_disable_stats=True
        )
        self._run = wandb.init(
            project=spec.project,
            id=run_id(directory),
            name=job.metadata.name,
            dir=str(folder),
            config=_config(job),
            resume="allow",
            settings=settings,
        )
        self._run.define_metric("*", step_metric="step")
        self._run.define_metric("eval/*", step_metric="evalStep")

    def last_step(self, kind: Kind) -> int:
        """By the run's summary; offline by what the drivers before have noted."""
        known: Any = files.read_json(self._progress) or {} if self._run.offline else self._run.summary
        return int(known.get(kind) or 0)

    def log(self, points: Sequence[Point]) -> None:
        """Hand points to the client's own process, which sends them when it can."""
        for point in points:
            self._run.log({**point.values, point.kind: point.step})
        if self._run.offline:
            last = {point.kind: point.step for point in points}
            files.write_json(self._progress, (files.read_json(self._progress) or {}) | last)

    def close(self, phase: Phase) -> None:
        """Finished, failed, or preempted: to be resumed."""
        if phase not in (Phase.DONE, Phase.FAILED):
            self._run.mark_preempting()
        self._run.finish(exit_code=0 if phase is Phase.DONE else 1)


class Mlflow:
    """A run on an MLflow tracking server."""

    def __init__(self, spec: MlflowSpec, job: FinetuneJob, directory: JobDirectory) -> None:
        from mlflow import MlflowClient

        self._client = MlflowClient(tracking_uri=spec.uri)
        experiment = self._experiment(spec.experiment or job.metadata.name)
        tag = run_id(directory)
        known = self._client.search_runs([experiment], f"tags.`{_RUN_TAG}` = '{tag}'", max_results=1)
        if known:
            self._run = known[0].info.run_id
            self._client.update_run(self._run, status="RUNNING")
        else:
            run = self._client.create_run(experiment, run_name=job.metadata.name, tags={_RUN_TAG: tag})
            self._run = run.info.run_id
            for name, value in _flat(_config(job)).items():
                self._client.log_param(self._run, name, str(value)[:_LONGEST_PARAMETER])

    def last_step(self, kind: Kind) -> int:
        """The latest value of the curve that has the steps themselves."""
        return int(self._client.get_run(self._run).data.metrics.get(kind, 0))

    def log(self, points: Sequence[Point]) -> None:
        """One request for all of them; it is taken as a whole or not at all."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(curve, float(value), now, point.step)
            for point in points
            for curve, value in {**point.values, point.kind: point.step}.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, phase: Phase) -> None:
        """Finished or failed; a run that goes on stays as it is."""
        ends = {Phase.DONE: "FINISHED", Phase.FAILED: "FAILED"}
        if phase in ends:
            self._client.set_terminated(self._run, ends[phase])

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known is not None else self._client.create_experiment(name))


def _config(job: FinetuneJob) -> dict[str, Any]:
    """What is trained and how, for people who compare runs."""
    spec = job.spec.model_dump(mode="json", exclude_none=True)
    return {name: spec[name] for name in _MEANING if name in spec} | {"fingerprint": fingerprint(job)}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested values by dotted names."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        found |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return found
