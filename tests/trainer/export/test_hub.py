"""Uploads to a Hub: the model at the root, a resumable job directory beside it, and no effect on training."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from spotune.errors import InfrastructureError, JobError
from spotune.job import FinetuneJob
from spotune.job.output import HubSpec
from spotune_trainer.checkpoint.generations import choose_checkpoint
from spotune_trainer.checkpoint.layout import Checkpoint
from spotune_trainer.export import hub as hub_module
from spotune_trainer.export.hub import (
    LAST_CHECKPOINT,
    CheckpointUploader,
    HubRepository,
    upload_checkpoints,
    upload_export,
)
from spotune_trainer.job_directory.job import put_job
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support import hub_server
from tests.trainer.support.runs import STEPS, Layout, Runs, losses, train_generation
from tests.trainer.support.waiting import wait_until

# Of the client itself, at what it sends.
pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")]

REPO = "me/tiny"


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[hub_server.Server]:
    with hub_server.serving() as found:
        monkeypatch.setattr(constants, "ENDPOINT", found.url)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", hub_server.TOKEN)
        yield found


def uploading_job(runs: Runs, **hub: Any) -> FinetuneJob:
    return runs.job("causal", output={"hub": {"repo": REPO, **hub}})


def trained(runs: Runs, job: FinetuneJob) -> JobDirectory:
    directory = runs.empty("hub")
    put_job(directory, job)
    train_generation(directory, job, Layout(1, 0))
    return directory


def spec_of(job: FinetuneJob) -> HubSpec:
    assert job.spec.output.hub is not None
    return job.spec.output.hub


def newest(directory: JobDirectory) -> Checkpoint:
    found = choose_checkpoint(directory).checkpoint
    assert found is not None
    return found


def test_the_model_is_at_the_root_of_a_private_repository(runs: Runs, server: hub_server.Server) -> None:
    job = uploading_job(runs)
    directory = trained(runs, job)
    with upload_checkpoints(job, directory):
        pass
    beats: list[int] = []
    upload_export(job, directory, lambda: beats.append(1))
    repository = server.repositories[REPO]
    assert repository.private
    expected = {str(path.relative_to(directory.export)): path.read_bytes() for path in directory.export.rglob("*")}
    assert repository.files == expected
    assert (
        hashlib.sha256(repository.files["model.safetensors"]).hexdigest()
        in directory.export.joinpath("README.md").read_text()
    )


def test_training_continues_from_a_download_of_the_last_checkpoint(
    runs: Runs, server: hub_server.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_module, "_POLL_SECONDS", 0.05)
    job = uploading_job(runs, strategy="checkpoint")
    directory = trained(runs, job)
    interrupted = runs.interrupted(directory, 5)
    with upload_checkpoints(job, interrupted):
        assert wait_until(lambda: bool(server.repositories[REPO].messages), 60)
    assert server.repositories[REPO].messages == ["Checkpoint of step 5"]
    assert not (interrupted.root / ".hub").exists()
    elsewhere = runs.empty("downloaded")
    server.repositories[REPO].download(f"{LAST_CHECKPOINT}/", elsewhere.root)
    train_generation(elsewhere, job, Layout(1, 0))
    assert losses(elsewhere) == losses(directory)
    assert len(losses(elsewhere)) == STEPS


def test_a_new_checkpoint_replaces_the_previous_one(runs: Runs, server: hub_server.Server) -> None:
    job = uploading_job(runs)
    directory = trained(runs, job)
    hub = HubRepository(spec_of(job), os.environ)
    hub.ensure_exists()
    server.repositories[REPO].files["config.json"] = b"of the model"
    for each in (runs.interrupted(directory, 5), directory):
        hub.upload_checkpoint(each, newest(each))
        names = {name.split("/")[2] for name in server.repositories[REPO].files if "/checkpoints/" in name}
        assert names == {str(newest(each).name)}
    assert server.repositories[REPO].files["config.json"] == b"of the model"


def test_failed_uploads_are_retried_and_do_not_stop_training(
    runs: Runs, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(hub_module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(hub_module, "_BACKOFF_SECONDS", (0.01, 0.02))
    directory = trained(runs, uploading_job(runs))
    taken: list[Checkpoint] = []
    failures = iter([InfrastructureError("away"), OSError("no route to host"), JobError("may not")])

    def upload(checkpoint: Checkpoint) -> None:
        for error in failures:
            raise error
        taken.append(checkpoint)

    with CheckpointUploader(directory, upload):
        assert wait_until(lambda: bool(taken), 60)
    assert [each.name for each in taken] == [newest(directory).name]
    assert [word in caplog.text for word in ("away", "no route to host", "may not")] == [True] * 3


def test_a_token_without_write_access_is_rejected_before_training(
    runs: Runs, server: hub_server.Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SPOTUNE_HUB_TOKEN", "hf_reader")
    refusal = pytest.raises(
        JobError, match=r"output\.hub: me/tiny: the Hub refused access .*tokenSecretRef has write access"
    )
    with refusal, upload_checkpoints(uploading_job(runs), JobDirectory(tmp_path)):
        pytest.fail("training must not start")


def test_an_unreachable_hub_at_the_end_is_an_infrastructure_error(runs: Runs, server: hub_server.Server) -> None:
    job = uploading_job(runs)
    directory = trained(runs, job)
    HubRepository(spec_of(job), os.environ).ensure_exists()
    server.refusals = 100
    with pytest.raises(InfrastructureError, match=r"output\.hub: me/tiny: the Hub could not be used"):
        upload_export(job, directory, lambda: None)
