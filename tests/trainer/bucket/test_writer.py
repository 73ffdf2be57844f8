"""State of supervisor and driver in a bucket: it comes back whole, and an older writer changes nothing that is read."""

from __future__ import annotations

import os
import uuid
from pathlib import Path

import pytest

from spotune.errors import InfrastructureError, SupersededError
from spotune_trainer import files
from spotune_trainer.bucket import appended
from spotune_trainer.bucket.appended import AppendedFile, logs_in, pull_log
from spotune_trainer.bucket.client import Bucket, BucketError
from spotune_trainer.bucket.link import link_of
from spotune_trainer.bucket.state_mirror import StateMirror, pull_job
from spotune_trainer.bucket.writer import StateUpload, claim_writer, newest_state
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from tests.trainer.bucket.conftest import linked_directory
from tests.trainer.support.waiting import wait_until


def machine(bucket: Bucket, root: Path) -> JobDirectory:
    """The directory of a machine that has never had this job."""
    directory = linked_directory(bucket, root)
    pull_job(bucket, directory)
    return directory


def content_of(directory: JobDirectory) -> dict[str, bytes]:
    """The files of a directory, except for what belongs to its machine."""
    paths = (path for path in directory.root.rglob("*") if path.is_file() and path != directory.bucket)
    return {str(path.relative_to(directory.root)): path.read_bytes() for path in paths}


def write_state(directory: JobDirectory, step: int) -> None:
    files.write_json(directory.job, {"name": "job"})
    files.write_json(directory.status, {"step": step})
    Ledger(directory).append("committed", step=step)
    with directory.driver_log(1).open("a") as log:
        log.write(f"step {step}\n")
    directory.tensorboard.mkdir(exist_ok=True)
    with (directory.tensorboard / "events").open("ab") as stream:
        stream.write(b"curve")


def test_a_log_is_uploaded_in_parts_of_which_only_the_last_is_replaced(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(appended, "PART_BYTES", 1000)
    path, copy = tmp_path / "log", tmp_path / "copy"
    upload = AppendedFile(bucket, "ledger.jsonl", path)
    upload.push()
    content = b""
    for size in (10, 500, 490, 1, 3000, 999):
        content += os.urandom(size)
        path.write_bytes(content)
        upload.push()
        (parts,) = logs_in(bucket.list()).values()
        pull_log(bucket, "ledger.jsonl", parts, copy)
        assert copy.read_bytes() == content
    assert bucket.list() == {f"ledger.jsonl.parts/{start:012d}": 1000 for start in range(0, 5000, 1000)}
    before = bucket.requests["put"]
    upload.push()
    assert bucket.requests["put"] == before, "nothing has changed"


def test_another_machine_has_the_state_as_it_was_left(bucket: Bucket, tmp_path: Path) -> None:
    first = machine(bucket, tmp_path / "first")
    with StateMirror(bucket, first, print) as mirror:
        write_state(first, 1)
        mirror.push()
        write_state(first, 2)
    expected = content_of(first)
    second = machine(bucket, tmp_path / "second")
    assert content_of(second) == expected
    with StateMirror(bucket, second, print):
        write_state(second, 3)
    assert content_of(machine(bucket, tmp_path / "third")) == content_of(second) != expected


def test_the_older_writer_changes_nothing_that_is_read_and_is_told(bucket: Bucket, tmp_path: Path) -> None:
    older, newer = machine(bucket, tmp_path / "older"), machine(bucket, tmp_path / "newer")
    write_state(older, 1)
    old_upload = StateUpload(bucket, older, claim_writer(bucket))
    old_upload.push()
    old_upload.raise_if_superseded()
    with StateMirror(bucket, newer, print):
        write_state(older, 2)
        old_upload.push()
        with pytest.raises(SupersededError, match="another run of this job has taken over s3://"):
            old_upload.raise_if_superseded()
        write_state(newer, 7)
    assert files.read_json(machine(bucket, tmp_path / "third").status) == {"step": 7}


def test_a_machine_that_is_lost_before_its_first_upload_is_complete_is_not_read(bucket: Bucket, tmp_path: Path) -> None:
    first = machine(bucket, tmp_path / "first")
    with StateMirror(bucket, first, print):
        write_state(first, 5)
    complete = newest_state(bucket)
    lost = claim_writer(bucket)
    bucket.write(lost.name("job.json"), b'{"name": "half"}')
    assert newest_state(bucket) == complete
    second = machine(bucket, tmp_path / "second")
    assert content_of(second) == content_of(first)
    with StateMirror(bucket, second, print):
        pass
    assert newest_state(bucket) > lost.writer


def test_the_machine_that_wrote_last_keeps_what_it_had_not_uploaded(bucket: Bucket, tmp_path: Path) -> None:
    """Its process was killed: the ledger on its disk is longer than that in the bucket."""
    directory = machine(bucket, tmp_path / "job")
    mirror = StateMirror(bucket, directory, print)
    mirror.__enter__()
    write_state(directory, 1)
    mirror.push()
    write_state(directory, 2)
    pull_job(bucket, directory)
    assert [record["step"] for record in Ledger(directory).records()] == [1, 2]
    with StateMirror(bucket, directory, print):
        pass
    assert [record["step"] for record in Ledger(machine(bucket, tmp_path / "other")).records()] == [1, 2]
    # Another machine went on meanwhile, so now this disk is the older one.
    other = machine(bucket, tmp_path / "another")
    with StateMirror(bucket, other, print):
        write_state(other, 3)
    pull_job(bucket, directory)
    assert [record["step"] for record in Ledger(directory).records()] == [1, 2, 3]


def test_the_state_of_earlier_writers_is_deleted_and_files_that_are_gone_too(bucket: Bucket, tmp_path: Path) -> None:
    first = machine(bucket, tmp_path / "first")
    with StateMirror(bucket, first, print):
        write_state(first, 1)
        files.write_json(first.result, {"steps": 1})
    second = machine(bucket, tmp_path / "second")
    with StateMirror(bucket, second, print) as mirror:
        second.result.unlink()
        mirror.push()
        found = set(bucket.list("writers"))
    assert {name for name in found if name.startswith("writers/0000001")} == {"writers/0000001/claim.json"}
    assert "writers/0000002/status.json" in found
    assert "writers/0000002/result.json" not in found


def test_the_fence_is_checked_after_an_error_of_the_local_disk(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotune_trainer.bucket.state_mirror.PUSH_SECONDS", 0.05)
    monkeypatch.setattr("spotune_trainer.bucket.state_mirror.LEDGER_SECONDS", 0.05)
    directory, lines = machine(bucket, tmp_path / "job"), list[str]()

    def fail(_upload: StateUpload) -> None:
        raise OSError(24, "Too many open files")

    with StateMirror(bucket, directory, lines.append) as mirror:
        with monkeypatch.context() as patch:
            patch.setattr(StateUpload, "push", fail)
            assert wait_until(lambda: mirror.problem is not None, 60)
        claim_writer(bucket)

        def is_superseded() -> bool:
            try:
                mirror.raise_if_superseded()
            except SupersededError:
                return True
            return False

        assert wait_until(is_superseded, 60)
    assert "Too many open files" in lines[0]


def test_a_bucket_that_is_away_is_reported_once_and_nothing_is_lost(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, lines = machine(bucket, tmp_path / "job"), list[str]()
    with StateMirror(bucket, directory, lines.append) as mirror, monkeypatch.context() as patch:
        patch.setattr(Bucket, "write", refuse)
        for step in (1, 2, 3):
            write_state(directory, step)
            mirror.push()
        assert mirror.problem == "s3 is away"
        patch.undo()
    assert lines == ["s3 is away. Training goes on; the upload is tried again", f"{bucket.url} can be reached again"]
    assert content_of(machine(bucket, tmp_path / "other")) == content_of(directory)


def test_what_the_driver_wrote_meanwhile_is_not_appended_again(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, copy = tmp_path / "log", tmp_path / "copy"
    path.write_bytes(b"one\ntwo\n")
    AppendedFile(bucket, "steps.jsonl", path).push()
    copy.write_bytes(b"one\n")
    read = Bucket.read_from

    def read_slowly(self: Bucket, name: str, start: int) -> bytes:
        content = read(self, name, start)
        copy.write_bytes(path.read_bytes())
        return content

    monkeypatch.setattr(Bucket, "read_from", read_slowly)
    pull_log(bucket, "steps.jsonl", logs_in(bucket.list(""))["steps.jsonl"], copy)
    assert copy.read_bytes() == path.read_bytes()


def test_an_event_is_in_the_bucket_before_the_next_upload_of_the_status(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spotune_trainer.bucket.state_mirror.LEDGER_SECONDS", 0.05)
    monkeypatch.setattr("spotune_trainer.bucket.state_mirror.PUSH_SECONDS", 600.0)
    directory = machine(bucket, tmp_path / "job")
    with StateMirror(bucket, directory, print):
        write_state(directory, 1)
        assert wait_until(lambda: len(Ledger(machine(bucket, tmp_path / uuid.uuid4().hex)).records()) == 1, 60)
        assert not files.read_json(machine(bucket, tmp_path / "other").status)


def test_a_run_does_not_end_well_while_its_result_is_not_in_the_bucket(
    bucket: Bucket, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory, now = machine(bucket, tmp_path / "job"), [0.0]
    mirror = StateMirror(bucket, directory, print, lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
    problem = r"s3 is away\. What is not uploaded is in .*: the same command continues"
    mirror.__enter__()
    monkeypatch.setattr(Bucket, "write", refuse)
    write_state(directory, 1)
    with pytest.raises(InfrastructureError, match=problem):
        mirror.__exit__(None, None, None)
    monkeypatch.undo()
    link = link_of(directory)
    assert link is not None
    assert link.writer == newest_state(bucket)


def refuse(*_: object) -> None:
    raise BucketError("s3 is away")
