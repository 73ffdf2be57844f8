"""LoRA: what is trained and frozen, what a checkpoint holds, and what is exported."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName, open_checkpoint
from spotune_trainer.checkpoint.reader import read_parameters
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.lora import attach_adapter
from spotune_trainer.models.pretrained import build_model, load_exported
from tests.trainer.support.groups import run_group
from tests.trainer.support.layout_matrix import Cell, Matrix
from tests.trainer.support.layouts import DTYPES, wrap
from tests.trainer.support.layouts import Layout as EngineLayout
from tests.trainer.support.layouts import build_model as build_small_model
from tests.trainer.support.runs import STEPS, Layout, Runs, losses, sample_hashes, train_generation
from tests.trainer.support.tiny import make_job

pytestmark = pytest.mark.slow

LORA = {"lora": {"r": 4, "alpha": 12, "dropout": 0.1}}
AUTO: dict[str, Any] = {"causal": AutoModelForCausalLM, "seq2seq": AutoModelForSeq2SeqLM}


def pretrained(runs: Runs, task: str, dtype: str = "float32", **sections: Any) -> FinetuneJob:
    """A job that trains an adapter for the weights in a folder."""
    job = runs.job(task, adapter=LORA)
    source = Path(job.spec.model.source)
    if not (source / "model.safetensors").exists():
        build_model(job).save_pretrained(source)
    return runs.job(task, dtype, model={"initialise": "pretrained"}, adapter=LORA, **sections)


def trained(run: JobDirectory) -> dict[str, torch.Tensor]:
    """The matrices in the last checkpoint of a run, fp32."""
    name = CheckpointName(STEPS, max(CheckpointName.parse(path.name).generation for path in run.checkpoints.iterdir()))
    checkpoint = open_checkpoint(run.checkpoints / str(name))
    assert isinstance(checkpoint, Checkpoint)
    return {name: value.clone() for name, value in read_parameters(checkpoint).items()}


def logits(model: PreTrainedModel) -> torch.Tensor:
    """[batch, sequence, vocabulary] of some tokens."""
    tokens = torch.arange(3, 27).view(2, 12)
    labels = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=tokens, **labels).logits
    return found


def test_adapter_training_is_equal_at_every_layout(runs: Runs) -> None:
    job = pretrained(runs, "causal")
    found = []
    for layout in (Layout(1, 0), Layout(3, 2), Layout(2, 3)):
        run = runs.empty("adapter")
        train_generation(run, job, layout)
        found.append(run)
    for run in found[1:]:
        assert sample_hashes(run) == sample_hashes(found[0])
        assert losses(run) == pytest.approx(losses(found[0]), rel=1e-6)
    matrices = trained(found[0])
    assert {name.split(".")[-3] for name in matrices} == {"lora_A", "lora_B"}
    assert all(bool(value.any()) for value in matrices.values())


def test_resuming_an_adapter_is_bit_for_bit_exact(runs: Runs) -> None:
    """The frozen weights are not in the checkpoint: they are loaded from the source again."""
    job = pretrained(runs, "causal", dtype="bfloat16")
    undisturbed, resumed = runs.empty("undisturbed"), runs.empty("resumed")
    layout = Layout(2, 1)
    train_generation(undisturbed, job, layout)
    train_generation(resumed, job, layout)
    disturbed = runs.interrupted(resumed, 5)
    train_generation(disturbed, job, layout)
    assert losses(disturbed) == losses(undisturbed)
    for name, value in trained(undisturbed).items():
        assert torch.equal(trained(disturbed)[name], value), name
    exports = [load_file(run.export / "model.safetensors") for run in (undisturbed, disturbed)]
    assert all(torch.equal(exports[0][name], exports[1][name]) for name in exports[0])


@pytest.mark.parametrize(("task", "dtype"), [("causal", "bfloat16"), ("seq2seq", "float32")])
def test_a_merged_export_is_the_source_plus_the_product_of_the_matrices(runs: Runs, task: str, dtype: str) -> None:
    job, run = pretrained(runs, task, dtype), runs.empty("merged")
    train_generation(run, job, Layout(1, 0))
    base, matrices = dict(build_model(job).named_parameters()), trained(run)
    model = AUTO[task].from_pretrained(run.export, dtype="auto")
    assert model.dtype == DTYPES[dtype]
    adapted = {name.split(".lora_")[0] for name in matrices}
    for name, parameter in model.named_parameters():
        module = name.removesuffix(".weight")
        if module in adapted:
            a, b = (matrices[f"{module}.lora_{side}.default.weight"] for side in "AB")
            product = 12 / 4 * b @ a  # in float32, rounded once
            merged = (base[name].float() + product).to(parameter.dtype)
            torch.testing.assert_close(parameter, merged, rtol=1e-6, atol=1e-6)
            assert not torch.equal(parameter, base[name])
        else:
            assert torch.equal(parameter, base[name]), name


@pytest.mark.parametrize("task", ["causal", "seq2seq"])
def test_an_adapter_exported_alone_gives_the_logits_of_the_merged_model(runs: Runs, task: str) -> None:
    merged, alone = runs.empty("merged"), runs.empty("alone")
    train_generation(merged, pretrained(runs, task), Layout(1, 0))
    train_generation(alone, pretrained(runs, task, output={"mergeAdapter": False}), Layout(1, 0))
    assert not (alone.export / "model.safetensors").exists()
    weights = load_file(alone.export / "adapter_model.safetensors")
    assert sum(value.numel() for value in weights.values()) == sum(value.numel() for value in trained(alone).values())
    found = [load_exported(run.export, task)[0] for run in (merged, alone)]
    torch.testing.assert_close(logits(found[1]), logits(found[0]), rtol=1e-4, atol=1e-5)


def test_only_the_named_modules_are_adapted(runs: Runs) -> None:
    job = runs.job("causal", adapter={"lora": {"r": 2, "targetModules": ["q_proj", "v_proj"]}})
    model = attach_adapter(build_model(job), job)
    places = [name for name, place in model.named_parameters() if place.requires_grad]
    adapted = {name.split(".lora_")[0].split(".")[-1] for name in places}
    assert adapted == {"q_proj", "v_proj"}


def test_target_modules_that_the_model_lacks_are_refused(runs: Runs) -> None:
    job = runs.job("causal", adapter={"lora": {"targetModules": ["query"]}})
    with pytest.raises(JobError, match=r"^adapter\.lora\.targetModules: \['query'\] does not fit model\.source"):
        attach_adapter(build_model(job), job)


LAYOUTS = [EngineLayout(stage, world_size, "float32") for stage in range(4) for world_size in (1, 3)]


def adapted_engine(layout: EngineLayout) -> Any:
    job = make_job("/model", "causal", adapter={"lora": {"r": 2}})
    return wrap(attach_adapter(build_small_model(DTYPES[layout.dtype], frozen=()), job), layout)


def matrix(rank: int, _: int, root: Path) -> list[Cell]:
    found = Matrix(root, LAYOUTS, adapted_engine)
    found.run(rank)
    return found.cells


def test_an_adapter_checkpoint_of_any_layout_restores_bit_for_bit_into_any_other(tmp_path: Path) -> None:
    cells = [cell for of_rank in run_group(3, matrix, tmp_path, timeout=200) for cell in of_rank]
    assert len({(cell.wrote, cell.reads) for cell in cells}) == len(LAYOUTS) ** 2
    assert [cell for cell in cells if cell.differing or cell.bytes_read != cell.bytes_needed] == []
