"""Models with a head for labels: which are built, what of them may be new, and outputs that padding does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForMaskedLM

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune_trainer.data.batches import collate
from spotune_trainer.models.heads import head_modules
from spotune_trainer.models.lora import attach_adapter
from spotune_trainer.models.pretrained import build_model, build_on_meta_device, build_uninitialized
from spotune_trainer.models.quantization.nf4 import Linear4bit
from spotune_trainer.objectives.classification import label_logits
from tests.trainer.support.labelled import save_wordpiece_tokenizer
from tests.trainer.support.tiny import make_job

LABELS = ["a", "b", "c"]
SIZES = {
    "vocab_size": 300,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 32,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "eos_token_id": 3,
    "cls_token_id": 2,
    "sep_token_id": 3,
    "max_position_embeddings": 64,
}
MODEL_TYPES = ["bert", "deberta-v2", "distilbert", "electra", "gpt2", "llama", "modernbert", "qwen2", "roberta"]
OBJECTIVES = ["classification", "tokenClassification"]


def save_source(folder: Path, model_type: str, **values: Any) -> Path:
    """Save the configuration of a small model, and a tokenizer."""
    AutoConfig.for_model(model_type, **{**SIZES, **values}).save_pretrained(folder)
    save_wordpiece_tokenizer(folder)
    return folder


def classifier_job(
    source: Path, objective: str = "classification", initialise: str = "random", **sections: Any
) -> FinetuneJob:
    model = {"source": str(source), "dtype": "float32", "initialise": initialise}
    dataset = {"labels": LABELS, "maxLength": 40, **sections.pop("dataset", {})}
    return make_job(source, "causal", model=model, dataset=dataset, training={"objective": objective}, **sections)


@pytest.fixture
def masked_language_model(tmp_path: Path) -> Path:
    """A BERT that predicts masked tokens: it has neither a pooler nor a classifier."""
    source = save_source(tmp_path / "bert", "bert")
    auto: Any = AutoModelForMaskedLM
    auto.from_config(AutoConfig.from_pretrained(source)).save_pretrained(source)
    return source


@pytest.mark.parametrize("objective", OBJECTIVES)
@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_padding_changes_no_output(tmp_path: Path, model_type: str, objective: str) -> None:
    model: Any = build_model(classifier_job(save_source(tmp_path, model_type), objective)).eval()
    texts = [[2, 7, 8, 9, 3], [2, 10, 3], [2, 11, 12, 13, 14, 15, 3]]
    rows = [{"input_ids": np.array(ids), "token_labels": np.zeros(len(ids))} for ids in texts]
    with torch.no_grad():
        found = label_logits(model, collate(rows, "causal", 0, pad_to_multiple_of=16))
        for ids, outputs in zip(texts, found, strict=True):
            alone = model(torch.tensor([ids])).logits[0]
            same = outputs[: len(ids)] if objective == "tokenClassification" else outputs
            torch.testing.assert_close(same, alone, atol=1e-5, rtol=1e-5)
    assert found.shape[-1] == len(LABELS)


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_the_configuration_names_the_labels(tmp_path: Path, objective: str) -> None:
    build_model(classifier_job(save_source(tmp_path, "bert"), objective)).save_pretrained(tmp_path / "saved")
    config = AutoConfig.from_pretrained(tmp_path / "saved")
    assert config.id2label == {0: "a", 1: "b", 2: "c"}
    assert config.label2id == {"a": 0, "b": 1, "c": 2}


def test_a_head_depends_on_the_seed_alone(masked_language_model: Path) -> None:
    job = classifier_job(masked_language_model, initialise="pretrained")
    torch.manual_seed(1)
    first: Any = build_model(job)
    torch.manual_seed(2)
    second: Any = build_model(job)
    states = first.state_dict(), second.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert first.bert.pooler.dense.weight.std() > 0
    auto: Any = AutoModelForMaskedLM
    embeddings = auto.from_pretrained(masked_language_model).bert.embeddings.word_embeddings.weight
    assert torch.equal(first.bert.embeddings.word_embeddings.weight, embeddings)


def test_all_ways_to_build_it_give_the_same_model(masked_language_model: Path) -> None:
    job = classifier_job(masked_language_model, initialise="pretrained")
    models: list[Any] = [build_model(job), build_uninitialized(job), build_on_meta_device(job)]
    shapes = [{name: parameter.shape for name, parameter in model.named_parameters()} for model in models]
    assert shapes[0] == shapes[1] == shapes[2]


def test_other_missing_weights_are_refused(masked_language_model: Path) -> None:
    missing = "bert.encoder.layer.0.output.dense.weight"
    weights = load_file(masked_language_model / "model.safetensors")
    del weights[missing]
    save_file(weights, masked_language_model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobError, match=rf"no weights for '{missing}' of BertForSequenceClassification \(1 missing"):
        build_model(classifier_job(masked_language_model, initialise="pretrained"))


def test_a_head_for_another_number_of_labels_is_refused(tmp_path: Path) -> None:
    source = save_source(tmp_path, "bert")
    build_model(classifier_job(source)).save_pretrained(source)
    build_model(classifier_job(source, initialise="pretrained", dataset={"labels": ["c", "b", "a"]}))
    with pytest.raises(
        JobError, match=r"^dataset.labels has 2 labels, and the head of model.source .* has 3 \(a, b, c\)"
    ):
        build_model(classifier_job(source, initialise="pretrained", dataset={"labels": ["a", "b"]}))


@pytest.mark.parametrize(
    ("model_type", "objective"),
    [("t5", "classification"), ("bart", "classification"), ("mamba", "tokenClassification")],
)
def test_models_without_such_a_head_are_refused(tmp_path: Path, model_type: str, objective: str) -> None:
    AutoConfig.for_model(model_type).save_pretrained(tmp_path)
    save_wordpiece_tokenizer(tmp_path)
    with pytest.raises(JobError, match=rf"^training.objective: {objective} is not supported for {model_type} models"):
        build_model(classifier_job(tmp_path, objective))


@pytest.mark.parametrize(("model_type", "longest"), [("bert", 64), ("roberta", 63), ("gpt2", 64)])
def test_rows_longer_than_the_positions_of_a_model_are_refused(tmp_path: Path, model_type: str, longest: int) -> None:
    source = save_source(tmp_path, model_type)
    build_model(classifier_job(source, dataset={"maxLength": longest}))
    with pytest.raises(
        JobError, match=rf"dataset.maxLength: {longest + 1} tokens are more than the {longest} positions"
    ):
        build_model(classifier_job(source, dataset={"maxLength": longest + 1}))


@pytest.mark.parametrize("quantization", ["none", "nf4"])
@pytest.mark.parametrize("model_type", ["bert", "distilbert", "llama", "roberta", "modernbert"])
@pytest.mark.parametrize("objective", OBJECTIVES)
def test_an_adapter_trains_the_whole_head_and_matrices_beside_frozen_layers(
    tmp_path: Path, model_type: str, objective: str, quantization: str
) -> None:
    job = classifier_job(
        save_source(tmp_path, model_type), objective, adapter={"lora": {"r": 2}, "quantization": quantization}
    )
    built: Any = build_model(job)
    heads = head_modules(built)
    of_heads = sum(p.numel() for name in heads for p in built.get_submodule(name).parameters())
    adapted: Any = attach_adapter(built, job)
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    matrices = {name for name in trained if ".lora_" in name}
    assert matrices
    assert not any(f".{head}." in name for name in matrices for head in heads)
    assert sum(trained[name].numel() for name in trained.keys() - matrices) == of_heads
    assert not any(isinstance(module, Linear4bit) for name in heads for module in built.get_submodule(name).modules())
