"""Streams of the `openai` client whose texts must not change, whatever happens to the replicas."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from openai import OpenAI

STREAMS = 24
TOKENS = 192
PROMPTS = [f"how many singers {number} ?" for number in range(STREAMS)]
_MAX_KILLS = 5
_PATIENCE_SECONDS = 120.0


def stream(client: OpenAI, model: str, number: int, begun: threading.Barrier | None = None) -> str:
    """The text of one streamed answer: greedy for even numbers, sampled with a seed for odd ones.

    Args:
        client: without retries.
        model: model id.
        number: which prompt, and the seed.
        begun: waited for after the first text.
    """
    chunks = client.completions.create(
        model=model,
        prompt=PROMPTS[number],
        max_tokens=TOKENS,
        temperature=number % 2,
        seed=number,
        stream=True,
        extra_body={"ignore_eos": True},
    )
    text = ""
    for chunk in chunks:
        text += "".join(choice.text for choice in chunk.choices)
        if begun is not None and text:
            begun.wait(timeout=_PATIENCE_SECONDS)
            begun = None
    return text


def undisturbed_streams(client: OpenAI, model: str) -> list[str]:
    """The texts of all streams at once."""
    with ThreadPoolExecutor(STREAMS) as threads:
        texts = list(threads.map(lambda number: stream(client, model, number), range(STREAMS)))
    assert len(set(texts)) > STREAMS / 2, "the texts vary, so a mixed-up stream would be noticed"
    return texts


def streams_during(client: OpenAI, model: str, fault: Callable[[], None]) -> list[str]:
    """The texts of all streams at once, with a fault after every stream has begun."""
    begun = threading.Barrier(STREAMS + 1)
    with ThreadPoolExecutor(STREAMS) as threads:
        streams = [threads.submit(stream, client, model, number, begun) for number in range(STREAMS)]
        begun.wait(timeout=_PATIENCE_SECONDS)
        fault()
        return [running.result() for running in streams]


def assert_streams_survive(
    client: OpenAI, model: str, undisturbed: list[str], choose: Callable[[], Callable[[], None]]
) -> None:
    """Kill a replica in the middle of all streams: every text equals the undisturbed one.

    On a busy machine all streams may have ended just before the kill. So it is repeated until a stream had to continue
    at another replica.

    Args:
        client: without retries.
        model: model id.
        undisturbed: the texts that all streams must have.
        choose: waits until all replicas run, before the streams begin, and returns what kills one of them at once.
    """
    for _ in range(_MAX_KILLS):
        kill = choose()
        resumed = resumptions(client)
        assert streams_during(client, model, kill) == undisturbed
        if resumptions(client) > resumed:
            return
    raise AssertionError(f"none of {_MAX_KILLS} killed replicas had a running stream")


def resumptions(client: OpenAI) -> float:
    """How often a stream continued at another replica."""
    return metric(client, "spotune:stream_resumptions_total")


def metric(client: OpenAI, name: str) -> float:
    """The sum of a metric over its labels; 0 without any."""
    page = client.get("/../metrics", cast_to=str)
    return sum(float(line.rpartition(" ")[2]) for line in page.splitlines() if line.startswith(f"{name}{{"))
