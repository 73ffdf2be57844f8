"""Uploads to the Hugging Face Hub: the exported model, and on request the newest checkpoint during training.

The repository's `last-checkpoint/` is a job directory with one checkpoint; training can continue from a download of it.
Each upload replaces it in a single commit, so it is always complete. Uploads run in a thread of the driver, one at a
time, and always take the newest checkpoint. Once training runs, errors of the Hub do not stop it.
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
from spotune.job.output import HUB_TOKEN, HubSpec
from spotune.retry import backoff_seconds
from spotune_trainer.bucket.checkpoints import refresh
from spotune_trainer.bucket.link import bucket_of
from spotune_trainer.checkpoint.generations import choose_checkpoint
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.checkpoint.reader import fetch
from spotune_trainer.export.to_bucket import download_export
from spotune_trainer.job_directory.layout import JobDirectory

logger = logging.getLogger("spotune.hub")

LAST_CHECKPOINT = "last-checkpoint"
_POLL_SECONDS = 10.0
_HEARTBEAT_SECONDS = 5.0
_BACKOFF_SECONDS = (30.0, 600.0)
_FINAL_UPLOAD_SECONDS = 300.0
"""How long a driver that finished waits for the upload of the last checkpoint."""
_REFUSED_STATUS = (401, 403, 404)


class HubRepository:
    """A model repository on the Hub.

    Args:
        spec: the repository.
        environment: environment variables; the token is in `SPOTUNE_HUB_TOKEN` or `HF_TOKEN`.
    """

    def __init__(self, spec: HubSpec, environment: Any = os.environ) -> None:
        self._spec = spec
        self._api = HfApi(token=environment.get(HUB_TOKEN) or environment.get("HF_TOKEN"))

    def ensure_exists(self) -> None:
        """Create the repository if it does not exist, and check that the token may write to it.

        Raises:
            JobError: the token has no write access, or the name is wrong.
            InfrastructureError: the Hub could not be reached, or failed.
        """
        with self._translate_errors():
            self._api.create_repo(self._spec.repo, private=self._spec.private, exist_ok=True)
            self._api.auth_check(self._spec.repo, write=True)

    def upload_model(self, export: Path) -> None:
        """Upload the files of an export to the root of the repository. Raises like `ensure_exists`."""
        with self._translate_errors():
            self._api.upload_folder(repo_id=self._spec.repo, folder_path=export, commit_message="The trained model")

    def upload_checkpoint(self, directory: JobDirectory, checkpoint: Checkpoint) -> None:
        """Replace `last-checkpoint/` by a job directory with this checkpoint. Raises like `ensure_exists`."""
        with self._translate_errors(), _job_directory_with(directory, checkpoint) as folder:
            self._api.upload_folder(
                repo_id=self._spec.repo,
                folder_path=folder,
                path_in_repo=LAST_CHECKPOINT,
                delete_patterns="*",
                commit_message=f"Checkpoint of step {checkpoint.name.step}",
            )

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Turn refusals (HTTP 401, 403, 404) into JobError, and any other error into InfrastructureError."""
        place = f"output.hub: {self._spec.repo}"
        try:
            yield
        except Exception as error:  # the Hub's client also passes on errors of its HTTP client
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if _status(error) in _REFUSED_STATUS:
                raise JobError(
                    f"{place}: the Hub refused access ({reason}): check the name, and that the token of "
                    "output.hub.tokenSecretRef has write access. A trained model is in export/ of the job's directory"
                ) from error
            raise InfrastructureError(f"{place}: the Hub could not be used: {reason}") from error


def _status(error: BaseException | None) -> int | None:
    """The HTTP status in an error or its causes; None if there is none."""
    while error is not None:
        if isinstance(error, HfHubHTTPError):
            return int(error.response.status_code)
        error = error.__cause__
    return None


@contextmanager
def upload_checkpoints(job: FinetuneJob, directory: JobDirectory) -> Iterator[None]:
    """Create the repository before training, and upload checkpoints while the body runs if the job asks for it.

    Does nothing for a job without `output.hub`.

    Raises:
        JobError: the job's token has no write access to the repository.
    """
    spec = job.spec.output.hub
    if spec is None:
        yield
        return
    hub = HubRepository(spec)
    try:
        hub.ensure_exists()
    except InfrastructureError as error:
        logger.warning("%s; training continues", error)
    if spec.strategy == "end":
        yield
        return
    with CheckpointUploader(directory, lambda checkpoint: hub.upload_checkpoint(directory, checkpoint)):
        yield


def upload_export(job: FinetuneJob, directory: JobDirectory, heartbeat: Callable[[], None]) -> None:
    """Upload the exported model. Does nothing for a job without `output.hub`.

    Args:
        job: the job that trained the model.
        directory: the job directory with the export.
        heartbeat: called every five seconds during the upload.

    Raises:
        JobError: the Hub refused access.
        InfrastructureError: the Hub could not be reached, or failed.
    """
    spec = job.spec.output.hub
    if spec is None:
        return
    with ThreadPoolExecutor(1, thread_name_prefix="hub") as executor:
        upload = executor.submit(_upload_model, HubRepository(spec), directory)
        while not wait([upload], _HEARTBEAT_SECONDS).done:
            heartbeat()
        upload.result()
    logger.info("the model is on the Hub: %s", spec.repo)


def _upload_model(hub: HubRepository, directory: JobDirectory) -> None:
    download_export(directory)
    hub.upload_model(directory.export)


class CheckpointUploader:
    """Uploads every new checkpoint from a background thread, while its `with` block runs.

    Args:
        directory: the job directory to watch.
        upload: uploads one checkpoint. It is retried with exponential backoff, whatever it raises.
    """

    def __init__(self, directory: JobDirectory, upload: Callable[[Checkpoint], None]) -> None:
        self._directory = directory
        self._upload = upload
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hub", daemon=True)

    def __enter__(self) -> CheckpointUploader:
        self._thread.start()
        return self

    def __exit__(self, error: type[BaseException] | None, *_: object) -> None:
        self._closing.set()
        # A driver that stops early does not wait; the next attempt uploads the newest checkpoint.
        self._thread.join(_FINAL_UPLOAD_SECONDS if error is None else 0)

    def _run(self) -> None:
        last: CheckpointName | None = None
        failures = 0
        while True:
            is_last = self._closing.is_set()
            pause = _POLL_SECONDS
            try:
                last, failures = self._upload_newest(last), 0
            except Exception as error:  # noqa: BLE001 - an upload error must not stop training
                failures += 1
                pause = backoff_seconds(failures, *_BACKOFF_SECONDS)
                logger.warning("%s; retrying in %.0f s", error, pause)
            if is_last:
                return
            self._closing.wait(pause)

    def _upload_newest(self, last: CheckpointName | None) -> CheckpointName | None:
        """Upload the newest checkpoint unless it is `last`; returns its name."""
        bucket = bucket_of(self._directory)
        if bucket is not None:  # ranks on other machines commit there
            refresh(bucket, self._directory)
        newest = choose_checkpoint(self._directory).checkpoint
        if newest is None or newest.name == last:
            return last
        fetch(newest)
        self._upload(newest)
        logger.info("%s is on the Hub", newest.name)
        return newest.name


@contextmanager
def _job_directory_with(directory: JobDirectory, checkpoint: Checkpoint) -> Iterator[Path]:
    """A temporary job directory with one checkpoint and the run's records.

    Its checkpoint files are hard links, or copies if the volume has no hard links, because the original checkpoint may
    be deleted during the upload.
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
    """The small files of a run: job, plan, ledger, generations and step logs."""
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
