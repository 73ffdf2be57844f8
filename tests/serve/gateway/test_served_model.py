"""What the gateway reads of a model's folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from spotune.errors import JobError, UsageError
from spotune.prompting.export_manifest import MANIFEST
from spotune_serve.gateway.served_model import ServedModel
from tests.serve.support.served_models import SQL_TEMPLATE, save_model
from tests.trainer.support.tiny import save_tokenizer


def test_an_export_is_read_with_its_manifest(tmp_path: Path) -> None:
    model = ServedModel.load(save_model(tmp_path, "seq2seq", prompt=SQL_TEMPLATE))
    assert (model.name, model.is_encoder_decoder, model.fields) == ("tiny", True, ["question", "columns"])
    assert (model.max_prompt_tokens, model.eos_token_ids) == (64, frozenset({1}))
    assert model.example_request() == {"row": {"question": "...", "columns": "..."}}
    assert not model.chats


def test_a_job_directory_has_its_model_in_export(tmp_path: Path) -> None:
    save_model(tmp_path / "export")
    assert ServedModel.load(tmp_path, name="mine").name == "mine"


@pytest.mark.parametrize("task", ["causal", "seq2seq"])
def test_any_transformers_folder_is_served(tmp_path: Path, task: str) -> None:
    folder = save_model(tmp_path / "my-model", task, chat=task == "causal")
    (folder / MANIFEST).unlink()
    model = ServedModel.load(folder)
    assert (model.name, model.is_encoder_decoder, model.chats) == ("my-model", task == "seq2seq", task == "causal")
    assert model.fields == (["messages"] if task == "causal" else ["prompt"])


def test_the_context_is_that_of_the_configuration(tmp_path: Path) -> None:
    model = ServedModel.load(save_model(tmp_path))
    assert (model.max_sequence_length, model.max_new_tokens([5] * 6)) == (256, 250)


def test_all_end_of_text_tokens_are_read(tmp_path: Path) -> None:
    folder = save_model(tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 8]}')
    assert ServedModel.load(folder).eos_token_ids == {1, 7, 8}
    (folder / "generation_config.json").write_text('{"eos_token_id": ')
    with pytest.raises(JobError, match=r"generation_config\.json is damaged"):
        ServedModel.load(folder)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no directory"):
        ServedModel.load(tmp_path / "missing")
    with pytest.raises(UsageError, match="neither an exported model"):
        ServedModel.load(tmp_path)


def test_a_damaged_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(JobError, match="configuration"):
        ServedModel.load(tmp_path)
    save_model(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(JobError, match="tokenizer"):
        ServedModel.load(tmp_path)
    save_tokenizer(tmp_path)
    (tmp_path / MANIFEST).write_text("{}")
    with pytest.raises(JobError, match=MANIFEST):
        ServedModel.load(tmp_path)


def test_adapters_need_their_folder_and_a_name_of_their_own(tmp_path: Path) -> None:
    folder = save_model(tmp_path / "model")
    with pytest.raises(UsageError, match="adapter_config"):
        ServedModel.load(folder, adapters={"polite": tmp_path})
    (tmp_path / "adapter_config.json").write_text("{}")
    assert ServedModel.load(folder, adapters={"polite": tmp_path}).adapters == ("polite",)
    with pytest.raises(UsageError, match="name of the model"):
        ServedModel.load(folder, adapters={"tiny": tmp_path})


def test_no_weights_and_no_model_classes_are_loaded(tmp_path: Path) -> None:
    folder = save_model(tmp_path, "seq2seq")
    code = (
        "import json, sys; from pathlib import Path; from spotune_serve.gateway.served_model import ServedModel\n"
        f"ServedModel.load(Path({str(folder)!r}))\n"
        "print(json.dumps([name for name in sys.modules if 'modeling_' in name and 't5' in name]))"
    )
    environment = {**os.environ, "PYTHONPATH": ":".join(sys.path)}
    output = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(output.stdout) == []
