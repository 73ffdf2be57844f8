"""Loading the model of a job, and the errors when that fails."""

from __future__ import annotations

import json
import shutil
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from huggingface_hub.errors import LocalEntryNotFoundError
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.models.pretrained import (
    build_model,
    build_on_meta_device,
    check_vocabulary,
    load_config,
    load_tokenizer,
)
from tests.trainer.support.tiny import make_job, save_config, save_source, save_tokenizer


@pytest.fixture(scope="module")
def t5(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("t5"), "seq2seq")


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_source(tmp_path_factory.mktemp("llama"), "causal")


@pytest.mark.parametrize("task", ["seq2seq", "causal"])
def test_a_model_from_scratch_depends_on_the_seed_alone(t5: Path, llama: Path, task: str) -> None:
    source = t5 if task == "seq2seq" else llama
    torch.manual_seed(1)
    first = build_model(make_job(source, task))
    torch.manual_seed(2)
    state = torch.get_rng_state()
    second = build_model(make_job(source, task))
    assert torch.equal(torch.get_rng_state(), state)
    other = build_model(make_job(source, task, training={"seed": 8}))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert first.training
    assert first.dtype == torch.float32


def test_weights_of_a_folder_are_loaded_in_the_dtype_of_the_job(llama: Path, tmp_path: Path) -> None:
    saved = build_model(make_job(llama, "causal"))
    saved.save_pretrained(tmp_path)
    model = {"initialise": "pretrained", "dtype": "bfloat16"}
    loaded = build_model(make_job(tmp_path, "causal", model={**model, "source": str(tmp_path), "task": "causal"}))
    for name, parameter in loaded.named_parameters():
        assert parameter.dtype == torch.bfloat16
        assert torch.equal(parameter, saved.get_parameter(name).bfloat16())
    assert loaded.training


def test_pickled_weights_are_refused(llama: Path, tmp_path: Path) -> None:
    saved = build_model(make_job(llama, "causal"))
    saved.save_pretrained(tmp_path)
    weights = tmp_path / "model.safetensors"
    torch.save(load_file(weights), tmp_path / "pytorch_model.bin")
    weights.unlink()
    model = {"initialise": "pretrained", "source": str(tmp_path), "task": "causal"}
    with pytest.raises(JobError, match=r"^model.source: .*safetensors"):
        build_model(make_job(tmp_path, "causal", model=model))


@pytest.mark.parametrize("trusted", [False, True])
def test_remote_code_runs_only_if_trusted(trusted: bool, llama: Path, tmp_path: Path) -> None:
    """The code is a custom configuration, because the configuration is loaded first."""
    source = tmp_path / "source"
    shutil.copytree(llama, source)
    config = json.loads((source / "config.json").read_text())
    config |= {"model_type": "theirs", "auto_map": {"AutoConfig": "theirs.TheirConfig"}}
    (source / "config.json").write_text(json.dumps(config))
    sign = tmp_path / "ran"
    (source / "theirs.py").write_text(
        f"open({str(sign)!r}, 'w').close()\n"
        "from transformers import PretrainedConfig\n"
        "class TheirConfig(PretrainedConfig):\n"
        "    model_type = 'theirs'\n"
    )
    job = make_job(source, "causal", model={"source": str(source), "task": "causal", "trustRemoteCode": trusted})
    with pytest.raises(JobError) if not trusted else suppress(JobError):
        load_config(job)
    assert sign.exists() is trusted


def test_a_model_on_the_meta_device_has_names_and_shapes_but_no_storage(t5: Path) -> None:
    skeleton, model = build_on_meta_device(make_job(t5)), build_model(make_job(t5))
    assert {n: p.shape for n, p in skeleton.named_parameters()} == {n: p.shape for n, p in model.named_parameters()}
    assert {parameter.device.type for parameter in skeleton.parameters()} == {"meta"}


def test_an_encoder_decoder_without_start_token_starts_with_padding(t5: Path) -> None:
    assert getattr(AutoConfig.from_pretrained(t5), "decoder_start_token_id", None) is None
    assert load_config(make_job(t5)).decoder_start_token_id == 0


def test_the_attention_implementation_is_taken_from_execution(llama: Path) -> None:
    model = build_model(make_job(llama, "causal", execution={"attention": "eager"}))
    assert model.config._attn_implementation == "eager"


@pytest.mark.parametrize(
    ("model_type", "wanted", "message"),
    [
        ("bloom", "sdpa", "bloom models have no sdpa: use auto or eager"),
        ("llama", "flash_attention_2", "needs the package flash-attn in the image"),
    ],
)
def test_an_unsupported_attention_is_refused(tmp_path: Path, model_type: str, wanted: str, message: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(JobError, match=rf"^execution\.attention: .*{message}"):
        load_config(make_job(tmp_path, "causal", execution={"attention": wanted}))


def test_model_tokenizer_overrides_the_source(t5: Path, tmp_path: Path) -> None:
    save_config(tmp_path / "bare", "seq2seq")
    job = make_job(tmp_path / "bare", model={"source": str(tmp_path / "bare"), "task": "seq2seq", "tokenizer": str(t5)})
    tokenizer = load_tokenizer(job)
    assert tokenizer.decode(tokenizer("how many")["input_ids"]) == "how many</s>"
    check_vocabulary(load_config(job), tokenizer)


def test_a_missing_padding_token_becomes_the_end_of_text(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    save_config(tmp_path, "causal")
    assert load_tokenizer(make_job(tmp_path, "causal")).pad_token == "</s>"


def test_a_tokenizer_without_end_of_text_is_refused(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path)
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    save_config(tmp_path, "causal")
    with pytest.raises(JobError, match=r"^model.source: .*no end-of-text token"):
        load_tokenizer(make_job(tmp_path, "causal"))


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(t5: Path) -> None:
    tokenizer, config = load_tokenizer(make_job(t5)), load_config(make_job(t5))
    config.vocab_size = len(tokenizer) - 1
    with pytest.raises(
        JobError, match=rf"model.tokenizer has {len(tokenizer)} tokens.*vocabulary has {len(tokenizer) - 1}"
    ):
        check_vocabulary(config, tokenizer)


@pytest.mark.parametrize(
    ("task", "values", "message"),
    [
        ("seq2seq", {"task": "causal"}, r"is a t5 model, which is not causal. Set model.task: seq2seq."),
        ("causal", {"task": "seq2seq"}, r"is a llama model, which is not seq2seq. Set model.task: causal."),
        ("causal", {"initialise": "pretrained"}, r"no file named model.safetensors.*set model.initialise: random"),
    ],
)
def test_a_model_that_does_not_fit_the_job_is_refused(
    t5: Path, llama: Path, task: str, values: dict[str, str], message: str
) -> None:
    source = t5 if task == "seq2seq" else llama
    with pytest.raises(JobError, match=message):
        build_model(
            make_job(source, task, model={"source": str(source), "task": task, "initialise": "random"} | values)
        )


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("/no/such/folder", r"^model.source: there is no folder '/no/such/folder'.*hf://owner/name"),
        ("s3://bucket/model", r"^model.source: 's3://bucket/model' cannot be loaded"),
    ],
)
def test_the_error_names_a_missing_source(source: str, message: str) -> None:
    with pytest.raises(JobError, match=message):
        load_config(make_job(source))


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "no model can be loaded"), ("{", "not a valid JSON file"), ('{"model_type": "t6"}', "t6")],
)
def test_a_folder_without_a_model_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    if content:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(JobError, match=message):
        load_config(make_job(tmp_path))


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    save_config(tmp_path, "seq2seq")
    with pytest.raises(JobError, match=r"^model.source: no tokenizer can be loaded"):
        load_tokenizer(make_job(tmp_path))


def test_weights_with_a_missing_parameter_are_refused(llama: Path, tmp_path: Path) -> None:
    build_model(make_job(llama, "causal")).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["model.norm.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    job = make_job(tmp_path, "causal", model={"source": str(tmp_path), "task": "causal"} | {"initialise": "pretrained"})
    with pytest.raises(JobError, match=r"no weights for 'model.norm.weight' of LlamaForCausalLM \(1 missing in all\)"):
        build_model(job)


def test_an_unreachable_hub_is_not_the_users_fault() -> None:
    with pytest.raises(InfrastructureError, match="Hub could not be reached for 'hf://google-t5/t5-small'"):
        load_config(make_job("hf://google-t5/t5-small"))


def test_a_failing_volume_is_not_the_users_fault(t5: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(InfrastructureError, match="Input/output error"):
        load_config(make_job(t5))


def test_an_unknown_name_on_the_hub_is_the_users_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("no/such is not a local folder and is not a valid model identifier")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(JobError, match="not a valid model identifier"):
        load_config(make_job("hf://no/such"))


def test_an_outage_is_found_in_the_chain_of_causes(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("cannot connect") from LocalEntryNotFoundError("offline")

    monkeypatch.setattr(AutoConfig, "from_pretrained", fail)
    with pytest.raises(InfrastructureError, match="cannot connect"):
        load_config(make_job("hf://google-t5/t5-small"))
