import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM, BertLMHeadModel, MambaConfig, MambaForCausalLM, PreTrainedModel

from spotune.errors import JobError
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.weights.load import load_adapters, load_model
from tests.serve.support.generating import ask, request
from tests.serve.support.toy_adapters import PEFT_WARNING, save_adapter
from tests.serve.support.toy_models import generated_by_transformers, prompts, toy_model

pytestmark = pytest.mark.filterwarnings(PEFT_WARNING)


def saved(model: PreTrainedModel, directory: Path) -> Path:
    model.save_pretrained(directory)
    return directory


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_model_loads_in_the_saved_dtype_and_eval_mode(family: str, tmp_path: Path) -> None:
    model = toy_model(family).bfloat16()
    loaded = load_model(saved(model, tmp_path))
    assert loaded.dtype == torch.bfloat16
    assert not loaded.training
    assert type(loaded) is type(model)


def mapped_file(file: Path) -> tuple[range, int]:
    """The addresses at which a file is mapped into this process, and how many bytes of it are a private copy."""
    addresses, copied, found = range(0), 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            found = line.endswith(f" {file}")
            if found:
                assert not addresses, "the file is mapped twice"
                addresses = range(*(int(address, 16) for address in line.split()[0].split("-")))
        elif found and line.startswith("Anonymous:"):
            copied += int(line.split()[1]) * 1024
    return addresses, copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("family", "values"), [("llama", {}), ("llama", {"tie_word_embeddings": True}), ("t5", {})])
def test_weights_are_pages_of_the_file_which_replicas_share(
    family: str, values: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    model = toy_model(family, **values)
    module: torch.nn.Module = model
    module.to(dtype)
    weights = saved(model, tmp_path) / "model.safetensors"
    assert not mapped_file(weights)[0]
    loaded = load_model(tmp_path)
    prompt = prompts(1)[0]
    answers = ask(load_adapters(loaded, {}), [request(prompt, 8)])
    if dtype == torch.float32:
        assert answers == [generated_by_transformers(model, prompt, 8)]
    addresses, copied = mapped_file(weights)
    assert [name for name, weight in loaded.named_parameters() if weight.data_ptr() not in addresses] == []
    assert copied == 0


def test_loaded_model_answers_as_the_saved_one(tmp_path: Path) -> None:
    model, prompt = toy_model("llama"), prompts(1)[0]
    loaded = load_adapters(load_model(saved(model, tmp_path)), {})
    assert ask(loaded, [request(prompt, 8)]) == [generated_by_transformers(model, prompt, 8)]


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_each_request_decodes_with_its_adapter(family: str, tmp_path: Path) -> None:
    base = toy_model(family)
    adapters, merged = {}, {"": base}
    for seed, name in enumerate(["sql-v1.5", "lora"]):
        adapters[name], merged[name] = save_adapter(tmp_path / str(seed), family, seed)
    loaded = load_adapters(toy_model(family), adapters)
    asked = [(name, prompt) for prompt in prompts(3) for name in ("", "sql-v1.5", "lora", "")]
    expected = [generated_by_transformers(merged[name], prompt, 8) for name, prompt in asked]
    assert len(set(expected[:3])) == 3, "the adapters must change the answers"
    assert ask(loaded, [request(prompt, 8, adapter=name) for name, prompt in asked]) == expected


def test_missing_folder_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=f"there is no folder {tmp_path}/none"):
        load_model(tmp_path / "none")
    with pytest.raises(JobError, match=f"{tmp_path} has no config.json. Name an export directory"):
        load_model(tmp_path)
    toy_model("llama").config.save_pretrained(tmp_path)
    with pytest.raises(JobError, match=f"{tmp_path} has no \\*.safetensors file.*save_pretrained"):
        load_model(tmp_path)


def test_adapter_folder_is_not_a_model(tmp_path: Path) -> None:
    directory, _ = save_adapter(tmp_path)
    with pytest.raises(JobError, match=f"is a LoRA adapter: serve its base model with --adapter NAME={directory}"):
        load_model(directory)


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_truncated_safetensors_are_named(size: int, tmp_path: Path) -> None:
    weights = saved(toy_model("llama"), tmp_path) / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:size])
    with pytest.raises(JobError, match=f"the model in {tmp_path} cannot be loaded: .*Export the model again"):
        load_model(tmp_path)


def test_damaged_config_is_named(tmp_path: Path) -> None:
    saved(toy_model("llama"), tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(JobError, match=f"the model in {tmp_path} cannot be loaded"):
        load_model(tmp_path)


def test_weights_that_lack_a_layer_are_named(tmp_path: Path) -> None:
    saved(toy_model("llama"), tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "layer_types": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(JobError, match=r"has no weights for 'model.layers.2.*missing in all"):
        load_model(tmp_path)


def test_encoder_is_refused_by_name(tmp_path: Path) -> None:
    config = BertConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8)
    with pytest.raises(JobError, match="BertForMaskedLM is neither a causal nor an encoder-decoder"):
        load_model(saved(BertForMaskedLM(config), tmp_path))
    with pytest.raises(JobError, match="BertLMHeadModel is neither"):
        LoadedModel(BertLMHeadModel(config))


def test_recurrent_model_is_refused_by_name() -> None:
    config = MambaConfig(vocab_size=30, hidden_size=8, num_hidden_layers=1, state_size=4)
    with pytest.raises(JobError, match="MambaForCausalLM cannot be decoded in batches"):
        LoadedModel(MambaForCausalLM(config))


@pytest.mark.parametrize("base", [toy_model("t5"), toy_model("llama", hidden_size=64, head_dim=16)], ids=["t5", "wide"])
def test_adapter_of_another_base_is_refused(base: PreTrainedModel, tmp_path: Path) -> None:
    directory, _ = save_adapter(tmp_path)
    with pytest.raises(JobError, match=f"the adapter 'sql' in {directory} cannot be loaded: .*with its base model"):
        load_adapters(base, {"sql": directory})


def test_adapter_with_other_matrices_is_refused(tmp_path: Path) -> None:
    directory, _ = save_adapter(tmp_path)
    file = directory / "adapter_config.json"
    config = json.loads(file.read_text())
    for targets in (["q_proj"], ["q_proj", "v_proj", "o_proj"]):
        file.write_text(json.dumps(config | {"target_modules": targets}))
        with pytest.raises(
            JobError, match=f"the adapter 'sql' in {directory} cannot be loaded: it (lacks|has unknown)"
        ):
            load_adapters(toy_model("llama"), {"sql": directory})


def test_damaged_adapter_files_are_named(tmp_path: Path) -> None:
    directory, _ = save_adapter(tmp_path)
    weights = directory / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(JobError, match=f"the adapter 'sql' in {directory} cannot be loaded"):
        load_adapters(toy_model("llama"), {"sql": directory})
    (directory / "adapter_config.json").write_text("[]]")
    with pytest.raises(JobError, match=r"adapter_config\.json is damaged"):
        load_adapters(toy_model("llama"), {"sql": directory})
    weights.unlink()
    with pytest.raises(JobError, match=f"adapter 'sql' in {directory} has no adapter_model.safetensors"):
        load_adapters(toy_model("llama"), {"sql": directory})


@pytest.mark.parametrize(("change", "named"), [({"peft_type": "IA3"}, "a IA3 adapter"), ({"bias": "all"}, "bias: all")])
def test_other_kinds_of_adapters_are_refused(change: dict[str, str], named: str, tmp_path: Path) -> None:
    directory, _ = save_adapter(tmp_path)
    file = directory / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(JobError, match=f"{named}.*only LoRA adapters"):
        load_adapters(toy_model("llama"), {"sql": directory})
