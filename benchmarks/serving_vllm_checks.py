"""What `benchmarks.serving_vllm` checks of the engine: parameters, errors, and the loss of vLLM's process."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from benchmarks.serving_vllm_requests import EOS, MAX_LENGTH, PROMPT_TOKENS, answer, request
from spotune_serve.engine.base import GenerationError, GenerationRequest, PromptTooLongError, UnknownAdapterError
from spotune_serve.engine.vllm_engine import VllmEngine


async def checks(engine: VllmEngine) -> dict[str, bool]:
    """Whether parameters and errors work as the engine protocol says."""
    plain = request(0, "greedy")
    whole = await answer(engine, plain)

    async def chunks(kind: str = "greedy", **sampling: Any) -> list[Any]:
        return [chunk async for chunk in engine.generate(request(0, kind, **sampling))]

    async def refusal(asked: GenerationRequest) -> type[Exception]:
        try:
            await answer(engine, asked)
        except (ValueError, GenerationError) as error:
            return type(error)
        return Exception

    found = {}
    stopped = await chunks(stop_token_ids=(whole[9],))
    tokens = [token.token for chunk in stopped for token in chunk.tokens]
    found["stop token"] = tokens == whole[: whole.index(whole[9]) + 1] and stopped[-1].finish_reason == "stop"
    biased = await chunks(logit_bias={77: 100.0}, max_tokens=5)
    found["logit bias"] = [token.token for chunk in biased for token in chunk.tokens] == [77] * 5
    ended = await chunks(logit_bias={EOS: 100.0}, ignore_eos=False)
    found["end of text"] = len(ended[-1].tokens) == 1 and ended[-1].finish_reason == "stop"
    ignored = await chunks(logit_bias={EOS: 100.0}, max_tokens=4)
    found["ignored end of text"] = sum(len(c.tokens) for c in ignored) == 4 and ignored[-1].finish_reason == "length"
    likely = [token for chunk in await chunks(logprobs=3, max_tokens=20) for token in chunk.tokens]
    found["log probabilities"] = all(
        len(t.top) == 3 and t.top[0].logprob == t.logprob and t.logprob <= 0
        and t.top[0].logprob >= t.top[1].logprob >= t.top[2].logprob for t in likely
    )  # fmt: skip
    bare = [token for chunk in await chunks("sampled", logprobs=0, max_tokens=5) for token in chunk.tokens]
    found["log probability of the token alone"] = all(t.top == () and t.logprob is not None for t in bare)
    same, other = await chunks("sampled", seed=-5, max_tokens=20), await chunks("sampled", seed=2**70, max_tokens=20)
    found["any seed"] = [c.tokens for c in same] != [c.tokens for c in other]
    long = replace(plain, prompt=plain.prompt * 9 + plain.prompt[: MAX_LENGTH - 3 - 9 * PROMPT_TOKENS])
    found["maximum length"] = len(await answer(engine, long)) == 3
    found["too long"] = await refusal(replace(plain, prompt=plain.prompt * 10)) is PromptTooLongError
    found["unknown adapter"] = await refusal(replace(plain, adapter="none")) is UnknownAdapterError
    found["wrong value"] = await refusal(request(0, "greedy", logprobs=100)) is ValueError
    found["finished before"] = await answer(engine, replace(plain, generated=tuple(whole))) == []
    busy = 0
    async with aclosing(engine.generate(plain)) as stream:
        async for _ in stream:
            busy = engine.stats().running
            break
    await asyncio.sleep(0.2)
    left = engine._llm.output_processor.get_num_unfinished_requests()
    found["abort"] = busy == 1 and engine.stats().running == 0 and left == 0
    return found


async def kill_engine_core(engine: VllmEngine, process: Any) -> dict[str, bool]:
    """What a stream and the health check report when vLLM's process dies."""
    stream = engine.generate(request(0, "greedy"))
    await anext(stream)
    os.kill(process.pid, signal.SIGKILL)
    failed = unhealthy = False
    try:
        async for _ in stream:
            pass
    except GenerationError:
        failed = True
    try:
        engine.check_health()
    except GenerationError:
        unhealthy = True
    return {"the stream fails": failed, "the health check fails": unhealthy}
