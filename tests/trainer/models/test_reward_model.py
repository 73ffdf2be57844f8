"""Reward models: a head from the seed on the weights of a language model, and rewards that padding does not change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.plan.config_reader import SUPPORTED_MODEL_TYPES
from spotune_trainer.data.batches import Batch, collate
from spotune_trainer.models.pretrained import build_model, build_on_meta_device, build_uninitialized, load_tokenizer
from spotune_trainer.objectives.reward import Reward, rewards, split_pairs
from tests.trainer.support.tiny import VOCABULARY, make_job, save_source, save_tokenizer

EOS = 1
CHOSEN = [[5, 6, 7, EOS], [8, 9, EOS], [10, 11, 12, 13, 14, EOS]]
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
GROUPS = {"num_key_value_heads": 2, "head_dim": 8}
REJECTED = [[5, 6, EOS], [8, 15, 16, 17, 18, 19, EOS], [10, 11, 20, EOS]]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A causal language model with weights."""
    folder = save_source(tmp_path / "model", "causal")
    build_model(make_job(folder, "causal")).save_pretrained(folder)
    return folder


def reward_job(source: Path, initialise: str = "pretrained", **training: Any) -> FinetuneJob:
    model = {"source": str(source), "task": "causal", "initialise": initialise, "dtype": "float32"}
    dataset = {"prompt": "{q}", "chosen": "{a}", "rejected": "{b}"}
    return make_job(source, "causal", model=model, dataset=dataset, training={"objective": "reward", **training})


def use_eos_for_padding(source: Path) -> None:
    """Save the tokenizer without a padding token, so that the end-of-text token is used."""
    tokenizer = save_tokenizer(source)
    backend: Any = tokenizer
    bare = PreTrainedTokenizerFast(tokenizer_object=backend.backend_tokenizer, eos_token="</s>", unk_token="<unk>")
    bare.save_pretrained(source)


def pair_batch(pad_token_id: int, extra: int = 0) -> Batch:
    """The pairs, padded by `extra` tokens or more."""
    rows = [
        {"input_ids": np.array([*a, *b]), "pair_lengths": np.array([len(a), len(b)], dtype=np.int32)}
        for a, b in zip(CHOSEN, REJECTED, strict=True)
    ]
    return collate(rows, "causal", pad_token_id, pad_to_multiple_of=1 + extra)


def test_the_head_depends_on_the_seed_alone(source: Path) -> None:
    torch.manual_seed(1)
    first: Any = build_model(reward_job(source))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second: Any = build_model(reward_job(source))
    assert torch.equal(torch.get_rng_state(), state)
    other: Any = build_model(reward_job(source, seed=8))
    assert first.score.weight.shape == (1, 16)
    assert first.score.weight.std() > 0
    assert torch.equal(first.score.weight, second.score.weight)
    assert not torch.equal(first.score.weight, other.score.weight)
    language_model: Any = build_model(make_job(source, "causal"))
    assert torch.equal(first.model.norm.weight, language_model.model.norm.weight)


def test_a_reward_model_keeps_its_head(source: Path, tmp_path: Path) -> None:
    first: Any = build_model(reward_job(source))
    with torch.no_grad():
        first.score.weight.fill_(3.0)
    first.save_pretrained(tmp_path / "trained")
    save_tokenizer(tmp_path / "trained")
    again: Any = build_model(reward_job(tmp_path / "trained"))
    assert torch.equal(again.score.weight, first.score.weight)


def test_all_ways_to_build_it_give_the_same_model(source: Path) -> None:
    job = reward_job(source)
    models: list[Any] = [build_model(job), build_uninitialized(job), build_on_meta_device(job)]
    shapes = [{name: parameter.shape for name, parameter in model.named_parameters()} for model in models]
    assert shapes[0] == shapes[1] == shapes[2]
    assert [(model.config.num_labels, model.config.pad_token_id) for model in models] == [(1, 0)] * 3


@pytest.mark.parametrize("missing", ["model.norm.weight", "model.embed_tokens.weight"])
def test_other_missing_weights_are_refused(source: Path, missing: str) -> None:
    weights = load_file(source / "model.safetensors")
    del weights[missing]
    save_file(weights, source / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(JobError, match=rf"no weights for '{missing}' of LlamaForSequenceClassification \(1 missing"):
        build_model(reward_job(source))


@pytest.mark.parametrize("model_type", ["bert", "codegen"])
def test_models_without_a_score_of_the_last_token_are_refused(tmp_path: Path, model_type: str) -> None:
    ends = {"vocab_size": VOCABULARY, "bos_token_id": EOS, "eos_token_id": EOS}
    AutoConfig.for_model(model_type, **SIZES, **ends).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    job = reward_job(tmp_path, initialise="random")
    with pytest.raises(JobError, match=rf"^training.objective: reward is not supported for {model_type} models"):
        build_model(job)


@pytest.mark.parametrize("model_type", [each for each in SUPPORTED_MODEL_TYPES if each not in ("t5", "mt5", "bart")])
def test_padding_changes_no_reward_in_any_model_type(tmp_path: Path, model_type: str) -> None:
    ends = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": EOS, "eos_token_id": EOS}
    AutoConfig.for_model(model_type, **SIZES, **GROUPS, **ends).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    model: Any = build_model(reward_job(tmp_path, initialise="random")).eval()
    with torch.no_grad():
        found = rewards(model, pair_batch(0, extra=31))
        alone = [float(model(torch.tensor([answer])).logits) for answer in [*CHOSEN, *REJECTED]]
    assert found.tolist() == pytest.approx(alone, abs=1e-6)
    assert found.std() > 0


@pytest.mark.parametrize("pads_with_eos", [False, True])
@pytest.mark.parametrize("extra", [0, 31])
def test_rewards_are_those_that_transformers_gives_each_answer_alone(
    source: Path, pads_with_eos: bool, extra: int
) -> None:
    if pads_with_eos:
        use_eos_for_padding(source)
    job = reward_job(source)
    pad = load_tokenizer(job).pad_token_id
    assert (pad == EOS) == pads_with_eos
    model: Any = build_model(job).eval()
    with torch.no_grad():
        found = rewards(model, pair_batch(pad, extra))
        alone = [float(model(torch.tensor([answer])).logits) for answer in [*CHOSEN, *REJECTED]]
    assert found.tolist() == pytest.approx(alone, abs=1e-6)


def test_the_reward_is_of_the_last_token_before_padding(source: Path) -> None:
    use_eos_for_padding(source)
    model: Any = build_model(reward_job(source)).eval()
    with torch.no_grad():
        found = rewards(model, pair_batch(EOS))
        before_eos = model.score(model.model(torch.tensor([CHOSEN[0]])).last_hidden_state)[0, -2]
    assert float(found[0]) == pytest.approx(float(before_eos), abs=1e-6)


def test_the_end_of_text_token_learns_although_it_pads(source: Path) -> None:
    """An embedding that knows its padding token gives it no gradient; chats have this token between turns."""
    use_eos_for_padding(source)
    model: Any = build_model(reward_job(source))
    rows = [{"input_ids": np.array([5, EOS, 6, 5, EOS, 7]), "pair_lengths": np.array([3, 3], dtype=np.int32)}]
    loss: Any = Reward()(model, collate(rows, "causal", EOS)).losses[0]
    loss.backward()
    assert model.model.embed_tokens.weight.grad[EOS].abs().sum() > 0


def test_pairs_are_split_into_padded_rows() -> None:
    rows = split_pairs(pair_batch(0), 0).tolist()
    assert rows == [[*answer, *[0] * (7 - len(answer))] for answer in [*CHOSEN, *REJECTED]]


def test_the_loss_is_that_of_bradley_and_terry(source: Path) -> None:
    model: Any = build_model(reward_job(source)).eval()
    with torch.no_grad():
        chosen, rejected = rewards(model, pair_batch(0)).double().chunk(2)
        sums = Reward()(model, pair_batch(0))
    assert float(sums.losses[0]) == pytest.approx(float(torch.log1p(torch.exp(rejected - chosen)).sum()), rel=1e-6)
    assert sums.statistics is not None
    margin = chosen - rejected
    expected = [*(float(each) for each in (chosen.sum(), rejected.sum(), margin.sum(), (margin > 0).sum())), 3]
    assert sums.statistics.tolist() == pytest.approx(expected, abs=1e-6)
    assert Reward().counts(pair_batch(0)) == (3,)


def test_the_classes_of_transformers_load_the_saved_model(source: Path, tmp_path: Path) -> None:
    built: Any = build_model(reward_job(source))
    built.save_pretrained(tmp_path / "saved")
    auto: Any = AutoModelForSequenceClassification
    assert torch.equal(auto.from_pretrained(tmp_path / "saved").score.weight, built.score.weight)
    language: Any = AutoModelForCausalLM
    assert "lm_head.weight" in language.from_pretrained(tmp_path / "saved", output_loading_info=True)[1]["missing_keys"]
