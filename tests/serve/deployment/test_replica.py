"""What a replica finds out about its container, and its choice of the engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import JobError
from spotune_serve.deployment.config import ModelConfig
from spotune_serve.deployment.replica import available_processors, uses_vllm
from tests.serve.support.toy_models import toy_model

PROCESSORS = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("limit", "processors"),
    [("100000 100000", 1), ("50000 100000", 1), ("150000 100000", min(2, PROCESSORS)), ("max 100000", PROCESSORS)],
)
def test_the_processors_are_those_of_the_limit(limit: str, processors: int, tmp_path: Path) -> None:
    (tmp_path / "cpu.max").write_text(f"{limit}\n")
    assert available_processors(tmp_path) == processors


@pytest.mark.parametrize("content", [None, "", "unknown"])
def test_without_a_readable_limit_all_processors_count(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "cpu.max").write_text(content)
    assert available_processors(tmp_path) == PROCESSORS


@pytest.mark.parametrize(
    ("family", "gpus", "reason"),
    [("llama", 1, "vLLM is not installed"), ("llama", 0, ""), ("t5", 1, "vLLM")],
)
def test_the_log_says_why_a_gpu_is_used_without_vllm(
    family: str, gpus: int, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    toy_model(family).save_pretrained(tmp_path)
    assert not uses_vllm(tmp_path, ModelConfig(tmp_path, gpus=gpus))
    assert len(caplog.messages) == (1 if reason else 0)
    assert reason in caplog.text


@pytest.mark.parametrize("engine", ["vllm", "transformers"])
def test_a_given_engine_is_used(engine: Any, tmp_path: Path) -> None:
    assert uses_vllm(tmp_path, ModelConfig(tmp_path, gpus=1, engine=engine)) == (engine == "vllm")


@pytest.mark.parametrize(
    ("engine", "reason"), [("auto", "vLLM is not installed"), ("transformers", "the engine is transformers")]
)
def test_batch_invariant_kernels_need_vllm(engine: Any, reason: str, tmp_path: Path) -> None:
    toy_model("llama").save_pretrained(tmp_path)
    with pytest.raises(JobError, match=reason):
        uses_vllm(tmp_path, ModelConfig(tmp_path, gpus=1, engine=engine, batch_invariant=True))
