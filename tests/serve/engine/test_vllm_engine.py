import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest

from spotune.errors import JobError
from spotune_serve.engine import vllm_engine
from spotune_serve.engine.base import EngineLostError, EngineStats, GenerationError, PromptTooLongError, TokenChunk
from spotune_serve.engine.vllm_engine import VllmEngine, obstacle, start_vllm
from spotune_serve.engine.vllm_parameters import VllmModel, VllmSettings
from spotune_serve.engine.vllm_worker import FRONTEND_VARIABLE
from tests.serve.support.generating import Answer, answer, answers, request
from tests.serve.support.scripted_vllm import (
    EngineDeadError,
    EngineGenerateError,
    ScriptedLlm,
    install,
    install_start,
    scripted_token,
)
from tests.serve.support.toy_adapters import PEFT_WARNING, save_adapter
from tests.serve.support.toy_models import toy_model

Result = TypeVar("Result")
EOS = 1
MODEL = VllmModel(97, 64, frozenset({EOS}), adapters=frozenset({"sql", "bad"}))
ADAPTERS = {"sql": "the sql adapter", "bad": "damaged"}


@pytest.fixture(autouse=True)
def scripted_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)


def run(use: Callable[[VllmEngine, ScriptedLlm], Awaitable[Result]], **script: Any) -> Result:
    """What `use` returns for an engine on scripted vLLM."""

    async def started() -> Result:
        llm = ScriptedLlm(max_length=MODEL.max_sequence_length, **script)
        return await use(VllmEngine(llm, MODEL, ADAPTERS), llm)

    return asyncio.run(started())


def tokens(seed: int, prompt: int, count: int) -> tuple[int, ...]:
    return tuple(scripted_token(seed, prompt + place) for place in range(count))


def test_concurrent_requests_get_their_tokens() -> None:
    asked = [request(range(3, 3 + length), 5, seed=length) for length in (1, 4, 9)]
    found = run(lambda engine, _: answers(engine, asked))
    assert [each.tokens for each in found] == [tokens(length, length, 5) for length in (1, 4, 9)]
    assert {each.finish_reason for each in found} == {"length"}


def test_sequence_continues_after_every_token() -> None:
    whole = tokens(3, 4, 7)

    async def continue_everywhere(engine: VllmEngine, llm: ScriptedLlm) -> None:
        for count in range(len(whole)):
            part = await answer(engine, request(range(3, 7), 7, seed=3, generated=whole[:count]))
            assert part == Answer(part.generated, "length")
            assert part.tokens == whole[count:]
            assert llm.prompts[-1] == [3, 4, 5, 6, *whole[:count]]

    run(continue_everywhere)


def test_stop_token_ends_a_sequence_and_is_returned() -> None:
    stop = scripted_token(0, 6)
    found = run(lambda engine, _: answer(engine, request(range(3, 7), 9, stop_token_ids=(stop,))))
    assert (found.tokens, found.finish_reason) == (tokens(0, 4, 3), "stop")


def test_sequence_that_is_finished_asks_vllm_for_nothing() -> None:
    async def ask(engine: VllmEngine, llm: ScriptedLlm) -> tuple[Answer, int]:
        return await answer(engine, request((3, 4), 9, generated=(5, EOS))), len(llm.prompts)

    assert run(ask) == (Answer((), "stop"), 0)


def test_log_probabilities_are_returned() -> None:
    found = run(lambda engine, _: answer(engine, request((3,), 2, seed=5, logprobs=2)))
    assert [token.logprob for token in found.generated] == [-1.0, -1.0]
    assert [[pair.token for pair in token.top] for token in found.generated] == [[1, 2], [1, 2]]


def test_left_iterator_aborts_its_sequence_and_no_other() -> None:
    async def leave(engine: VllmEngine, llm: ScriptedLlm) -> tuple[Answer, list[str], EngineStats]:
        other = asyncio.create_task(answer(engine, request((3, 4), 30)))
        async with aclosing(engine.generate(request((3,), 30))) as chunks:
            async for _ in chunks:
                break
        return await other, llm.aborted, engine.stats()

    found, aborted, stats = run(leave)
    assert len(found.tokens) == 30
    assert len(aborted) == 1
    assert stats == EngineStats(0, 0, 0)


def test_cancelled_consumer_aborts_its_sequence() -> None:
    async def cancel(engine: VllmEngine, llm: ScriptedLlm) -> list[str]:
        llm.gate.clear()
        task = asyncio.create_task(answer(engine, request((3,), 30)))
        while not engine.stats().running:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats() == EngineStats(0, 0, 0)
        return llm.aborted

    assert len(run(cancel)) == 1


def test_finished_sequence_is_not_aborted_even_if_its_consumer_leaves() -> None:
    async def leave(engine: VllmEngine, llm: ScriptedLlm) -> list[str]:
        async with aclosing(engine.generate(request((3,), 3))) as chunks:
            async for chunk in chunks:
                if chunk.finish_reason is not None:
                    break
        return llm.aborted

    assert run(leave) == []


def test_stats_count_running_and_waiting_sequences() -> None:
    async def watch(engine: VllmEngine, llm: ScriptedLlm) -> tuple[EngineStats, EngineStats]:
        llm.gate.clear()
        first = asyncio.create_task(answer(engine, request(range(3, 13), 5)))
        while not engine.stats().running:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        second = asyncio.create_task(answer(engine, request((3,), 5)))
        await asyncio.sleep(0)
        busy = engine.stats()
        llm.gate.set()
        await asyncio.gather(first, second)
        return busy, engine.stats()

    assert run(watch) == (EngineStats(running=1, waiting=1, cached_tokens=11), EngineStats(0, 0, 0))


def test_adapter_is_loaded_once_before_its_first_sequences() -> None:
    async def ask(engine: VllmEngine, llm: ScriptedLlm) -> tuple[list[Any], list[Any]]:
        await answers(engine, [request((3,), 2, adapter=name) for name in ("sql", "", "sql")])
        return llm.loaded, llm.adapters

    loaded, used = run(ask)
    assert loaded == ["the sql adapter"]
    assert sorted(map(str, used)) == ["None", "the sql adapter", "the sql adapter"]


def test_adapter_that_cannot_be_loaded_fails_its_own_requests_only() -> None:
    async def ask(engine: VllmEngine, _llm: ScriptedLlm) -> Answer:
        with pytest.raises(GenerationError, match="cannot load the adapter 'bad': no such tensor"):
            await answer(engine, request((3,), 2, adapter="bad"))
        return await answer(engine, request((3,), 2))

    assert len(run(ask).tokens) == 2


def test_error_of_vllm_names_the_request_and_its_cause() -> None:
    cause = EngineGenerateError()
    cause.__cause__ = RuntimeError("out of blocks")
    with pytest.raises(GenerationError, match="a-request failed after 0 tokens: out of blocks"):
        run(lambda engine, _: answer(engine, request((3,), 2)), error=cause)


def test_dead_process_fails_streams_and_the_health_check() -> None:
    async def ask(engine: VllmEngine, llm: ScriptedLlm) -> None:
        engine.check_health()
        llm.error = EngineDeadError("it was killed")
        with pytest.raises(EngineLostError, match="it was killed"):
            await answer(engine, request((3,), 2))
        llm.errored = True
        with pytest.raises(EngineLostError, match="process has ended"):
            engine.check_health()
        with pytest.raises(EngineLostError, match="process has ended"):
            await answer(engine, request((3,), 2))
        await engine.close()
        assert llm.shut_down

    run(ask)


def test_closing_aborts_running_sequences() -> None:
    async def close(engine: VllmEngine, llm: ScriptedLlm) -> None:
        llm.gate.clear()
        task = asyncio.create_task(answer(engine, request((3,), 30)))
        while not engine.stats().running:  # noqa: ASYNC110 - the engine has no event for it
            await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(GenerationError, match="failed after 1 tokens: the engine was closed"):
            await task
        with pytest.raises(GenerationError, match="the engine is closed"):
            engine.check_health()
        assert llm.shut_down

    run(close)


def test_refused_request_does_not_reach_vllm() -> None:
    async def ask(engine: VllmEngine, llm: ScriptedLlm) -> list[Any]:
        with pytest.raises(PromptTooLongError):
            await answer(engine, request([3] * 64, 2))
        with pytest.raises(ValueError, match="temperature"):
            await answer(engine, request([3], 2, temperature=3.0))
        assert engine.stats() == EngineStats(0, 0, 0)
        return llm.prompts

    assert run(ask) == []


def test_tokens_of_a_slow_consumer_come_in_one_chunk() -> None:
    """Outputs that the consumer has not taken are merged by vLLM; each token is still delivered once."""

    class Merging(ScriptedLlm):
        async def generate(self, *arguments: Any, **values: Any) -> Any:
            taken = [output async for output in super().generate(*arguments, **values)]
            merged = taken[-1]
            merged.outputs[0].token_ids = [token for output in taken for token in output.outputs[0].token_ids]
            yield merged

    async def ask() -> list[TokenChunk]:
        engine = VllmEngine(Merging(), MODEL, ADAPTERS)
        return [chunk async for chunk in engine.generate(request((3,), 4, seed=2))]

    (chunk,) = asyncio.run(ask())
    assert tuple(token.token for token in chunk.tokens) == tokens(2, 1, 4)


def write_model(folder: Path, architecture: str = "LlamaForCausalLM", **generation: Any) -> Path:
    kind = "t5" if architecture.startswith("T5") else "llama"
    folder.mkdir(exist_ok=True)
    config = {"model_type": kind, "architectures": [architecture], "vocab_size": 97, "eos_token_id": EOS}
    (folder / "config.json").write_text(json.dumps(config))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", lambda name: name)


@pytest.mark.usefixtures("installed")
def test_causal_model_on_a_gpu_has_no_obstacle(tmp_path: Path) -> None:
    assert obstacle(write_model(tmp_path), 0.5) == ""
    assert obstacle(write_model(tmp_path, do_sample=True, temperature=0.6, repetition_penalty=1.1), 1) == ""


@pytest.mark.usefixtures("installed")
def test_obstacles_are_named(tmp_path: Path) -> None:
    assert "GPU" in obstacle(write_model(tmp_path / "model"), 0)
    assert "no config.json" in obstacle(tmp_path / "none", 1)
    assert "T5ForConditionalGeneration is not" in obstacle(
        write_model(tmp_path / "t5", "T5ForConditionalGeneration"), 1
    )
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/config.json").write_text("{")
    assert "cannot be read" in obstacle(tmp_path / "damaged", 1)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize("setting", [{"no_repeat_ngram_size": 3}, {"suppress_tokens": [5]}, {"min_new_tokens": 4}])
def test_generation_settings_that_vllm_would_ignore_are_an_obstacle(tmp_path: Path, setting: dict[str, Any]) -> None:
    (name,) = setting
    assert name in obstacle(write_model(tmp_path, **setting), 1)


def test_missing_vllm_is_an_obstacle_that_names_the_remedy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_engine, "find_spec", lambda _: None)
    assert "Install vllm==0.24.0" in obstacle(write_model(tmp_path), 1)
    with pytest.raises(JobError, match="engine vllm cannot be used: vLLM is not installed"):
        start_vllm(tmp_path, {}, VllmSettings())


def write_adapter(folder: Path, **values: Any) -> Path:
    folder.mkdir()
    (folder / "adapter_model.safetensors").write_bytes(b"")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 8, "bias": "none", **values}))
    return folder


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "IA3"}, "only LoRA adapters"),
        ({"bias": "all"}, "only LoRA adapters"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
        ({"use_dora": True}, "use_dora"),
        ({"r": 1024}, "rank 1024"),
        ({"r": None}, "damaged"),
    ],
)
def test_adapter_that_vllm_does_not_support_is_refused_at_the_start(
    tmp_path: Path, values: dict[str, Any], message: str
) -> None:
    adapter = write_adapter(tmp_path / "sql", **values)
    with pytest.raises(JobError, match=message):
        start_vllm(write_model(tmp_path / "model"), {"sql": adapter}, VllmSettings())


@pytest.mark.usefixtures("installed")
@pytest.mark.filterwarnings(PEFT_WARNING)
def test_adapter_of_another_base_is_refused_at_the_start(tmp_path: Path) -> None:
    toy_model("llama").config.save_pretrained(tmp_path / "model")
    adapter, _ = save_adapter(tmp_path / "sql", hidden_size=64)
    with pytest.raises(JobError, match=r"adapter 'sql' .*another base model.* '.*q_proj' is \[2, 64\]"):
        start_vllm(tmp_path / "model", {"sql": adapter}, VllmSettings())


@pytest.mark.usefixtures("installed")
def test_adapter_without_safetensors_is_refused(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "sql")
    (adapter / "adapter_model.safetensors").unlink()
    with pytest.raises(JobError, match=r"has no adapter_model\.safetensors"):
        start_vllm(write_model(tmp_path / "model"), {"sql": adapter}, VllmSettings())


def set_environment_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if vLLM had been started in this process; undone after the test."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    monkeypatch.setenv("VLLM_USE_FLASHINFER_SAMPLER", "0")
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "0")
    for name in (FRONTEND_VARIABLE, "VLLM_WORKER_MULTIPROC_METHOD", "VLLM_NO_USAGE_STATS"):
        monkeypatch.setenv(name, "")


@pytest.mark.usefixtures("installed")
def test_settings_that_come_too_late_for_vllm_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment is read when vLLM is imported."""
    assert "vllm" in sys.modules
    set_environment_of_vllm(monkeypatch)
    settings = replace(VllmSettings(), batch_invariant=True)
    with pytest.raises(JobError, match="imported before with another VLLM_BATCH_INVARIANT"):
        start_vllm(write_model(tmp_path), {}, settings)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    "error",
    [
        ValueError("No available memory for the cache blocks. Try increasing `gpu_memory_utilization`"),
        RuntimeError("Engine core initialization failed. See root cause above. Failed core proc(s): {}"),
    ],
)
def test_vllm_without_memory_for_a_cache_names_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    set_environment_of_vllm(monkeypatch)
    install_start(monkeypatch, error)
    message = r"vLLM cannot load .*memory does not suffice .*set gpus to a larger number"
    with pytest.raises(JobError, match=message) as found:
        start_vllm(write_model(tmp_path), {}, VllmSettings())
    assert str(error) in str(found.value)
