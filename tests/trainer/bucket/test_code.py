"""Code of the user in a bucket: another head uses the same commit, and each node gets it from there."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from spotune_trainer.bucket.client import Bucket
from spotune_trainer.bucket.link import Link, link_node, put_link
from spotune_trainer.bucket.state_mirror import StateMirror, pull_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.user_code.fetch import fetch_code, with_code
from tests.trainer.bucket.conftest import linked_directory
from tests.trainer.user_code.git_server import REPOSITORY, make_repository, push
from tests.trainer.user_code.test_fetch import TRAIN, job_from


def test_another_head_and_its_nodes_have_the_commit_that_was_read_first(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (commit,) = make_repository(tmp_path, {"train.py": TRAIN})
    job = job_from(git={"url": f"file://{tmp_path / REPOSITORY}", "revision": "main"})
    first = linked_directory(bucket, tmp_path / "first")
    with StateMirror(bucket, first, print):
        assert fetch_code(job, first) == commit
    push(tmp_path, {"train.py": TRAIN + "# newer\n"})
    second = linked_directory(bucket, tmp_path / "second")
    pull_job(bucket, second, folders=())
    put_link(second, Link(bucket.url, writer=2))
    assert fetch_code(job, second) == commit
    shutil.rmtree(tmp_path / REPOSITORY)
    node = JobDirectory(tmp_path / "node")
    link_node(node, bucket.url)
    monkeypatch.setenv("SPOTUNE_CACHE", str(tmp_path / "cache"))
    folder = Path(with_code(job, node, commit).spec.training.code)
    assert (folder / "train.py").read_text() == TRAIN
