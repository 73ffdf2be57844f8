"""Uploads to the Hugging Face Hub: the model in the end, and on request the newest checkpoint while it trains.

`last-checkpoint/` of the repository is a job directory with one checkpoint in it: downloaded, it is trained on from
there. It is replaced by one commit of the Hub, so it is whole at any time. Uploads run in a thread of the driver, one
at a time, always of the newest checkpoint; whatever the Hub does, training goes on.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi
from huggingface_hub.errors import HfHubHTTPError

from spotune.errors import InfrastructureError, JobError
from spotune.job import FinetuneJob
from spotune.job.output import HubSpec
from spotune.retry import backoff_seconds
from spotune_trainer.checkpoint.generations import choose_checkpoint
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.job_directory.job import HUB_TOKEN
from spotune_trainer.job_directory.layout import JobDirectory

logger = logging.getLogger("spotune.hub")

LAST_CHECKPOINT = "last-checkpoint"
_LOOK_EVERY_SECONDS = 10.0
_BEAT_SECONDS = 5.0
_BACKOFF_SECONDS = (30.0, 600.0)
_LAST_SECONDS = 300.0
"""That the end of a run waits for the last checkpoint to be there."""
_REFUSED = (401, 403, 404)


class Hub:
    """A repository of models.

    Args:
        spec: which one.
        environment: with the token, and in `HF_ENDPOINT` the address of another Hub.
    """

    def __init__(self, spec: HubSpec, environment: Any = os.environ) -> None:
        self._spec = spec
        self._api = HfApi(token=environment.get(HUB_TOKEN) or environment.get("HF_TOKEN"))

    def create(self) -> None:
        """Make the repository unless it is there, and see that it may be written to.

        Raises:
            JobError: the token may not do so.
            InfrastructureError: the Hub could not be asked.
        """
        with self._explained():
            self._api.create_repo(self._spec.repo, private=self._spec.private, exist_ok=True)
            self._api.auth_check(self._spec.repo, write=True)

    def upload_model(self, export: Path) -> None:
        """Put the files of an export at the root of the repository. Raises as `create` does."""
        with self._explained():
            self._api.upload_folder(repo_id=self._spec.repo, folder_path=export, commit_message="The trained model")

    def upload_checkpoint(self, directory: JobDirectory, checkpoint: Checkpoint) -> None:
        """Put a job directory with one checkpoint in place of the one that is there. Raises as `create` does."""
        with self._explained(), _job_directory_with(directory, checkpoint) as folder:
            self._api.upload_folder(
                repo_id=self._spec.repo,
                folder_path=folder,
                path_in_repo=LAST_CHECKPOINT,
                delete_patterns="*",
                commit_message=f"Checkpoint of step {checkpoint.name.step}",
            )

    @contextmanager
    def _explained(self) -> Iterator[None]:
        place = f"output.hub: {self._spec.repo}"
        try:
            yield
        except Exception as error:  # the Hub's client lets through whatever its HTTP client raises
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if _status(error) in _REFUSED:
                raise JobError(
                    f"{place}: the Hub refuses it ({reason}): check the name, and that the token of "
                    "output.hub.tokenSecretRef may write to it. A trained model is in export/ of the job's directory"
                ) from error
            raise InfrastructureError(f"{place}: the Hub does not take it now: {reason}") from error


def _status(error: BaseException | None) -> int | None:
    """The HTTP status behind an error, if there is one."""
    while error is not None:
        if isinstance(error, HfHubHTTPError):
            return int(error.response.status_code)
        error = error.__cause__
    return None


@contextmanager
def uploading(job: FinetuneJob, directory: JobDirectory) -> Iterator[None]:
    """Around a driver's work: the repository is made before anything is trained, and kept up to date meanwhile.

    Raises:
        JobError: the job's token may not write to its repository.
    """
    spec = job.spec.output.hub
    if spec is None:
        yield
        return
    hub = Hub(spec)
    try:
        hub.create()
    except InfrastructureError as error:
        logger.warning("%s; training goes on", error)
    if spec.strategy == "end":
        yield
        return
    with CheckpointUploads(directory, lambda checkpoint: hub.upload_checkpoint(directory, checkpoint)):
        yield


def publish(job: FinetuneJob, directory: JobDirectory, beat: Callable[[], None]) -> None:
    """Upload the exported model, where the job wants that.

    Args:
        job: that is trained.
        directory: of the job.
        beat: called every few seconds meanwhile.

    Raises:
        JobError: the Hub refuses it.
        InfrastructureError: the Hub does not take it now.
    """
    spec = job.spec.output.hub
    if spec is None:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="hub") as executor:
        upload = executor.submit(Hub(spec).upload_model, directory.export)
        while not wait([upload], _BEAT_SECONDS).done:
            beat()
        upload.result()
    logger.info("the model is on the Hub: %s", spec.repo)


class CheckpointUploads:
    """Keeps `last-checkpoint/` up to date; a context manager around the driver's work."""

    def __init__(self, directory: JobDirectory, upload: Callable[[Checkpoint], None]) -> None:
        self._directory = directory
        self._upload = upload
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)

    def __enter__(self) -> CheckpointUploads:
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._ending.set()
        # A driver that was told to stop has no time to lose; the next one uploads what is newest then.
        self._thread.join(_LAST_SECONDS if error is None else 0)

    def _run(self) -> None:
        last: CheckpointName | None = None
        failures = 0
        while True:
            is_last = self._ending.is_set()
            pause = _LOOK_EVERY_SECONDS
            newest = choose_checkpoint(self._directory).checkpoint
            if newest is not None and newest.name != last:
                try:
                    self._upload(newest)
                except Exception as error:  # noqa: BLE001 - whatever the Hub does, training goes on
                    failures += 1
                    pause = backoff_seconds(failures, *_BACKOFF_SECONDS)
                    logger.warning("%s; trying again in %.0f s", error, pause)
                else:
                    last, failures = newest.name, 0
                    logger.info("%s is on the Hub", last)
            if is_last:
                return
            self._ending.wait(pause)


@contextmanager
def _job_directory_with(directory: JobDirectory, checkpoint: Checkpoint) -> Iterator[Path]:
    """A job directory with a checkpoint of another one and what led to it, beside that for as long as it is needed.

    Checkpoints may be deleted meanwhile: their files are hard links where the volume has them, else copies.
    """
    folder = directory.root / ".hub"
    shutil.rmtree(folder, ignore_errors=True)
    try:
        shutil.copytree(
            checkpoint.path, folder / directory.checkpoints.name / checkpoint.path.name, copy_function=_link
        )
        for path in _records(directory):
            target = folder / path.relative_to(directory.root)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _records(directory: JobDirectory) -> Iterator[Path]:
    """The small files of a run: its job, its plan, its history."""
    for path in (directory.job, directory.plan, directory.ledger):
        if path.exists():
            yield path
    yield from directory.root.glob("generations/*/*")
    yield from directory.logs.glob("gen-*/steps.jsonl")


def _link(source: str, target: str) -> None:
    with suppress(OSError):
        os.link(source, target)
        return
    shutil.copyfile(source, target)
