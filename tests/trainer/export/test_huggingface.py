"""The exported directory: transformers loads it, the model card describes it, and a kill does not damage it."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer, GenerationConfig, PreTrainedModel

from spotune.errors import JobError, SupersededError
from spotune.job import FinetuneJob
from spotune.prompting.export_manifest import ExportManifest
from spotune_trainer.data.batches import Task
from spotune_trainer.export import huggingface as export_module
from spotune_trainer.export.huggingface import export_model, weights_sha256
from spotune_trainer.models.pretrained import build_model
from tests.trainer.support.tiny import make_job, save_source

TASKS: list[Task] = ["seq2seq", "causal"]
FIGURES = {"steps": 1200, "evalLoss": 0.123456, "executionAccuracy": 0.875, "mfu": None, "wallSeconds": 61.4}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[Task, Path]:
    return {task: save_source(tmp_path_factory.mktemp(task), task) for task in TASKS}


def trained(job: FinetuneJob, seed: int = 0) -> dict[str, Tensor]:
    """Parameters as in a checkpoint: fp32, tied parameters once."""
    generator = torch.Generator().manual_seed(seed)
    shapes = {name: parameter.shape for name, parameter in build_model(job).named_parameters()}
    return {name: torch.randn(shape, generator=generator) * 0.1 for name, shape in shapes.items()}


def reload(directory: Path, task: Task) -> PreTrainedModel:
    auto: Any = AutoModelForSeq2SeqLM if task == "seq2seq" else AutoModelForCausalLM
    model, report = auto.from_pretrained(directory, output_loading_info=True, dtype="auto")
    assert not any(report.values())
    assert isinstance(model, PreTrainedModel)
    return model


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_the_trained_values(tmp_path: Path, task: Task, dtype: str, tied: bool) -> None:
    source = save_source(tmp_path / "source", task, tie_word_embeddings=tied)
    model = {"source": str(source), "task": task, "dtype": dtype, "initialise": "random"}
    job = make_job(source, task, model=model)
    parameters = trained(job)
    export_model(parameters, job, tmp_path / "export", FIGURES)
    loaded = reload(tmp_path / "export", task)
    precision = getattr(torch, dtype)
    assert loaded.dtype == precision
    assert dict(loaded.named_parameters()).keys() == parameters.keys()
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, parameters[name].to(precision)), name
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "export")
    assert tokenizer.decode(tokenizer("how many")["input_ids"]) == "how many</s>"


def test_the_same_parameters_give_the_same_bytes(sources: dict[Task, Path], tmp_path: Path) -> None:
    job = make_job(sources["seq2seq"])
    first = export_model(trained(job), job, tmp_path / "a", FIGURES)
    again = export_model(dict(reversed(trained(job).items())), job, tmp_path / "b", {"steps": 7, "wallSeconds": 99.0})
    other = export_model(trained(job, seed=1), job, tmp_path / "c", FIGURES)
    assert first == again != other
    assert first == hashlib.sha256((tmp_path / "a" / "model.safetensors").read_bytes()).hexdigest()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "spotune.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes(), name


def test_a_large_model_is_split_into_files_with_an_index(sources: dict[Task, Path], tmp_path: Path) -> None:
    job = make_job(sources["causal"], "causal")
    parameters = trained(job)
    sha256 = export_model(parameters, job, tmp_path / "export", FIGURES, max_shard_size="10KB")
    weights = sorted((tmp_path / "export").glob("*.safetensors"))
    assert len(weights) > 2
    assert (tmp_path / "export" / "model.safetensors.index.json").is_file()
    assert sha256 == hashlib.sha256(b"".join(path.read_bytes() for path in weights)).hexdigest()
    assert sha256 == weights_sha256(tmp_path / "export")
    for name, parameter in reload(tmp_path / "export", "causal").named_parameters():
        assert torch.equal(parameter, parameters[name])


def test_untrained_parameters_keep_the_values_of_the_source(sources: dict[Task, Path], tmp_path: Path) -> None:
    job = make_job(sources["causal"], "causal")
    parameters = {name: value for name, value in trained(job).items() if "layers.1" in name}
    export_model(parameters, job, tmp_path / "export", FIGURES)
    initial = build_model(job)
    for name, parameter in reload(tmp_path / "export", "causal").named_parameters():
        assert torch.equal(parameter, parameters.get(name, initial.get_parameter(name)))


def test_generation_stops_at_the_eos_of_the_tokenizer(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "seq2seq", eos_token_id=42)
    job = make_job(source)
    export_model(trained(job), job, tmp_path / "export", FIGURES)
    config = GenerationConfig.from_pretrained(tmp_path / "export")
    assert (config.eos_token_id, config.pad_token_id, config.decoder_start_token_id) == (1, 0, 0)


def test_a_pretrained_model_keeps_its_own_eos_tokens(sources: dict[Task, Path], tmp_path: Path) -> None:
    model = build_model(make_job(sources["causal"], "causal"))
    model.generation_config.eos_token_id = [7, 9]
    shutil.copytree(sources["causal"], tmp_path / "source")
    model.save_pretrained(tmp_path / "source")
    section = {"source": str(tmp_path / "source"), "task": "causal", "dtype": "float32", "initialise": "pretrained"}
    job = make_job(tmp_path / "source", "causal", model=section)
    export_model(trained(job), job, tmp_path / "export", FIGURES)
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == [1, 7, 9]


def test_an_invalid_generation_configuration_does_not_prevent_the_export(
    sources: dict[Task, Path], tmp_path: Path
) -> None:
    shutil.copytree(sources["causal"], tmp_path / "source")
    build_model(make_job(sources["causal"], "causal")).save_pretrained(tmp_path / "source")
    contradiction = {"do_sample": False, "temperature": 0.6, "eos_token_id": 7}
    (tmp_path / "source" / "generation_config.json").write_text(json.dumps(contradiction))
    section = {"source": str(tmp_path / "source"), "task": "causal", "dtype": "float32", "initialise": "pretrained"}
    job = make_job(tmp_path / "source", "causal", model=section)
    parameters = trained(job)
    parameters.pop("model.norm.weight")
    export_model(parameters, job, tmp_path / "export", FIGURES)
    assert GenerationConfig.from_pretrained(tmp_path / "export").eos_token_id == [1, 7]


def test_the_model_card_has_results_and_settings(sources: dict[Task, Path], tmp_path: Path) -> None:
    job = make_job(sources["seq2seq"])
    sha256 = export_model(trained(job), job, tmp_path / "export", FIGURES)
    _, front, text = (tmp_path / "export" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front) == {
        "library_name": "transformers",
        "pipeline_tag": "text2text-generation",
        "tags": ["spotune"],
    }
    for line in (
        "# tiny",
        "| Evaluation loss | 0.1235 |",
        "| Execution accuracy | 87.5% |",
        "| Optimizer steps | 1,200 |",
        "| Wall-clock time | 61 s |",
        f"| SHA-256 of the weights | `{sha256}` |",
        "| Global batch size | 32 samples |",
        "| Learning rate | 5e-05, linear |",
        "Trained from scratch (encoder-decoder model). Trained with spotune",
    ):
        assert line in text
    assert "utilisation" not in text


def test_a_failing_export_leaves_the_old_one(
    sources: dict[Task, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = make_job(sources["seq2seq"])
    old = export_model(trained(job), job, tmp_path / "export", FIGURES)

    def fail(directory: Path, heartbeat: Callable[[], None]) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_module, "weights_sha256", fail)
    with pytest.raises(OSError, match="No space left"):
        export_model(trained(job, seed=1), job, tmp_path / "export", FIGURES)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert weights_sha256(tmp_path / "export") == old


def test_an_export_reports_each_tensor_and_each_file(
    sources: dict[Task, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`save_pretrained` reports nothing: the export reports that files grow."""
    job = make_job(sources["seq2seq"])
    beats, beat, save = count(), Event(), PreTrainedModel.save_pretrained
    before_saving = after_saving = 0

    def heartbeat() -> None:
        next(beats)
        beat.set()

    def save_slowly(model: PreTrainedModel, directory: str, **options: Any) -> None:
        nonlocal before_saving, after_saving
        before_saving = next(beats)
        for size in (1, 2):
            beat.clear()
            (Path(directory) / "part").write_bytes(bytes(size))
            assert beat.wait(30), "no heartbeat although a file has grown"
        (Path(directory) / "part").unlink()
        save(model, directory, **options)
        after_saving = next(beats)

    monkeypatch.setattr(PreTrainedModel, "save_pretrained", save_slowly)
    parameters = trained(job)
    export_model(parameters, job, tmp_path / "export", FIGURES, heartbeat=heartbeat)
    assert before_saving >= len(parameters)
    saved = len(list((tmp_path / "export").iterdir()))
    assert next(beats) - after_saving > saved, "each file that is made durable, and the hash"


def test_an_export_replaces_the_old_one_and_leftovers_of_a_kill(sources: dict[Task, Path], tmp_path: Path) -> None:
    job = make_job(sources["seq2seq"])
    export_model(trained(job), job, tmp_path / "export", FIGURES)
    (tmp_path / "export" / "stale").touch()
    killed = tmp_path / ".export.0123abcd"
    killed.mkdir()
    (killed / "model.safetensors").write_bytes(b"half")
    new = export_model(trained(job, seed=1), job, tmp_path / "export", FIGURES)
    assert [path.name for path in tmp_path.iterdir()] == ["export"]
    assert weights_sha256(tmp_path / "export") == new
    assert not (tmp_path / "export" / "stale").exists()


def export_step(job: FinetuneJob, folder: Path, step: int) -> str:
    """Export weights that depend on the step, as the trainer does; returns their SHA-256."""
    return export_model(trained(job, seed=step), job, folder / "export", FIGURES, step=step, keep_previous=True)


def exports(folder: Path) -> dict[str, tuple[int | None, str]]:
    """Step and SHA-256 of every folder, by name."""
    return {path.name: (ExportManifest.read(path).step, weights_sha256(path)) for path in folder.iterdir()}


def test_the_export_before_the_newest_is_kept_with_its_weights(sources: dict[Task, Path], tmp_path: Path) -> None:
    job = make_job(sources["seq2seq"])
    first, second = (export_step(job, tmp_path, step) for step in (1, 2))
    assert exports(tmp_path) == {"export": (2, second), "previous-export-step-1": (1, first)}
    third = export_step(job, tmp_path, 3)
    assert exports(tmp_path) == {"export": (3, third), "previous-export-step-2": (2, second)}


def test_a_repeated_export_of_the_same_step_keeps_the_export_of_the_step_before(
    sources: dict[Task, Path], tmp_path: Path
) -> None:
    job = make_job(sources["seq2seq"])
    first, second = (export_step(job, tmp_path, step) for step in (1, 2))
    assert export_step(job, tmp_path, 2) == second
    assert exports(tmp_path) == {"export": (2, second), "previous-export-step-1": (1, first)}


def test_an_export_killed_between_its_renames_is_completed_by_the_next_attempt(
    sources: dict[Task, Path], tmp_path: Path
) -> None:
    job = make_job(sources["seq2seq"])
    first = export_step(job, tmp_path, 1)
    (tmp_path / "export").rename(tmp_path / "previous-export-step-1")
    second = export_step(job, tmp_path, 2)
    assert exports(tmp_path) == {"export": (2, second), "previous-export-step-1": (1, first)}


def test_a_superseded_export_changes_nothing(sources: dict[Task, Path], tmp_path: Path) -> None:
    job = make_job(sources["seq2seq"])
    first = export_step(job, tmp_path, 1)

    def superseded() -> None:
        raise SupersededError("generation 8 has started")

    with pytest.raises(SupersededError):
        export_model(
            trained(job), job, tmp_path / "export", FIGURES, step=2, keep_previous=True, before_replacing=superseded
        )
    assert exports(tmp_path) == {"export": (1, first)}


def test_exports_that_users_made_of_checkpoints_are_not_deleted(sources: dict[Task, Path], tmp_path: Path) -> None:
    job = make_job(sources["seq2seq"])
    export_model(trained(job), job, tmp_path / "export-step-00000001", FIGURES, step=1)
    for step in (2, 3, 4):
        export_step(job, tmp_path, step)
    assert exports(tmp_path).keys() == {"export", "previous-export-step-3", "export-step-00000001"}


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("decoder.nowhere.weight", [4], r"'decoder.nowhere.weight' \(1 in all\) is not in model.source"),
        (
            "shared.weight",
            [4, 16],
            r"'shared.weight' was trained with shape \[4, 16\], but has \[384, 16\] in model.source",
        ),
    ],
)
def test_parameters_of_another_model_are_rejected(
    sources: dict[Task, Path], tmp_path: Path, name: str, shape: list[int], message: str
) -> None:
    job = make_job(sources["seq2seq"])
    with pytest.raises(JobError, match=message):
        export_model({**trained(job), name: torch.zeros(shape)}, job, tmp_path / "export", FIGURES)
    assert not list(tmp_path.iterdir())


def test_the_manifest_has_the_settings_for_predict(sources: dict[Task, Path], tmp_path: Path) -> None:
    dataset = {"train": {"source": "/shards"}, "prompt": "{schema}: {question}", "completion": "{sql}", "maxLength": 96}
    job = make_job(sources["seq2seq"], dataset=dataset)
    export_model(trained(job), job, tmp_path / "export", FIGURES)
    expected = ExportManifest("tiny", "seq2seq", "{schema}: {question}", "", 96, 128)
    assert ExportManifest.read(tmp_path / "export") == expected


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "is not a model exported by spotune"), ("{", "damaged"), ('{"task": "seq2seq"}', "of another version")],
)
def test_a_folder_without_a_valid_manifest_is_rejected(tmp_path: Path, content: str | None, message: str) -> None:
    if content:
        (tmp_path / "spotune.json").write_text(content)
    with pytest.raises(JobError, match=message):
        ExportManifest.read(tmp_path)


def test_the_hash_depends_only_on_the_weights(sources: dict[Task, Path], tmp_path: Path) -> None:
    job = make_job(sources["seq2seq"])
    export_model(trained(job), job, tmp_path / "export", FIGURES)
    assert set(load_file(tmp_path / "export" / "model.safetensors")) == set(trained(job))
