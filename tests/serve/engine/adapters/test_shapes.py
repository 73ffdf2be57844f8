"""Adapters of another base are found by their shapes, before vLLM starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import JobError
from spotune_serve.engine.adapters.shapes import check_adapter_shapes
from tests.serve.support.toy_adapters import PEFT_WARNING, save_adapter
from tests.serve.support.toy_models import toy_model

pytestmark = pytest.mark.filterwarnings(PEFT_WARNING)


def check(tmp_path: Path, family: str = "llama", adapter: dict[str, Any] | None = None, **base: Any) -> None:
    toy_model(family, **base).config.save_pretrained(tmp_path / "base")  # no weights are read
    folder, _ = save_adapter(tmp_path / "sql", family, **(adapter or {}))
    check_adapter_shapes(tmp_path / "base", {"sql": folder})


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_an_adapter_fits_its_base(family: str, tmp_path: Path) -> None:
    check(tmp_path, family)


@pytest.mark.parametrize(
    ("family", "adapter", "message"),
    [
        ("llama", {"hidden_size": 64}, r"lora_A of 'model.layers.0.self_attn.q_proj' is \[2, 64\], .* be \[2, 32\]"),
        ("llama", {"num_key_value_heads": 4}, r"lora_B of '.*v_proj' is \[32, 2\], and has to be \[16, 2\]"),
        ("llama", {"num_hidden_layers": 3}, r"the base has no linear layer 'model.layers.2.self_attn.[qv]_proj'"),
        ("gpt2", {"n_inner": 96}, r"lora_B of 'transformer.h.0.mlp.c_fc' is \[96, 2\], and has to be \[128, 2\]"),
    ],
)
def test_an_adapter_of_another_base_is_refused(
    family: str, adapter: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=f"adapter 'sql' in {tmp_path}/sql is for another base model.*{message}"):
        check(tmp_path, family, adapter)


def test_the_error_names_the_base_that_the_adapter_was_trained_on(tmp_path: Path) -> None:
    toy_model("llama").config.save_pretrained(tmp_path / "base")
    folder, _ = save_adapter(tmp_path / "sql", hidden_size=64)
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"base_model_name_or_path": "org/wide-1b"}))
    with pytest.raises(JobError, match=r"Serve the adapter with its base model \(org/wide-1b\), or export it again"):
        check_adapter_shapes(tmp_path / "base", {"sql": folder})


def test_a_rank_that_is_not_that_of_the_matrices_is_refused(tmp_path: Path) -> None:
    toy_model("llama").config.save_pretrained(tmp_path / "base")
    folder, _ = save_adapter(tmp_path / "sql")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps(config | {"r": 4}))
    with pytest.raises(JobError, match=r"is \[2, 32\], and has to be \[4, 32\]"):
        check_adapter_shapes(tmp_path / "base", {"sql": folder})


def test_a_damaged_adapter_is_named(tmp_path: Path) -> None:
    toy_model("llama").config.save_pretrained(tmp_path / "base")
    folder, _ = save_adapter(tmp_path / "sql")
    weights = folder / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:50])
    with pytest.raises(JobError, match=r"adapter 'sql': .*adapter_model.safetensors is damaged"):
        check_adapter_shapes(tmp_path / "base", {"sql": folder})
