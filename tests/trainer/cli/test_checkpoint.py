"""`spotune checkpoint`: list, verify, export and convert the checkpoints of a run."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForSeq2SeqLM

from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.checkpoint.catalogue import list_entries
from spotune_trainer.checkpoint.evaluations import Evaluation
from spotune_trainer.checkpoint.fragment import STATES, Fragment
from spotune_trainer.checkpoint.generations import claim
from spotune_trainer.checkpoint.layout import CheckpointName, FileEntry, Manifest
from spotune_trainer.checkpoint.reader import read_parameters
from spotune_trainer.checkpoint.writer import commit, write_fragments
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.pretrained import build_model
from tests.command_line import run_spotune
from tests.trainer.support.tiny import make_job, save_source

WORLD_SIZE = 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("source"), "seq2seq", num_layers=1)


@pytest.fixture
def run(tmp_path: Path, source: Path) -> JobDirectory:
    """A run of generation 1 with commits after 10 and 20 steps."""
    directory = JobDirectory(tmp_path / "run")
    directory.root.mkdir()
    job = make_job(source)
    files.write_json(directory.job, job.model_dump(mode="json"))
    claim(directory, None)
    for step in (10, 20):
        save(directory, job, CheckpointName(step, 1))
    return directory


def masters(job: FinetuneJob, step: int) -> dict[str, Tensor]:
    return {name: parameter.detach() + step for name, parameter in build_model(job).named_parameters()}


def save(
    directory: JobDirectory,
    job: FinetuneJob,
    name: CheckpointName,
    evaluations: tuple[Evaluation, ...] = (),
    state_names: tuple[str, ...] = STATES,
) -> None:
    """Commit the job's initial parameters plus the step, each split between two ranks. All other states are zero."""
    parameters = masters(job, name.step)
    for rank in range(WORLD_SIZE):
        fragments = []
        for parameter, value in parameters.items():
            half = value.numel() // 2
            part = value.flatten()[:half] if rank == 0 else value.flatten()[half:]
            states = {state: part if state == "fp32" else torch.zeros_like(part) for state in state_names}
            fragments.append(Fragment(parameter, 0 if rank == 0 else half, states))
        write_fragments(directory.checkpoints / str(name), rank, fragments)

    def manifest(entries: tuple[FileEntry, ...]) -> Manifest:
        shapes = {parameter: tuple(value.shape) for parameter, value in parameters.items()}
        manifest = Manifest(name.step, name.generation, name.step, "f" * 8, 1, WORLD_SIZE, 2, 1.8e9, entries, shapes)
        return replace(manifest, evaluations=evaluations)

    commit(directory, name, WORLD_SIZE, manifest)


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    return run_spotune(capsys, "checkpoint", *arguments)


def states(out: str) -> dict[str, str]:
    return {entry["name"]: entry["state"] for entry in json.loads(out)["checkpoints"]}


def rank_file(run: JobDirectory, step: int) -> Path:
    return run.checkpoints / f"step-{step:08d}.gen-1" / "rank-00001.safetensors"


def flip_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def test_checkpoints_are_listed_with_their_metadata(run: JobDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "ls", run.root, "--output", "json")
    assert code == 0
    size = sum(path.stat().st_size for path in (run.checkpoints / "step-00000010.gen-1").glob("*.safetensors"))
    first: dict[str, Any] = json.loads(out)["checkpoints"][0]
    assert first == {
        "name": "step-00000010.gen-1",
        "step": 10,
        "generation": 1,
        "state": "whole",
        "reason": "",
        "best": False,
        "time": 1.8e9,
        "worldSize": 2,
        "zeroStage": 2,
        "bytes": size,
    }
    code, out, _ = call(capsys, "ls", run.root)
    assert code == 0
    lines = out.splitlines()
    assert lines[0].split() == ["step", "generation", "committed", "workers", "ZeRO", "size", "state"]
    assert [line.split()[0] for line in lines[1:]] == ["10", "20"]
    assert lines[1].split()[-1] == "whole"


def test_the_checkpoint_of_the_best_evaluation_is_marked(
    run: JobDirectory, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluation = {"everySteps": 10, "best": {"metric": "loss"}}
    job = make_job(source, training={"epochs": 1, "evaluation": evaluation})
    files.write_json(run.job, job.model_dump(mode="json"))
    history = tuple(Evaluation(step, 40, loss) for step, loss in ((10, 3.0), (20, 3.5)))
    save(run, job, CheckpointName(25, 1), history)
    assert marked(capsys, run) == [10]
    save(run, job, CheckpointName(30, 1), (*history, Evaluation(25, 40, 2.0)))
    assert marked(capsys, run) == [25]
    code, out, _ = call(capsys, "ls", run.root)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines() if "whole, best" in line] == ["25"]
    files.write_json(run.result, {"best": {"step": 30, "metric": "loss", "value": 1.0}})
    assert marked(capsys, run) == [30], "the evaluation after the last step is in no checkpoint"


def marked(capsys: pytest.CaptureFixture[str], run: JobDirectory) -> list[int]:
    """Steps of the checkpoints that are marked as the best."""
    code, out, _ = call(capsys, "ls", run.root, "--output", "json")
    assert code == 0
    return [entry["step"] for entry in json.loads(out)["checkpoints"] if entry["best"]]


def test_listing_a_run_without_checkpoints_succeeds(run: JobDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    for folder in run.checkpoints.iterdir():
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
    assert call(capsys, "ls", run.root)[:2] == (0, "no checkpoints yet\n")
    code, _, err = call(capsys, "export", run.root)
    assert (code, err) == (2, "there is no whole checkpoint yet. Steps with a whole checkpoint: none.\n")
    assert call(capsys, "verify", run.root)[0] == 2


def test_folders_are_listed_with_their_state(
    run: JobDirectory, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    claim(run, CheckpointName(10, 1))  # passes over step 20 of generation 1
    save(run, make_job(source), CheckpointName(30, 2))
    save(run, make_job(source), CheckpointName(40, 2))
    (run.checkpoints / "step-00000040.gen-2" / "manifest.json").write_text("{}")
    write_fragments(run.checkpoints / "step-00000050.gen-2", 0, [])
    code, out, _ = call(capsys, "ls", run.root, "--output", "json")
    assert code == 0
    assert states(out) == {
        "step-00000010.gen-1": "whole",
        "step-00000020.gen-1": "superseded",
        "step-00000030.gen-2": "whole",
        "step-00000040.gen-2": "damaged",
        "step-00000050.gen-2": "unfinished",
    }


def test_whole_checkpoints_pass_verification(run: JobDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    (run.checkpoints / "step-00000030.gen-1").mkdir()  # being written, or left by a kill
    code, out, err = call(capsys, "verify", run.root, "--output", "json")
    assert (code, err) == (0, "")
    assert list(states(out).values()) == ["whole", "whole", "unfinished"]


@pytest.mark.parametrize("damage", ["bit", "cut", "missing"])
def test_damage_is_found_and_named(run: JobDirectory, capsys: pytest.CaptureFixture[str], damage: str) -> None:
    path = rank_file(run, 20)
    if damage == "bit":
        flip_bit(path)
    elif damage == "cut":
        path.write_bytes(path.read_bytes()[:-8])
    else:
        path.unlink()
    code, out, err = call(capsys, "verify", run.root)
    assert code == 20
    assert "1 of 2 checkpoints are damaged: step-00000020.gen-1: rank-00001.safetensors" in err
    assert "damaged" in out
    assert call(capsys, "verify", run.root, "--step", 10)[0] == 0
    code, out, err = call(capsys, "verify", run.root, "--step", 20, "--output", "json")
    assert code == 20
    assert states(out) == {"step-00000020.gen-1": "damaged"}
    assert json.loads(err)["exitCode"] == 20


def test_the_newest_checkpoint_is_exported_as_a_model(
    run: JobDirectory, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluated = {"time": 1.0, "event": "evaluated", "step": 20, "loss": 0.5, "exactMatch": 0.25}
    evaluated |= {"scores": {"bleu": 41.25}}
    files.append_json(run.ledger, {**evaluated, "step": 10, "loss": 0.9})
    files.append_json(run.ledger, evaluated)
    code, out, _ = call(capsys, "export", run.root)
    export = run.root / "export-step-00000020"
    assert code == 0
    assert out.startswith(f"step-00000020.gen-1 -> {export}\n")
    expected = masters(make_job(source), 20)
    for name, parameter in AutoModelForSeq2SeqLM.from_pretrained(export).named_parameters():
        assert torch.equal(parameter, expected[name])
    card = (export / "README.md").read_text()
    assert "| Evaluation loss | 0.5000 |" in card
    assert "| Exact match | 25.0% |" in card
    assert "| bleu | 41.25 |" in card
    assert "| Optimizer steps | 20 |" in card


def test_a_chosen_step_is_exported_to_the_given_folder(
    run: JobDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = call(capsys, "export", run.root, "--step", 10, "--to", tmp_path / "model", "--output", "json")
    result = json.loads(out)
    assert code == 0
    assert result["checkpoint"] == "step-00000010.gen-1"
    assert result["export"] == str(tmp_path / "model")
    assert len(result["exportSha256"]) == 64
    assert (tmp_path / "model" / "config.json").is_file()


def test_the_average_of_schedule_free_is_exported(
    run: JobDirectory, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = {"epochs": 1, "optimizer": "schedule_free_adamw", "scheduler": "constant"}
    job = make_job(source, training=training)
    files.write_json(run.job, job.model_dump(mode="json"))
    save(run, job, CheckpointName(30, 1), state_names=("fp32", "z", "exp_avg_sq"))
    assert call(capsys, "export", run.root)[0] == 0
    expected = masters(job, 30)
    for name, parameter in AutoModelForSeq2SeqLM.from_pretrained(run.root / "export-step-00000030").named_parameters():
        assert torch.equal(parameter, torch.lerp(expected[name], torch.zeros(()), 1 - 1 / 0.9))
    code, _, err = call(capsys, "convert", run.root, "--to", run.root / "universal")
    assert code == 20
    assert "has AdamW's moments, but training.optimizer is schedule_free_adamw" in err


def test_the_moving_average_is_exported_on_request(
    run: JobDirectory, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = call(capsys, "export", run.root, "--ema")
    assert code == 2
    assert "--ema needs a run with training.emaDecay" in err
    job = make_job(source, training={"epochs": 1, "emaDecay": 0.9})
    files.write_json(run.job, job.model_dump(mode="json"))
    save(run, job, CheckpointName(30, 1), state_names=(*STATES, "ema"))
    assert call(capsys, "export", run.root, "--ema")[0] == 0
    model = AutoModelForSeq2SeqLM.from_pretrained(run.root / "export-ema-step-00000030")
    assert all(not parameter.any() for parameter in model.parameters())


@pytest.mark.parametrize(
    ("step", "code", "message"),
    [
        (15, 2, "there is no whole checkpoint of step 15. Steps with a whole checkpoint: 10, 20."),
        (10, 20, "checkpoint step-00000010.gen-1 is corrupt: rank-00001.safetensors has checksum"),
    ],
)
def test_an_incomplete_checkpoint_is_not_exported(
    run: JobDirectory, capsys: pytest.CaptureFixture[str], step: int, code: int, message: str
) -> None:
    flip_bit(rank_file(run, 10))
    found, _, err = call(capsys, "export", run.root, "--step", step)
    assert found == code
    assert message in err
    assert not list(run.root.glob("export*"))


def test_a_truncated_checkpoint_is_not_exported(run: JobDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    rank_file(run, 20).unlink()
    code, _, err = call(capsys, "export", run.root, "--step", 20)
    assert code == 20
    damage = "step-00000020.gen-1 is damaged: rank-00001.safetensors is missing"
    assert f"{damage}. Steps with a whole checkpoint: 10." in err


def test_a_checkpoint_is_converted_to_the_universal_format_and_starts_another_run(
    run: JobDirectory, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, job = tmp_path / "universal" / "step-10", tmp_path / "job.yaml"
    # In a process of its own, since DeepSpeed writes to standard output where it is imported.
    spotune = Path(sys.executable).with_name("spotune")
    command: list[str | Path] = [
        spotune,
        "checkpoint",
        "convert",
        run.root,
        "--to",
        folder,
        "--step",
        "10",
        "--output",
        "json",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    written = json.loads(done.stdout)
    assert (written["checkpoint"], written["universal"]) == ("step-00000010.gen-1", str(folder))
    assert "Converting: 100 %" in done.stderr
    shards = tmp_path / "shards"
    shards.mkdir()
    sources = {"train": {"source": str(shards)}, "eval": {"source": str(shards)}}
    content = make_job(source, dataset=sources).model_dump(mode="json", by_alias=True, exclude_unset=True)
    job.write_text(json.dumps(content))
    code, out, _ = call(capsys, "convert", tmp_path / "next", "--from", folder, "--job", job)
    assert code == 0
    assert out.splitlines()[-1] == "spotune run continues after step 10"
    code, out, _ = call(capsys, "verify", tmp_path / "next", "--output", "json")
    assert (code, states(out)) == (0, {"step-00000010.gen-0": "whole"})
    (found,) = list_entries(JobDirectory(tmp_path / "next"))
    assert found.checkpoint is not None
    parameters, expected = read_parameters(found.checkpoint), masters(make_job(source), 10)
    assert parameters.keys() == expected.keys()
    assert all(torch.equal(parameters[name], value) for name, value in expected.items())
    code, _, err = call(capsys, "convert", tmp_path / "next", "--from", folder)
    assert code == 2
    assert "has already started" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ((), "give either --to, a folder to write, or --from, a folder to read."),
        (("--to", "a", "--from", "b"), "give either --to, a folder to write, or --from, a folder to read."),
        (("--from", "b", "--step", 10), "--step selects a checkpoint of this run"),
        (("--to", "a", "--job", "job.yaml"), "--job needs --from"),
        (("--to", "/"), "/ exists: give a new folder, or remove this one."),
        (("--to", "a", "--step", 15), "there is no whole checkpoint of step 15"),
    ],
)
def test_contradictory_conversion_options_are_refused(
    run: JobDirectory, capsys: pytest.CaptureFixture[str], options: tuple[object, ...], message: str
) -> None:
    code, _, err = call(capsys, "convert", run.root, *options)
    assert code == 2
    assert message in err


def test_an_unwritable_output_is_an_infrastructure_error(run: JobDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "convert", run.root, "--to", "/proc/universal")
    assert code == 10
    assert "the conversion failed and wrote nothing: [Errno" in err


def test_a_run_needs_a_job(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = call(capsys, "convert", tmp_path / "next", "--from", tmp_path)
    assert (code, "has no job yet: give its file with --job" in err) == (2, True)
    assert not (tmp_path / "next").exists()


def test_a_damaged_checkpoint_is_not_converted(
    run: JobDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip_bit(rank_file(run, 20))
    code, _, err = call(capsys, "convert", run.root, "--to", tmp_path / "universal")
    assert code == 20
    assert "step-00000020.gen-1 is corrupt" in err
    assert not (tmp_path / "universal").exists()


@pytest.mark.parametrize("command", ["ls", "verify", "export"])
def test_a_directory_that_is_no_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    assert call(capsys, command, tmp_path / "none")[::2] == (2, f"there is no directory {tmp_path}/none.\n")
    code, _, err = call(capsys, command, tmp_path)
    assert code == 2
    assert "is not the directory of a run: there is no job.json in it" in err
