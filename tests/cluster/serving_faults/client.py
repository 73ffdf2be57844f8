"""Streams of the `openai` client, run inside the cluster by `python - OPTIONS < client.py`. It imports nothing of ours.

Each stream is read as fast as it comes. The program prints two lines of JSON: the time at which the last stream had its
first text with the number of streams that had ended by then, and later what every stream has seen.
"""

import argparse
import asyncio
import json
import sys
import time
from dataclasses import dataclass, field, fields

import httpx
from openai import APIError, AsyncOpenAI

_TIMEOUT_SECONDS = 900.0


@dataclass
class Stream:
    """What one client has seen. Times are Unix times.

    Attributes:
        number: Which prompt, and the seed.
        text: All text.
        error: Why it ended early; empty if it did not.
        first: Time of the first text; 0 without any.
        last: Time of the last text, or of the error.
        gap: Longest time between two texts, in seconds.
        tokens: Number of generated tokens, as the answer reports it.
        attempts: Number of requests that were sent.
    """

    number: int
    text: str = ""
    error: str = ""
    first: float = 0.0
    last: float = 0.0
    gap: float = 0.0
    tokens: int = 0
    attempts: int = 0
    begun: asyncio.Event = field(default_factory=asyncio.Event, repr=False)

    def add(self, text: str) -> None:
        """Note a new part of the text."""
        now = time.time()
        if self.text:
            self.gap = max(self.gap, now - self.last)
        else:
            self.first = now
            self.begun.set()
        self.text += text
        self.last = now

    def seen(self) -> dict[str, object]:
        """What is printed."""
        return {each.name: getattr(self, each.name) for each in fields(self) if each.repr}


async def read(client: AsyncOpenAI, options: argparse.Namespace, stream: Stream) -> None:
    """Read an answer to its end: greedy for even numbers, sampled with a seed for odd ones."""
    stream.attempts += 1
    try:
        chunks = await client.completions.create(
            model=options.model,
            prompt=f"count from {stream.number} :",
            max_tokens=options.tokens,
            temperature=stream.number % 2,
            seed=stream.number,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in chunks:
            if text := "".join(choice.text for choice in chunk.choices):
                stream.add(text)
            if chunk.usage is not None:
                stream.tokens = chunk.usage.completion_tokens
    except (APIError, httpx.HTTPError, OSError) as error:
        cause = f" ({error.__cause__})" if error.__cause__ is not None else ""
        stream.error, stream.last = f"{type(error).__name__}: {error}{cause}", time.time()
        return
    if not stream.tokens:
        stream.error = "the stream ended without its last part"


async def read_with_retries(client: AsyncOpenAI, options: argparse.Namespace, stream: Stream) -> None:
    """As `read`; a request that was refused before its first text is sent again."""
    deadline = time.time() + options.retry_seconds
    await read(client, options, stream)
    while stream.error and not stream.text and time.time() < deadline:
        await asyncio.sleep(0.5)
        stream.error = ""
        await read(client, options, stream)
    stream.begun.set()


def write(found: object) -> None:
    """Write one line of JSON."""
    sys.stdout.write(json.dumps(found) + "\n")
    sys.stdout.flush()


async def main() -> None:
    """Run all streams at once."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--retry-seconds", type=float, default=0.0)
    options = parser.parse_args()
    streams = [Stream(options.first + number) for number in range(options.streams)]
    url = f"{options.url}/v1"
    async with AsyncOpenAI(base_url=url, api_key="none", max_retries=0, timeout=_TIMEOUT_SECONDS) as client:
        running = [asyncio.create_task(read_with_retries(client, options, stream)) for stream in streams]
        for stream in streams:
            await stream.begun.wait()
        write({"begun": time.time(), "ended": sum(task.done() for task in running)})
        await asyncio.gather(*running)
    write([stream.seen() for stream in streams])


if __name__ == "__main__":
    asyncio.run(main())
