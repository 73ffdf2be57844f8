"""Checkpoints: any layout reads what any other wrote, and a torn or damaged one is never mistaken for whole."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from spotune_trainer.checkpoint.fragment import STATES, Fragment
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import (
    MANIFEST,
    Checkpoint,
    CheckpointName,
    FileEntry,
    Manifest,
    UnusableCheckpoint,
    list_checkpoints,
    open_checkpoint,
    rank_ok,
)
from spotune_trainer.checkpoint.reader import CheckpointReader, CorruptCheckpointError, read_parameters, verify
from spotune_trainer.checkpoint.writer import commit, prune, write_fragments, write_tensors
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.checkpoints import SHAPES, commit_checkpoint, fragments_of_rank, make_manifest, make_state


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path)


def whole(directory: JobDirectory, name: CheckpointName) -> Checkpoint:
    checkpoint = open_checkpoint(directory.checkpoints / str(name))
    assert isinstance(checkpoint, Checkpoint)
    return checkpoint


def names(directory: JobDirectory) -> list[str]:
    return [str(found.name) for found in list_checkpoints(directory.checkpoints)]


@pytest.mark.parametrize("wrote", [1, 2, 3, 8])
@pytest.mark.parametrize("reads", [1, 2, 5])
def test_any_world_size_reads_what_any_other_wrote(directory: JobDirectory, wrote: int, reads: int) -> None:
    state = make_state()
    checkpoint = whole(directory, commit_checkpoint(directory, 1, 1, wrote, state))
    verify(checkpoint)
    empty = {name: torch.full_like(tensor, torch.nan) for name, tensor in state.items()}
    for rank in range(reads):
        CheckpointReader(checkpoint).restore(fragments_of_rank(empty, reads, rank))
    assert all(torch.equal(empty[name], tensor) for name, tensor in state.items())


def test_master_weights_are_read_in_their_shapes(directory: JobDirectory) -> None:
    state = make_state()
    parameters = read_parameters(whole(directory, commit_checkpoint(directory, 1, 1, 3, state)))
    assert {name: tuple(tensor.shape) for name, tensor in parameters.items()} == SHAPES
    assert all(torch.equal(tensor.flatten(), state[f"{name}/fp32"]) for name, tensor in parameters.items())


def test_the_safetensors_library_reads_a_ranks_file(directory: JobDirectory) -> None:
    state = make_state()
    checkpoint = whole(directory, commit_checkpoint(directory, 1, 1, 2, state))
    with safe_open(checkpoint.path / "rank-00001.safetensors", framework="pt") as file:
        read = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    assert len(read) == 2 * len(STATES)
    assert torch.equal(read["layer.weight|17|exp_avg"], state["layer.weight/exp_avg"][17:])


def test_each_tensor_is_taken_after_the_previous_one_was_written(directory: JobDirectory) -> None:
    """This makes it possible to write a model that is larger than memory."""
    file, sizes = directory.root / "rank-00000.safetensors", []

    def tensors() -> Iterator[torch.Tensor]:
        for number in range(3):
            sizes.append(file.stat().st_size)
            yield torch.full((100,), float(number))

    write_tensors(directory.root, 0, [("a", 100), ("b", 100), ("c", 100)], tensors())
    header = sizes[0]
    assert sizes == [header, header + 400, header + 800]
    with safe_open(file, framework="pt") as written:
        assert written.get_tensor("c").unique().tolist() == [2.0]


def test_states_in_other_precisions_are_saved_in_fp32(directory: JobDirectory) -> None:
    half = {each: torch.arange(4, dtype=torch.bfloat16) for each in STATES}
    write_fragments(directory.root, 0, [Fragment("p", 0, half)])
    with safe_open(directory.root / "rank-00000.safetensors", framework="pt") as file:
        assert file.get_tensor("p|0|fp32").tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_flipped_bit_is_found_anywhere_in_a_file(directory: JobDirectory) -> None:
    checkpoint = whole(directory, commit_checkpoint(directory, 1, 1, 2))
    file = checkpoint.path / "rank-00001.safetensors"
    content = file.read_bytes()
    for position in range(0, len(content), 37):
        file.write_bytes(content[:position] + bytes([content[position] ^ 4]) + content[position + 1 :])
        with pytest.raises(
            CorruptCheckpointError, match=r"rank-00001\.safetensors has checksum \w+, its manifest records"
        ):
            verify(checkpoint)
        verify(checkpoint, checkpoint.manifest.files[:1])
    file.write_bytes(content)
    verify(checkpoint)


def test_a_missing_or_unreadable_file_is_corrupt(directory: JobDirectory) -> None:
    checkpoint = whole(directory, commit_checkpoint(directory, 1, 1, 2))
    file = checkpoint.path / "rank-00001.safetensors"
    os.truncate(file, 5)
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        CheckpointReader(checkpoint)
    file.unlink()
    with pytest.raises(CorruptCheckpointError, match="cannot be read"):
        verify(checkpoint)


def test_fragments_that_no_file_holds_are_an_error(directory: JobDirectory) -> None:
    checkpoint = whole(directory, commit_checkpoint(directory, 1, 1, 2))
    (first, second) = checkpoint.manifest.files
    shutil.copyfile(checkpoint.path / first.name, checkpoint.path / second.name)
    with pytest.raises(CorruptCheckpointError, match=r"of 35 elements of layer\.weight \(fp32\) from 0 are in no file"):
        read_parameters(checkpoint)


def test_a_kill_before_any_file_leaves_a_torn_checkpoint(directory: JobDirectory) -> None:
    """Removes the files in the reverse order of writing; the manifest was written last."""
    name = commit_checkpoint(directory, 1, 1, 2)
    folder = directory.checkpoints / str(name)
    # Files of one tick of the kernel's clock have the same time.
    written = sorted(folder.iterdir(), key=lambda path: (path.stat().st_mtime_ns, path.name == MANIFEST))
    assert written[-1].name == MANIFEST
    for path in reversed(written):
        path.unlink()
        found = open_checkpoint(folder)
        assert isinstance(found, UnusableCheckpoint)
        assert found.reason == "it was never committed (no manifest)"


def test_the_manifest_waits_for_every_rank(directory: JobDirectory) -> None:
    name, state = CheckpointName(1, 1), make_state()
    folder = directory.checkpoints / str(name)
    write_fragments(folder, 0, fragments_of_rank(state, 2, 0))
    rank_0 = threading.Thread(
        target=commit, args=(directory, name, 2, lambda entries: make_manifest(name, entries)), daemon=True
    )
    rank_0.start()
    rank_0.join(timeout=0.1)
    assert rank_0.is_alive()
    assert isinstance(open_checkpoint(folder), UnusableCheckpoint)
    write_fragments(folder, 1, fragments_of_rank(state, 2, 1))
    rank_0.join(timeout=60)
    verify(whole(directory, name))


def test_a_file_that_is_written_again_is_not_complete_meanwhile(directory: JobDirectory) -> None:
    """The first try may have failed after its `.ok` file, and rank 0 may wait for it."""
    ok = directory.root / rank_ok(0)

    def tensors() -> Iterator[torch.Tensor]:
        assert not ok.exists()
        yield torch.zeros(3)

    for _ in range(2):
        write_tensors(directory.root, 0, [("a", 3)], tensors())
        assert ok.exists()


def test_opening_a_checkpoint_checks_file_sizes(directory: JobDirectory) -> None:
    name = commit_checkpoint(directory, 1, 1)
    checkpoint = whole(directory, name)
    file = checkpoint.path / "rank-00000.safetensors"
    assert checkpoint.bytes == file.stat().st_size
    os.truncate(file, 100)
    found = open_checkpoint(checkpoint.path)
    assert isinstance(found, UnusableCheckpoint)
    assert found.reason == f"rank-00000.safetensors has 100 bytes, its manifest records {checkpoint.bytes}"


def test_a_manifest_survives_json() -> None:
    manifest = make_manifest(CheckpointName(3, 1), (FileEntry("rank-00000.safetensors", 10, "ab"),))
    assert Manifest.from_json(json.loads(json.dumps(manifest.to_json()))) == manifest


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ({}, "manifest of format None"),
        ({"format": 2}, "manifest of format 2, this version reads format 1"),
        ({"format": 1}, "not a manifest"),
        ({"format": 1, "files": [{"path": ""}], "parameters": {}}, "not a manifest"),
    ],
)
def test_an_invalid_manifest_is_refused(value: dict[str, object], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Manifest.from_json(value)


def test_names_sort_by_step_and_parse_back() -> None:
    name = CheckpointName(120, 7)
    assert str(name) == "step-00000120.gen-7"
    assert CheckpointName.parse(str(name)) == name
    assert sorted([CheckpointName(9, 2), CheckpointName(10, 1), CheckpointName(9, 10)])[-1] == CheckpointName(10, 1)
    with pytest.raises(ValueError, match=r"'step-1\.gen-1' is not the name of a checkpoint"):
        CheckpointName.parse("step-1.gen-1")


def test_other_folders_are_ignored(directory: JobDirectory) -> None:
    assert names(directory) == []
    commit_checkpoint(directory, 1, 1)
    (directory.checkpoints / "lost+found").mkdir()
    assert names(directory) == ["step-00000001.gen-1"]


def test_pruning_keeps_the_newest_and_multiples_of_keep_every_steps(directory: JobDirectory) -> None:
    claim(directory, None)
    for step in (5, 10, 15, 20, 25):
        commit_checkpoint(directory, step, 1)
    assert prune(directory, 1, keep=2, keep_every_steps=10) == ["step-00000005.gen-1", "step-00000015.gen-1"]
    assert names(directory) == [f"step-{step:08d}.gen-1" for step in (10, 20, 25)]
    assert prune(directory, 1, keep=1) == [f"step-{step:08d}.gen-1" for step in (10, 20)]


def test_nothing_is_pruned_before_the_generations_own_first_commit(directory: JobDirectory) -> None:
    claim(directory, None)
    for step in (5, 10, 15):
        commit_checkpoint(directory, step, 1)
    claim(directory, CheckpointName(15, 1))
    folder = directory.checkpoints / str(CheckpointName(20, 2))
    write_fragments(folder, 0, fragments_of_rank(make_state(), 1, 0))
    assert prune(directory, 2, keep=1) == []
    assert len(names(directory)) == 4


def test_pruning_deletes_superseded_and_unfinished_checkpoints(directory: JobDirectory) -> None:
    claim(directory, None)
    restored = commit_checkpoint(directory, 10, 1)
    commit_checkpoint(directory, 20, 1)
    (directory.checkpoints / "step-00000030.gen-1").mkdir()
    claim(directory, restored)
    commit_checkpoint(directory, 15, 2)
    assert prune(directory, 2, keep=2) == ["step-00000020.gen-1", "step-00000030.gen-1"]
    assert names(directory) == ["step-00000010.gen-1", "step-00000015.gen-2"]


def test_pruning_keeps_what_ranks_have_begun_after_the_commit(directory: JobDirectory) -> None:
    claim(directory, None)
    for step in (10, 20):
        commit_checkpoint(directory, step, 1)
    begun = directory.checkpoints / str(CheckpointName(30, 1))
    write_fragments(begun, 1, fragments_of_rank(make_state(), 2, 1))
    assert prune(directory, 1, keep=1) == ["step-00000010.gen-1"]
    assert (begun / rank_ok(1)).exists()


def test_a_superseded_generation_deletes_nothing(directory: JobDirectory) -> None:
    """The driver withdraws its claim if it finds step 20, so neither may be deleted."""
    claim(directory, None)
    restored = commit_checkpoint(directory, 10, 1)
    claim(directory, restored)
    commit_checkpoint(directory, 20, 1)
    assert prune(directory, 1, keep=1) == []
    assert names(directory) == ["step-00000010.gen-1", "step-00000020.gen-1"]
