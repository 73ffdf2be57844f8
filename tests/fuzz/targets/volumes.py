"""What the trainer finds on the volume of a job, which others may write to: checkpoints and the files of a run."""

from __future__ import annotations

import json
import shutil
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from spotune.errors import JobError
from spotune_trainer.checkpoint.catalogue import list_entries
from spotune_trainer.checkpoint.generations import choose_checkpoint, surviving_steps
from spotune_trainer.checkpoint.layout import MANIFEST, Checkpoint, UnusableCheckpoint, open_checkpoint
from spotune_trainer.checkpoint.reader import CorruptCheckpointError, read_parameters, verify
from spotune_trainer.files import UnreadableFileError, read_json, reading
from spotune_trainer.job_directory.job import has_finished, is_trained, job_of
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.notice import NoticeWatch, is_stop_requested
from spotune_trainer.job_directory.run_plan import RunPlan
from spotune_trainer.job_directory.status import read_status
from spotune_trainer.observability.goodput_ledger import GoodputMeter
from spotune_trainer.observability.logs import run_logs
from spotune_trainer.observability.report.run_summary import read_summary
from tests.fuzz.mutations import changed_bytes, changed_json, changed_lines
from tests.fuzz.target import Target, check_names
from tests.fuzz.targets.ledgers import EVENTS
from tests.trainer.support.checkpoints import commit_checkpoint

JOB = {
    "apiVersion": "spotune.dev/v1alpha1",
    "kind": "FinetuneJob",
    "metadata": {"name": "sql"},
    "spec": {
        "model": {"source": "model", "initialise": "random"},
        "dataset": {"train": {"source": "shards"}},
        "training": {"epochs": 1},
    },
}
STATUS = {
    "phase": "Training",
    "time": 1.7e9,
    "heartbeat": 7,
    "step": 3,
    "totalSteps": 9,
    "loss": 0.5,
    "generation": 1,
    "attempt": 1,
    "message": None,
    "checkpointProblem": None,
    "restarts": {"workerLost": 1},
    "scores": {"exactMatch": 0.5},
}
PROGRESS = {"time": 1.7e9, "startedAt": 1.7e9, "step": 3, "part": "productive", "seconds": {"productive": 3.0}}
NOTICE = {"time": 1.7e9, "deadline": 1.7e9, "stop": False, "leave": True, "reason": "spot", "commitWithin": 3.0}
RESULT = {"steps": 20, "epochs": 1.0, "maxSteps": None, "loss": 0.5, "best": {"step": 10, "value": 0.5}}
STEPS = [{"step": step, "loss": 0.5, "productiveSeconds": 1.0, "time": 1.7e9 + step} for step in range(1, 4)]
RESTORED = {"generation": 1, "checkpoint": "step-00000010.gen-1", "step": 10, "time": 1.7e9}
PLAN = {
    "version": 1,
    "fingerprint": "0123",
    "zeroStage": 2,
    "microBatchSize": 4,
    "gradientCheckpointing": False,
    "reason": "it fits",
    "data": {"train": "0123"},
    "requested": {"zeroStage": "auto"},
    "libraries": {"torch": "2"},
    "changes": [{"step": 3, "microBatchSize": [8, 4]}],
}


@cache
def _run() -> Path:
    """A directory of a run with a committed checkpoint of two ranks."""
    root = Path(tempfile.mkdtemp(prefix="spotune-fuzz-"))
    directory = JobDirectory(root)
    commit_checkpoint(directory, 10, 1, world_size=2)
    directory.job.write_text(json.dumps(JOB))
    return root


@cache
def _checkpoint_files() -> tuple[bytes, bytes]:
    """Manifest and a file of fragments of the checkpoint."""
    (folder,) = JobDirectory(_run()).checkpoints.iterdir()
    return (folder / MANIFEST).read_bytes(), (folder / "rank-00000.safetensors").read_bytes()


def _copy(folder: str) -> JobDirectory:
    root = Path(folder) / "run"
    shutil.copytree(_run(), root)
    return JobDirectory(root)


def read_checkpoint(content: tuple[bytes | None, bytes | None]) -> None:
    """Manifest and a file of fragments: a torn or corrupt checkpoint, or its weights."""
    manifest, fragments = content
    with tempfile.TemporaryDirectory() as folder:
        directory = _copy(folder)
        (path,) = directory.checkpoints.iterdir()
        if manifest is not None:
            (path / MANIFEST).write_bytes(manifest)
        if fragments is not None:
            (path / "rank-00000.safetensors").write_bytes(fragments)
        for entry in list_entries(directory):
            json.dumps(entry.as_json(), allow_nan=False)
        found = open_checkpoint(path)
        try:
            choose_checkpoint(directory)
        except JobError:
            assert isinstance(found, UnusableCheckpoint)
            assert found.is_newer
        if not isinstance(found, Checkpoint):
            assert found.reason
            return
        for read in (read_parameters, verify):
            try:
                read(found)
            except CorruptCheckpointError as error:
                check_names(error, found.path.name)


NAMES = {
    "status.json": STATUS,
    "job.json": JOB,
    "result.json": RESULT,
    "notice.json": NOTICE,
    "plan.json": PLAN,
    "logs/gen-1/progress.json": PROGRESS,
    "generations/0000001/restored.json": {**RESTORED, "checkpoint": None, "step": 0},
    "generations/0000002/restored.json": {**RESTORED, "generation": 2},
}
LINES = {"ledger.jsonl": EVENTS, "logs/gen-1/steps.jsonl": STEPS}


def _sound_files() -> dict[str, bytes]:
    objects = {name: json.dumps(value).encode() for name, value in NAMES.items()}
    return objects | {
        name: b"".join(json.dumps(line).encode() + b"\n" for line in lines) for name, lines in LINES.items()
    }


def _read_plan(directory: JobDirectory) -> None:
    value = read_json(directory.plan)
    with reading(directory.plan):
        json.dumps(RunPlan.from_json(value or {}).to_json())


def _read_ledger(directory: JobDirectory) -> None:
    ledger = Ledger(directory)
    ledger.open_attempts()
    ledger.failures_since_change()
    ledger.restarts()
    ledger.steps_lost()
    ledger.last_commit_seconds()
    ledger.replacement_seconds()
    ledger.worker_seconds()


READERS = (
    read_status,
    _read_plan,
    _read_ledger,
    job_of,
    has_finished,
    is_stop_requested,
    surviving_steps,
    list_entries,
    lambda directory: NoticeWatch([directory.notice]).flags(1.0),
    lambda directory: is_trained(directory, job_of(directory) or _missing()),
    lambda directory: GoodputMeter(directory).metrics(1.8e9, read_json(directory.generation_logs(1).progress)),
    lambda directory: list(run_logs.stream(directory, None, None)),
    lambda directory: read_summary(directory.root),
)


def _missing() -> Any:
    raise JobError("job.json is missing")


def read_run(content: tuple[str, bytes]) -> None:
    """One file of a run that is not as the trainer wrote it: every reader returns, or names the file."""
    name, changed = content
    with tempfile.TemporaryDirectory() as folder:
        directory = _copy(folder)
        for each, sound in {**_sound_files(), name: changed}.items():
            path = directory.root / each
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(sound)
        for read in READERS:
            try:
                read(directory)
            except (UnreadableFileError, JobError) as error:
                check_names(error, Path(name).name)


_CHECKPOINTS = st.deferred(
    lambda: st.one_of(
        st.tuples(changed_json([json.loads(_checkpoint_files()[0])]), st.none()),
        st.tuples(st.none(), changed_bytes([_checkpoint_files()[1]])),
    )
)
_RUNS = st.one_of(
    *(st.tuples(st.just(name), changed_json([value])) for name, value in NAMES.items()),
    *(st.tuples(st.just(name), changed_lines(lines)) for name, lines in LINES.items()),
)

TARGETS = (
    Target("checkpoint", "manifests and files of checkpoints", _CHECKPOINTS, read_checkpoint),
    Target("run", "status, ledger, plan and all other files of a job's directory", _RUNS, read_run),
)
