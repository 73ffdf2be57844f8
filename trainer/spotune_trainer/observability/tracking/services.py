"""Weights & Biases and MLflow, through their own clients: one run for each job directory, across all drivers."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Sequence
from typing import Any

from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune.job.output import MlflowSpec, WandbSpec
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.tracking.remote import Kind, Point, RemoteTracker, run_history
from spotune_trainer.observability.tracking.tracker import SAMPLES, TensorBoardTracker, Tracker, html_table

_CONFIG_SECTIONS = ("model", "adapter", "dataset", "training", "execution")
_MAX_PARAMETER_CHARACTERS = 6000
"""MLflow's limit for the value of a parameter."""
_RUN_TAG = "spotune.run"
_REFUSED_BY_MLFLOW = re.compile(r"[^\w\-. :/]")
"""Characters that MLflow refuses in names of metrics; functions of the user may report any."""


def create_trackers(job: FinetuneJob, directory: JobDirectory) -> list[Tracker]:
    """The trackers that a job configures."""
    tracking = job.spec.tracking
    trackers: list[Tracker] = [TensorBoardTracker(directory.tensorboard)] if tracking.tensorboard else []
    wandb, mlflow = tracking.wandb, tracking.mlflow
    if wandb is not None:
        trackers.append(
            RemoteTracker("Weights & Biases", lambda: Wandb(wandb, job, directory), lambda: run_history(directory))
        )
    if mlflow is not None:
        trackers.append(RemoteTracker("MLflow", lambda: Mlflow(mlflow, job, directory), lambda: run_history(directory)))
    return trackers


def run_id(directory: JobDirectory) -> str:
    """The id of a job directory's run on every server: 16 hexadecimal digits, created by the first call."""
    path = directory.logs / "tracking.json"
    stored = files.read_json(path)
    if stored is None:
        stored = {"run": uuid.uuid4().hex[:16]}
        files.write_json(path, stored)
    return str(stored["run"])


class Wandb:
    """A run on Weights & Biases; `WANDB_BASE_URL` sets the server, and `WANDB_MODE` sets online or offline.

    Offline, each driver writes its own folder for `wandb sync`, and `logged.json` beside them holds the last steps.
    """

    def __init__(self, spec: WandbSpec, job: FinetuneJob, directory: JobDirectory) -> None:
        import wandb

        folder = directory.logs / "wandb"
        folder.mkdir(parents=True, exist_ok=True)
        self._progress = folder / "logged.json"
        # No console output and no facts about the machine: the job's directory has them.
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
        self._run.define_metric("harness/*", step_metric="harnessStep")

    def last_step(self, kind: Kind) -> int:
        """From the run's summary; offline from `logged.json`, which earlier drivers wrote."""
        last_steps: Any = files.read_json(self._progress) or {} if self._run.offline else self._run.summary
        return int(last_steps.get(kind) or 0)

    def log(self, points: Sequence[Point]) -> None:
        """Pass points to the client's own process, which sends them."""
        import wandb

        for point in points:
            values: dict[str, Any] = {**point.values, point.kind: point.step}
            if point.samples:  # as HTML: a table would be an artifact, whose failure holds up the curves
                values[SAMPLES] = wandb.Html(html_table(point.samples))
            self._run.log(values)
        if self._run.offline:
            last = {point.kind: point.step for point in points}
            files.write_json(self._progress, (files.read_json(self._progress) or {}) | last)

    def close(self, phase: Phase) -> None:
        """Mark the run as finished or failed, or as preempting if another driver will resume it."""
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
                self._client.log_param(self._run, name, str(value)[:_MAX_PARAMETER_CHARACTERS])

    def last_step(self, kind: Kind) -> int:
        """The latest value of the curve of step numbers."""
        return int(self._client.get_run(self._run).data.metrics.get(kind, 0))

    def log(self, points: Sequence[Point]) -> None:
        """Send all points in one request, which MLflow accepts as a whole or not at all."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        metrics = [
            Metric(_REFUSED_BY_MLFLOW.sub("_", curve), float(value), now, point.step)
            for point in points
            for curve, value in {**point.values, point.kind: point.step}.items()
        ]
        self._client.log_batch(self._run, metrics=metrics)

    def close(self, phase: Phase) -> None:
        """Mark the run as finished or failed; if another driver will resume it, leave it running."""
        final_status = {Phase.DONE: "FINISHED", Phase.FAILED: "FAILED"}.get(phase)
        if final_status is not None:
            self._client.set_terminated(self._run, final_status)

    def _experiment(self, name: str) -> str:
        known = self._client.get_experiment_by_name(name)
        return str(known.experiment_id if known is not None else self._client.create_experiment(name))


def _config(job: FinetuneJob) -> dict[str, Any]:
    """The sections of the job that determine the result, and its fingerprint; shown for comparing runs."""
    spec = job.spec.model_dump(mode="json", exclude_none=True)
    return {name: spec[name] for name in _CONFIG_SECTIONS if name in spec} | {"fingerprint": fingerprint(job)}


def _flat(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested dict as a flat one with dotted names."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {f"{prefix}{name}": value}
    return flat
