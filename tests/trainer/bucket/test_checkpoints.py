"""Checkpoints in a bucket: what is committed survives any kill, and machines share nothing but the bucket."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from spotune.errors import SupersededError
from spotune.job import CheckpointSpec
from spotune_trainer.bucket.checkpoints import list_checkpoint_files, refresh
from spotune_trainer.bucket.client import Bucket, BucketError
from spotune_trainer.checkpoint import async_checkpointer
from spotune_trainer.checkpoint.async_checkpointer import AsyncCheckpointer
from spotune_trainer.checkpoint.generations import ResumeChoice, choose_checkpoint, claim, list_generations, withdraw
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.checkpoint.reader import CorruptCheckpointError, fetch, read_parameters
from spotune_trainer.checkpoint.restore import RestoredBytes
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.bucket.conftest import linked_directory
from tests.trainer.support.checkpoints import fragments_of_rank, make_manifest, make_state, restore

CLAIM = """
import sys
from pathlib import Path
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.job_directory.layout import JobDirectory
for _ in range(10):
    print(claim(JobDirectory(Path(sys.argv[1])), None).number)
"""


class KilledError(BaseException):
    """Stands for a `kill -9` of the process."""


@pytest.fixture(autouse=True)
def quick_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_checkpointer, "_FIRST_RETRY_SECONDS", 0.01)
    monkeypatch.setattr("spotune_trainer.bucket.checkpoints._POLL_SECONDS", 0.01)


class Machines:
    """Machines with directories of their own."""

    def __init__(self, bucket: Bucket, root: Path) -> None:
        self._bucket = bucket
        self._root = root
        self._made = 0

    def new(self) -> JobDirectory:
        self._made += 1
        return linked_directory(self._bucket, self._root / str(self._made))

    def choice(self) -> tuple[JobDirectory, ResumeChoice]:
        """What a new machine would resume from."""
        directory = self.new()
        refresh(self._bucket, directory)
        return directory, choose_checkpoint(directory)


@pytest.fixture
def machines(bucket: Bucket, tmp_path: Path) -> Machines:
    return Machines(bucket, tmp_path)


def checkpointers(directories: Sequence[JobDirectory], keep: int = 9) -> list[AsyncCheckpointer]:
    """A checkpointer for each rank, each on the machine of its directory."""
    spec = CheckpointSpec(keep=keep)
    return [AsyncCheckpointer(each, rank, len(directories), spec) for rank, each in enumerate(directories)]


def commit(ranks: Sequence[AsyncCheckpointer], step: int, generation: int = 1) -> None:
    name, state = CheckpointName(step, generation), make_state(step)
    for rank, checkpointer in reversed(list(enumerate(ranks))):
        checkpointer.save(name, fragments_of_rank(state, len(ranks), rank), partial(make_manifest, name))
    for checkpointer in ranks:
        checkpointer.wait()


def restored(checkpoint: Checkpoint | None, world_size: int = 1) -> RestoredBytes:
    """Restore on some ranks; the state has to be that of the checkpoint's step."""
    assert checkpoint is not None
    state, read = restore(checkpoint, [None] * world_size)
    expected = make_state(checkpoint.name.step)
    assert all(torch.equal(state[name], tensor) for name, tensor in expected.items())
    return read


@contextmanager
def fault(number: int, error: BaseException, *, after: bool = False) -> Iterator[list[str]]:
    """Let one request of this process to any bucket fail, before it is sent or after it was answered.

    Yields:
        Kind and name of the requests so far.
    """
    requests: list[str] = []
    lock = threading.Lock()
    original = Bucket._request

    @contextmanager
    def request(self: Bucket, kind: str, name: str) -> Iterator[None]:
        with lock:
            requests.append(f"{kind} {name}")
            fails = len(requests) == number
        if fails and not after:
            raise error
        with original(self, kind, name):
            yield
        if fails:
            raise error

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "_request", request)
        yield requests


@pytest.mark.parametrize(("wrote", "reads"), [(1, 1), (3, 1), (2, 3)])
def test_machines_that_share_only_the_bucket_commit_and_restore(machines: Machines, wrote: int, reads: int) -> None:
    claim(machines.new(), None)
    homes = [machines.new() for _ in range(wrote)]
    ranks = checkpointers(homes)
    for step in (5, 10, 15):
        commit(ranks, step)
    directory, choice = machines.choice()
    assert choice.checkpoint is not None
    assert choice.checkpoint.name == CheckpointName(15, 1)
    assert not list(directory.checkpoints.glob("*/*.safetensors")), "nothing is downloaded before it is read"
    read = restored(choice.checkpoint, reads)
    assert read.volume == sum(tensor.numel() * 4 for tensor in make_state().values())
    for home in homes:
        assert (home.checkpoints / "step-00000015.gen-1" / "manifest.json").exists(), "nodes know what is committed"
        assert len(list(home.checkpoints.glob("*/*.safetensors"))) == 2, "disks keep the newest two"


def test_a_kill_before_any_request_loses_no_committed_state(machines: Machines, bucket: Bucket, tmp_path: Path) -> None:
    found: set[int] = set()
    number, requests = 0, list[str]()
    while number <= len(requests):
        number += 1
        each = Machines(Bucket(f"{bucket.url}/{number}"), tmp_path / str(number))
        home = each.new()
        assert claim(home, None).number == 1
        ranks = checkpointers([home], keep=1)
        commit(ranks, 5)
        with fault(number, KilledError()) as requests, suppress(KilledError):
            commit(ranks, 10)
        _, choice = each.choice()
        assert choice.skipped == ()
        restored(choice.checkpoint)
        assert choice.checkpoint is not None
        found.add(choice.checkpoint.name.step)
        assert claim(each.new(), choice.checkpoint.name).number == 2
    assert found == {5, 10}
    assert number > 8, "a commit is several requests"


def test_a_request_whose_answer_is_lost_is_repeated(bucket: Bucket, tmp_path: Path) -> None:
    number, requests = 0, list[str]()
    while number <= len(requests):
        number += 1
        each = Machines(Bucket(f"{bucket.url}/{number}"), tmp_path / str(number))
        home = each.new()
        claim(home, None)
        ranks = checkpointers([home], keep=1)
        with fault(number, BucketError("the answer was lost"), after=True) as requests:
            commit(ranks, 10)
        _, choice = each.choice()
        assert choice.checkpoint is not None
        assert choice.checkpoint.name.step == 10
        restored(choice.checkpoint)


def test_a_bucket_that_is_away_delays_the_commit_and_training_goes_on(machines: Machines) -> None:
    home = machines.new()
    claim(home, None)
    (rank,) = checkpointers([home])
    name, state = CheckpointName(5, 1), make_state(5)
    away = threading.Event()
    original = Bucket.upload

    def upload(self: Bucket, target: str, path: Path, report: Callable[[int], None] = lambda _count: None) -> None:
        if not away.is_set():
            raise BucketError("s3 is away")
        original(self, target, path, report)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Bucket, "upload", upload)
        rank.save(name, fragments_of_rank(state, 1, 0), partial(make_manifest, name))
        while rank.problem is None:
            assert rank.is_busy
        assert rank.problem == "the commit of step 5 failed and will be retried: s3 is away"
        assert machines.choice()[1].checkpoint is None
        away.set()
        rank.wait()
    restored(machines.choice()[1].checkpoint)


def test_a_commit_of_a_superseded_generation_does_not_count(machines: Machines) -> None:
    older, newer = machines.new(), machines.new()
    assert claim(older, None).number == 1
    zombie = checkpointers([older])
    commit(zombie, 5)
    assert claim(newer, CheckpointName(5, 1)).number == 2
    with pytest.raises(SupersededError, match="generation 1 was superseded"):
        commit(zombie, 10)
    commit(checkpointers([newer]), 7, generation=2)
    checkpoint = machines.choice()[1].checkpoint
    assert checkpoint is not None
    assert checkpoint.name == CheckpointName(7, 2)


def test_a_manifest_that_was_written_while_the_next_generation_started_does_not_count(machines: Machines) -> None:
    """The older group looked at the fence before the claim, and wrote its manifest after it."""
    home = machines.new()
    claim(home, None)
    ranks = checkpointers([home])
    commit(ranks, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(async_checkpointer, "raise_if_superseded", lambda *_: claim(machines.new(), CheckpointName(5, 1)))
        commit(ranks, 10)
    checkpoint = machines.choice()[1].checkpoint
    assert checkpoint is not None
    assert checkpoint.name == CheckpointName(5, 1)


def test_a_withdrawn_claim_takes_nothing_out_of_the_lineage(machines: Machines) -> None:
    worker, driver = machines.new(), machines.new()
    claim(worker, None)
    commit(checkpointers([worker]), 10)
    generation = claim(driver, None)
    assert machines.choice()[1].checkpoint is None
    withdraw(driver, generation)
    assert list_generations(driver) == []
    checkpoint = machines.choice()[1].checkpoint
    assert checkpoint is not None
    assert checkpoint.name == CheckpointName(10, 1)


def test_a_machine_that_saw_a_withdrawn_claim_learns_what_became_of_its_number(
    machines: Machines, bucket: Bucket
) -> None:
    """The group whose commit was found sees the claim as well. Its machine may be one of the next group."""
    worker, driver = machines.new(), machines.new()
    claim(worker, None)
    commit(checkpointers([worker]), 10)
    for restored in (None, CheckpointName(10, 1)):
        generation = claim(driver, None)
        refresh(bucket, worker)
        assert list_generations(worker)[-1] == generation
        withdraw(driver, generation)
        claimed = [claim(driver, restored)] if restored else []
        refresh(bucket, worker)
        assert list_generations(worker)[1:] == claimed


def test_a_machine_learns_of_commits_while_a_group_deletes_others(
    machines: Machines, bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group outlives its head. The next one downloads one manifest after the other."""
    home = machines.new()
    claim(home, None)
    ranks = checkpointers([home], keep=1)
    commit(ranks, 5)
    listed = list_checkpoint_files(bucket)
    commit(ranks, 10)
    monkeypatch.setattr(
        "spotune_trainer.bucket.checkpoints.list_checkpoint_files", lambda _: listed | list_checkpoint_files(bucket)
    )
    checkpoint = machines.choice()[1].checkpoint
    assert checkpoint is not None
    assert checkpoint.name == CheckpointName(10, 1)


def test_racing_processes_on_several_machines_claim_every_number_once(machines: Machines) -> None:
    directories = [machines.new() for _ in range(2)]
    commands = [[sys.executable, "-c", CLAIM, str(each.root)] for each in directories]
    claimants = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for command in commands]
    numbers = [[int(line) for line in claimant.communicate(timeout=120)[0].split()] for claimant in claimants]
    assert sorted(number for each in numbers for number in each) == list(range(1, 21))
    directory, _ = machines.choice()
    assert [generation.number for generation in list_generations(directory)] == list(range(1, 21))


def test_what_commits_replace_is_deleted_from_the_bucket_and_from_each_machine(
    machines: Machines, bucket: Bucket
) -> None:
    first, second = machines.new(), machines.new()
    claim(first, None)
    ranks = checkpointers([first], keep=2)
    for step in (5, 10, 15):
        commit(ranks, step)
    bucket.write("checkpoints/step-00000012.gen-1/rank-00000.safetensors", b"of a killed group")
    claim(second, CheckpointName(15, 1))
    others = checkpointers([second], keep=2)
    refresh(bucket, second)
    commit(others, 20, generation=2)
    assert list(list_checkpoint_files(bucket)) == ["step-00000015.gen-1", "step-00000020.gen-2"]
    refresh(bucket, first)
    known = sorted(path.parent.name for path in first.checkpoints.glob("*/manifest.json"))
    assert known == ["step-00000015.gen-1", "step-00000020.gen-2"]


@pytest.mark.parametrize("damage", [lambda whole: whole[:-4] + b"torn", lambda whole: whole[:5], lambda _: b"header"])
def test_a_damaged_copy_on_the_disk_is_replaced_by_that_of_the_bucket(
    machines: Machines, damage: Callable[[bytes], bytes]
) -> None:
    home = machines.new()
    claim(home, None)
    commit(checkpointers([home]), 5)
    (path,) = home.checkpoints.glob("*/*.safetensors")
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    checkpoint = choose_checkpoint(home).checkpoint
    restored(checkpoint)
    assert path.read_bytes() == whole


def test_a_torn_object_is_skipped_and_a_changed_one_is_found_corrupt(machines: Machines, bucket: Bucket) -> None:
    home = machines.new()
    claim(home, None)
    ranks = checkpointers([home])
    for step in (5, 10, 15):
        commit(ranks, step)
    bucket.write("checkpoints/step-00000015.gen-1/rank-00000.safetensors", b"torn")
    content = bucket.read("checkpoints/step-00000010.gen-1/rank-00000.safetensors")
    assert content is not None
    bucket.write("checkpoints/step-00000010.gen-1/rank-00000.safetensors", content[:-4] + b"flip")
    directory, choice = machines.choice()
    assert [str(each.name) for each in choice.skipped] == ["step-00000015.gen-1"]
    assert choice.checkpoint is not None
    with pytest.raises(
        CorruptCheckpointError, match=r"step-00000010\.gen-1 is corrupt: .* in the bucket does not have"
    ):
        fetch(choice.checkpoint)
    older = choose_checkpoint(directory, [choice.checkpoint.name]).checkpoint
    assert older is not None
    fetch(older)
    assert torch.equal(read_parameters(older)["layer.bias"], make_state(5)["layer.bias/fp32"])


def test_ranks_of_one_machine_commit_beside_leftovers_of_later_steps(machines: Machines) -> None:
    """The first rank to be done must not take them for newer copies than the file that the other one still writes."""
    home = machines.new()
    claim(home, None)
    for leftover in ("step-00000097.gen-1", "step-00000100.gen-1"):
        (home.checkpoints / leftover).mkdir(parents=True)
        (home.checkpoints / leftover / "rank-00000.safetensors").write_bytes(b"unfinished")
    commit(checkpointers([home, home]), 5)
    assert len(list((home.checkpoints / "step-00000005.gen-1").glob("*.safetensors"))) == 2
    _, choice = machines.choice()
    assert choice.checkpoint is not None
    assert choice.checkpoint.name == CheckpointName(5, 1)


def test_a_manifest_is_readable_without_spotune(machines: Machines, bucket: Bucket) -> None:
    home = machines.new()
    claim(home, None)
    commit(checkpointers([home]), 5)
    content = bucket.read("checkpoints/step-00000005.gen-1/manifest.json")
    assert content is not None
    (file,) = json.loads(content)["files"]
    assert list_checkpoint_files(bucket)["step-00000005.gen-1"][file["name"]] == file["size"]


def test_other_processes_never_see_a_generation_without_its_record(machines: Machines, bucket: Bucket) -> None:
    """A supervisor, a driver and a view read the directory while another process claims or downloads."""
    directory, done = machines.new(), threading.Event()

    def claim_many() -> None:
        for _ in range(20):
            claim(directory, None)
        done.set()

    claimant = threading.Thread(target=claim_many)
    claimant.start()
    while not done.is_set():
        list_generations(directory)  # raises for a folder without a record
    claimant.join()
    other = machines.new()
    refresh(bucket, other)
    assert list_generations(other) == list_generations(directory)
    assert not list(directory.generations.glob(".claim*"))
