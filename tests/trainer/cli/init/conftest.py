"""Fixtures for tests of `spotune init`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.data.chat.support.conversations import tokenizer_with
from tests.trainer.support.tiny import save_config, save_source


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with tiny models without weights in it: `t5`, `llama` and `chat`, which has a template."""
    monkeypatch.chdir(tmp_path)
    save_source(tmp_path / "t5", "seq2seq")
    save_source(tmp_path / "llama", "causal", max_position_embeddings=2048)
    save_config(tmp_path / "chat", "causal", vocab_size=512)
    tokenizer_with("trl/qwen3", "<|im_start|>", "<|im_end|>").save_pretrained(tmp_path / "chat")
    return tmp_path
