import asyncio
import threading
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
import torch

from spotune_serve.engine.base import (
    EngineStats,
    GenerationError,
    PromptTooLongError,
    TokenChunk,
    UnknownAdapterError,
)
from spotune_serve.engine.model import LoadedModel
from spotune_serve.engine.transformers_engine import TransformersEngine
from tests.serve.support.generating import Answer, answer, answers, ask, request, running_engine, with_engine
from tests.serve.support.toy_models import (
    CAUSAL,
    EOS,
    SEQ2SEQ,
    VOCABULARY,
    generated_by_transformers,
    prompts,
    toy_model,
)


@pytest.mark.parametrize("family", [*CAUSAL, *SEQ2SEQ])
def test_concurrent_greedy_requests_equal_generate(family: str) -> None:
    model = toy_model(family)
    asked = prompts(10)
    lengths = [3 + 5 * (number % 4) for number in range(len(asked))]
    expected = [generated_by_transformers(model, prompt, length) for prompt, length in zip(asked, lengths, strict=True)]
    assert len({token for tokens in expected for token in tokens}) >= 6, "answers must vary"
    requests = [request(prompt, length) for prompt, length in zip(asked, lengths, strict=True)]
    assert ask(model, requests, max_batch_size=4) == expected


@pytest.mark.parametrize("family", ["llama", "t5"])
def test_requests_that_join_a_running_batch_change_no_token(family: str) -> None:
    model = toy_model(family)
    first, *others = prompts(4)

    async def join_one_by_one(engine: TransformersEngine) -> list[tuple[int, ...]]:
        tokens: list[int] = []
        joined: list[asyncio.Task[Answer]] = []
        async for chunk in engine.generate(request(first, 24, ignore_eos=True)):
            tokens += [each.token for each in chunk.tokens]
            if len(tokens) % 3 == 0 and len(joined) < len(others):
                joined.append(asyncio.create_task(answer(engine, request(others[len(joined)], 9, ignore_eos=True))))
        return [tuple(tokens), *(each.tokens for each in await asyncio.gather(*joined))]

    found = with_engine(model, join_one_by_one)
    alone = [
        ask(model, [request(prompt, 24 if prompt == first else 9, ignore_eos=True)])[0] for prompt in [first, *others]
    ]
    assert found == alone


@pytest.mark.parametrize("family", ["gpt2", "mistral", "t5", "bart"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_sequence_continues_after_every_token(family: str, temperature: float) -> None:
    model = toy_model(family).double()
    penalties: dict[str, Any] = {"presence_penalty": 0.4, "frequency_penalty": 0.3, "logprobs": 2}

    async def continue_everywhere(engine: TransformersEngine) -> None:
        for seed, prompt in enumerate(prompts(3, seed=8)):
            whole = await answer(engine, request(prompt, 9, seed=seed, temperature=temperature, **penalties))
            parts = [
                request(prompt, 9, seed=seed, temperature=temperature, generated=whole.tokens[:count], **penalties)
                for count in range(len(whole.tokens))
            ]
            for count, part in enumerate(await answers(engine, parts)):
                assert part.tokens == whole.tokens[count:]
                assert part.finish_reason == whole.finish_reason
                found = [each.logprob for each in part.generated]
                assert found == pytest.approx([each.logprob for each in whole.generated[count:]], abs=1e-5)

    with_engine(model, continue_everywhere)


def test_sampled_tokens_depend_on_the_seed_and_not_on_the_batch() -> None:
    model = toy_model("llama", initializer_range=0.2)
    prompt, *others = prompts(4)
    seeds = [request(prompt, 12, seed=seed, temperature=1.0, ignore_eos=True) for seed in (1, 2, 1)]
    crowd = [request(other, 12, seed=9, temperature=1.0) for other in others]
    first, second, again, *_ = ask(model, [*seeds, *crowd])
    assert first == again != second


def test_logprobs_are_those_of_the_unmodified_logits() -> None:
    model = toy_model("gpt2")
    prompt = prompts(1)[0]
    asked = request(prompt, 3, temperature=0.7, logit_bias={40: 50.0}, presence_penalty=2.0, logprobs=3)
    found = with_engine(model, lambda engine: answer(engine, asked)).generated
    assert {each.token for each in found} == {40}
    forward: Any = model
    with torch.no_grad():
        logits = forward(input_ids=torch.tensor([[*prompt, 40, 40]])).logits[0, -3:]
    for each, row in zip(found, torch.log_softmax(logits, dim=-1).numpy(), strict=True):
        assert each.logprob == pytest.approx(row[40], abs=1e-4)
        assert [top.token for top in each.top] == np.argsort(-row)[:3].tolist()
        assert [top.logprob for top in each.top] == pytest.approx(np.sort(row)[::-1][:3].tolist(), abs=1e-4)


def test_penalties_change_greedy_answers() -> None:
    prompt = prompts(1)[0]
    asked = request(prompt, 12, frequency_penalty=50.0, ignore_eos=True)
    tokens = ask(toy_model("gpt2"), [asked])[0]
    assert len(set(tokens)) == 12


def test_logit_bias_forbids_tokens() -> None:
    model, prompt = toy_model("t5"), prompts(1)[0]
    free = ask(model, [request(prompt, 8)])[0]
    forbidden = ask(model, [request(prompt, 8, logit_bias=dict.fromkeys(free, -1000.0))])[0]
    assert not set(free) & set(forbidden)


def test_stop_token_ends_the_sequence_and_is_returned() -> None:
    model, prompt = toy_model("llama"), prompts(1)[0]
    free = ask(model, [request(prompt, 8, ignore_eos=True)])[0]
    found = with_engine(model, lambda engine: answer(engine, request(prompt, 8, stop_token_ids=(free[2],))))
    assert found.tokens == free[: free.index(free[2]) + 1]
    assert found.finish_reason == "stop"


def test_end_of_text_ends_the_sequence_unless_it_is_ignored() -> None:
    model, prompt = toy_model("llama"), prompts(1)[0]
    bias = {EOS: 1000.0}

    async def both(engine: TransformersEngine) -> list[Answer]:
        asked = [request(prompt, 4, logit_bias=bias), request(prompt, 4, logit_bias=bias, ignore_eos=True)]
        return await answers(engine, asked)

    ended, ignored = with_engine(model, both)
    assert (ended.tokens, ended.finish_reason) == ((EOS,), "stop")
    assert (ignored.tokens, ignored.finish_reason) == ((EOS,) * 4, "length")


@pytest.mark.parametrize(("generated", "reason"), [((5, 6, 7), "length"), ((5, EOS), "stop")])
def test_finished_sequence_continues_with_nothing(generated: tuple[int, ...], reason: str) -> None:
    asked = request((4, 5), 3, generated=generated)
    found = with_engine(toy_model("llama"), lambda engine: answer(engine, asked))
    assert (found.tokens, found.finish_reason) == ((), reason)


def test_sequence_ends_at_the_maximum_length_of_the_model() -> None:
    model = toy_model("gpt2", n_positions=16)
    found = with_engine(
        model, lambda engine: answer(engine, request(prompts(1, shortest=10, longest=10)[0], 50, ignore_eos=True))
    )
    assert (len(found.tokens), found.finish_reason) == (6, "length")


@pytest.mark.parametrize(
    ("family", "asked", "error", "message"),
    [
        ("gpt2", request([5] * 64), PromptTooLongError, "64 tokens and 0 were generated.*maximum is 64"),
        ("gpt2", request([5] * 60, generated=[5] * 6), PromptTooLongError, "60 tokens and 6 were generated"),
        ("t5", request([5] * 99), PromptTooLongError, "99 tokens.*100 for all that is cached"),
        ("bart", request([5] * 65), PromptTooLongError, "encoder reads 64"),
        ("gpt2", request([]), ValueError, "the prompt is empty"),
        ("gpt2", request([5, VOCABULARY]), ValueError, f"token id {VOCABULARY} is outside the vocabulary"),
        ("gpt2", request([5], logit_bias={-1: 1.0}), ValueError, "token id -1"),
        ("gpt2", request([5], adapter="sql"), UnknownAdapterError, "no adapter 'sql'; loaded: none"),
    ],
)
def test_impossible_request_is_refused(family: str, asked: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        with_engine(toy_model(family), lambda engine: answer(engine, asked), max_cached_tokens=100)


def test_closing_the_iterator_frees_its_place() -> None:
    async def abort_first(engine: TransformersEngine) -> Answer:
        async with aclosing(engine.generate(request((5, 6), 50, ignore_eos=True))) as stream:
            await anext(stream)
            waiting = asyncio.create_task(answer(engine, request((7, 8), 5)))
        return await waiting

    model = toy_model("llama")
    found = with_engine(model, abort_first, max_batch_size=1)
    assert found.tokens == generated_by_transformers(model, (7, 8), 5)


def test_failed_step_ends_its_sequences_and_later_requests_work(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(toy_model("llama"))
    decode, failures = model.decode, [torch.OutOfMemoryError("no memory left")]

    def fail_once(*inputs: Any) -> torch.Tensor:
        if failures:
            raise failures.pop()
        return decode(*inputs)

    monkeypatch.setattr(model, "decode", fail_once)

    async def fail_then_work(engine: TransformersEngine) -> Answer:
        with pytest.raises(GenerationError, match="a-request failed after 1 tokens: OutOfMemoryError: no memory left"):
            await answer(engine, request((5, 6), 8))
        engine.check_health()
        return await answer(engine, request((5, 6), 8))

    assert with_engine(model, fail_then_work).tokens == generated_by_transformers(toy_model("llama"), (5, 6), 8)


def test_error_outside_of_a_step_of_a_batch_does_not_end_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(toy_model("llama"))

    async def fail_then_work(engine: TransformersEngine) -> Answer:
        with monkeypatch.context() as patch:
            patch.setattr(engine._scheduler, "step", lambda: 1 / 0)
            with pytest.raises(GenerationError, match="ZeroDivisionError"):
                await answer(engine, request((5, 6), 8))
        return await answer(engine, request((5, 6), 8))

    assert len(with_engine(model, fail_then_work).tokens) > 0


def test_device_failure_makes_the_engine_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(toy_model("llama"))

    def fail(*_: Any) -> torch.Tensor:
        raise torch.AcceleratorError("an illegal memory access was encountered")

    monkeypatch.setattr(model, "decode", fail)

    async def use(engine: TransformersEngine) -> None:
        for _ in range(2):
            with pytest.raises(GenerationError, match="illegal memory access"):
                await answer(engine, request((5, 6), 8))
        with pytest.raises(GenerationError, match="the device has failed"):
            engine.check_health()

    with_engine(model, use)


def test_closing_the_engine_ends_streams_with_an_error_and_refuses_new_ones() -> None:
    async def run() -> None:
        async with running_engine(toy_model("t5")) as engine:
            stream = engine.generate(request((5, 6), 5000, ignore_eos=True))
            await anext(stream)
            await engine.close()
            with pytest.raises(GenerationError, match="the engine was closed"):
                async for _ in stream:
                    pass
            with pytest.raises(GenerationError, match="closed"):
                engine.check_health()
            with pytest.raises(GenerationError, match="closed"):
                await answer(engine, request((5, 6), 5))
            assert engine.stats() == EngineStats(0, 0, 0)

    asyncio.run(run())


def test_consumer_whose_event_loop_is_gone_does_not_stop_the_engine() -> None:
    engine = TransformersEngine(LoadedModel(toy_model("llama")), max_batch_size=1)
    loop = asyncio.new_event_loop()
    stream = engine.generate(request((5, 6), 5000, ignore_eos=True))
    chunk: TokenChunk = loop.run_until_complete(anext(stream))
    assert chunk.finish_reason is None
    loop.close()

    async def use_and_close() -> Answer:
        found = await answer(engine, request((7, 8), 5))
        await engine.close()
        return found

    assert len(asyncio.run(use_and_close()).tokens) > 0


def test_stats_count_requests_that_wait_for_their_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    model = LoadedModel(toy_model("gpt2"))
    prefill, may_prefill = model.prefill, threading.Event()

    def wait_and_prefill(*inputs: Any) -> Any:
        may_prefill.wait()
        return prefill(*inputs)

    monkeypatch.setattr(model, "prefill", wait_and_prefill)

    async def use(engine: TransformersEngine) -> None:
        tasks = [asyncio.create_task(answer(engine, request((5, 6), 4))) for _ in range(3)]
        await asyncio.sleep(0)  # each task runs until it waits for its first token
        assert engine.stats() == EngineStats(running=0, waiting=3, cached_tokens=0)
        may_prefill.set()
        await asyncio.gather(*tasks)

    with_engine(model, use)


def test_maximum_sequence_length_is_that_of_the_model_or_of_the_cache() -> None:
    async def length(engine: TransformersEngine) -> int:
        return engine.max_sequence_length

    assert with_engine(toy_model("gpt2"), length) == 64
    assert with_engine(toy_model("gpt2"), length, max_cached_tokens=40) == 40
    assert with_engine(toy_model("t5"), length, max_cached_tokens=500) == 500
