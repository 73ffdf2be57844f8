"""A steady stream of requests, run as the command of a pod: it needs no connection that a fault of the API server cuts.

It imports nothing of ours. Each of a few clients reads one answer after the other, as fast as it comes, and the program
prints a line of JSON for each of them. A file tells it to end.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path

import httpx
from openai import APIError, AsyncOpenAI

_TIMEOUT_SECONDS = 900.0
_SECONDS_TO_RETRY = 0.5


@dataclass
class Answer:
    """What a client has seen of one request. Times are Unix times.

    Attributes:
        number: Which prompt, and the seed.
        begun: When the request was first sent.
        ended: Time of the last text, or of the error.
        text: All text.
        error: Why it ended early; empty if it did not.
        refused: How often it was refused before its first text, and sent again.
        gap: Longest time between two texts, in seconds.
        heard: The seconds in which text arrived.
    """

    number: int
    begun: float
    ended: float = 0.0
    text: str = ""
    error: str = ""
    refused: int = 0
    gap: float = 0.0
    heard: list[int] = field(default_factory=list)

    def add(self, text: str) -> None:
        """Note a new part of the text."""
        now = time.time()
        if self.text:
            self.gap = max(self.gap, round(now - self.ended, 1))
        if int(now) not in self.heard[-1:]:
            self.heard.append(int(now))
        self.text += text
        self.ended = now


async def read(client: AsyncOpenAI, options: argparse.Namespace, answer: Answer) -> None:
    """Read an answer to its end: greedy for even numbers, sampled with a seed for odd ones."""
    is_whole = False
    try:
        chunks = await client.completions.create(
            model=options.model,
            prompt=f"count from {answer.number} :",
            max_tokens=options.tokens,
            temperature=answer.number % 2,
            seed=answer.number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            if text := "".join(choice.text for choice in chunk.choices):
                answer.add(text)
            is_whole = is_whole or chunk.usage is not None
    except (APIError, httpx.HTTPError, OSError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        answer.error, answer.ended = f"{type(error).__name__}: {error}{cause}", time.time()
        return
    if not is_whole:
        answer.error = "the stream ended without its last part"


async def ask(client: AsyncOpenAI, options: argparse.Namespace, number: int) -> None:
    """One request; sent again for some time if it was refused before its first text."""
    answer = Answer(number, begun=time.time())
    await read(client, options, answer)
    while answer.error and not answer.text and time.time() < answer.begun + options.retry_seconds:
        await asyncio.sleep(_SECONDS_TO_RETRY)
        answer.error, answer.refused = "", answer.refused + 1
        await read(client, options, answer)
    write(asdict(answer))


async def ask_on(client: AsyncOpenAI, options: argparse.Namespace, numbers: Iterator[int]) -> None:
    """One request after the other, until there are no numbers or the file to stop by is there."""
    for number in numbers:
        await ask(client, options, number)
        if options.stop.exists():
            return
        await asyncio.sleep(options.pause)


def write(found: object) -> None:
    """Write one line of JSON."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Run all clients at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--prompts", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True, help="number of requests of each prompt; 0: no limit")
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--retry-seconds", type=float, default=0.0)
    parser.add_argument("--stop", type=Path, default=Path("/tmp/stop"))
    options = parser.parse_args()
    numbers: Iterator[int] = itertools.cycle(range(options.prompts))
    if options.rounds:
        numbers = itertools.islice(numbers, options.rounds * options.prompts)
    async with (
        AsyncOpenAI(base_url=f"{options.url}/v1", api_key="none", max_retries=0, timeout=_TIMEOUT_SECONDS) as client,
        asyncio.TaskGroup() as clients,
    ):
        for _ in range(options.clients):
            clients.create_task(ask_on(client, options, numbers))
    write({"done": time.time()})


if __name__ == "__main__":
    asyncio.run(main())
    time.sleep(86400)  # the pod stays, so that its log can be read
