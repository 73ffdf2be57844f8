"""The supervisor of a pod whose job is in a bucket: what it reads and writes there, and who is fenced off."""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune.errors import JobError
from spotune_trainer.bucket.client import Bucket, open_bucket
from spotune_trainer.bucket.link import link_of, writer_folder
from spotune_trainer.bucket.writer import claim_writer, newest_state, newest_status
from spotune_trainer.job_directory.ledger import Ledger
from tests.trainer.support import buckets
from tests.trainer.support.pods import Pod, ignore_stop
from tests.trainer.support.runs import Runs
from tests.trainer.support.tiny import save_source
from tests.trainer.support.unreliable_server import UnreliableServer


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[UnreliableServer]:
    """An S3 server that can be made unreachable; its endpoint is in the environment."""
    with buckets.open_bucket("s3"), UnreliableServer(os.environ["S3_ENDPOINT_URL"]) as proxy:
        monkeypatch.setenv("S3_ENDPOINT_URL", proxy.url)
        monkeypatch.setattr("spotune_trainer.bucket.client._RETRIES", {"max_retries": 0})
        monkeypatch.setattr("spotune_trainer.bucket.state_mirror.PUSH_SECONDS", 0.2)
        open_bucket.cache_clear()
        yield proxy
    open_bucket.cache_clear()


@pytest.fixture
def bucket(server: UnreliableServer) -> Bucket:
    return open_bucket(f"s3://bucket/{uuid.uuid4().hex}")


class BucketPod(Pod):
    """A head pod with an empty directory."""

    def __init__(self, root: Path, runs: Runs, bucket: Bucket) -> None:
        root.mkdir(exist_ok=True)
        super().__init__(root, bucket=bucket.url)
        model = runs.shards("seq2seq").with_name("model-of-pods")
        if not model.exists():
            save_source(model, "seq2seq")
        self.write_job(model, dataset={"train": {"source": str(runs.shards("seq2seq"))}, "eval": None})


def until(pod: Pod, state: str) -> None:
    pod.until_state(state)


def status_in(bucket: Bucket) -> dict[str, object]:
    found: dict[str, object] = json.loads(newest_status(bucket) or b"{}")
    return found


def test_next_head_finds_what_the_earlier_one_left_in_the_bucket(tmp_path: Path, runs: Runs, bucket: Bucket) -> None:
    first = BucketPod(tmp_path / "first", runs, bucket)

    def train() -> None:
        checks = first.until_state("trained")["preflight"]["checks"]
        assert [check["name"] for check in checks] == ["bucket", "model", "data", "commit-time"]
        assert "to the bucket" in checks[-1]["message"]

    assert first.run(train) is None
    assert status_in(bucket)["phase"] == "Done"
    shutil.rmtree(first.directory.root)
    second = BucketPod(tmp_path / "second", runs, bucket)
    assert second.run(lambda: until(second, "trained")) is None
    assert second.ray.attempts == 0, "the model is trained already"
    assert [each["attempt"] for each in Ledger(second.directory).records("attempt-started")] == [1]


def test_bucket_with_checkpoints_of_another_job_is_refused_by_its_url(
    tmp_path: Path, runs: Runs, bucket: Bucket
) -> None:
    first = BucketPod(tmp_path / "first", runs, bucket)
    first.run(lambda: until(first, "trained"))
    bucket.write("checkpoints/step-00000001.gen-1/manifest.json", b"{}")
    second = BucketPod(tmp_path / "second", runs, bucket)
    second.job_path.write_text(first.job_path.read_text().replace('"epochs"', '"learningRate":0.5,"epochs"'))
    error = second.run(lambda: until(second, "failed"))
    assert isinstance(error, JobError)
    assert f"{bucket.url} holds checkpoints of a job that trains something else" in str(error)
    assert "give another storage.bucket" in str(error)


def test_bucket_that_cannot_be_reached_fails_the_preflight_until_it_can(
    tmp_path: Path, runs: Runs, bucket: Bucket, server: UnreliableServer
) -> None:
    server.break_connections()
    pod = BucketPod(tmp_path, runs, bucket)

    def script() -> None:
        pod.until(lambda: "storage.bucket" in pod.supervisor()["message"], "it is said")
        (check,) = pod.supervisor()["preflight"]["checks"]
        assert (check["name"], check["status"]) == ("bucket", "failed")
        assert bucket.url in check["message"]
        assert (pod.state(), pod.ray.attempts) == ("preflight", 0)
        server.mend()
        pod.until_state("trained")

    assert pod.run(script) is None


def test_older_supervisor_stops_its_driver_and_waits_for_the_newer_one(
    tmp_path: Path, runs: Runs, bucket: Bucket
) -> None:
    pod = BucketPod(tmp_path, runs, bucket)
    pod.ray.drive = ignore_stop

    def script() -> None:
        pod.until(lambda: status_in(bucket).get("phase") == "Training", "it trains")
        link = claim_writer(bucket)  # as another head does
        bucket.write(f"{writer_folder(link.writer)}/status.json", b'{"heartbeat": 1}')
        pod.until(lambda: "has taken over" in pod.supervisor()["message"], "it is fenced off")
        assert [job.status for job in pod.ray.jobs.values()] == ["STOPPED"]
        assert pod.progress()["phase"] == "Starting", "it makes no steps any more"
        assert pod.state() == "waiting"
        assert newest_state(bucket) == link.writer - 1

    pod.run(script)
    own = link_of(pod.directory)
    assert own is not None
    assert own.writer == newest_state(bucket)
