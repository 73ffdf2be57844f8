"""A replica with vLLM is killed (`kill -9`) in the middle of streamed answers: do they end with the same text?

Usage, where vllm==0.24.0 and Ray Serve are installed (`benchmarks/gpu_pack_serving.sh`):
    python -m benchmarks.serving_gpu_faults --output benchmarks/results/serving_gpu_faults.json

Two replicas share one GPU behind one gateway, as `spotune serve --replicas 2` starts them. The model is a Llama of 1.1
billion random parameters in bfloat16, so nothing is downloaded. 32 streams run at once, half of them greedy and half
sampled with a seed, with answers of 195 tokens. They run twice without a fault, and once with one: when all have
begun, one of the two replicas is killed. First with batch-invariant kernels, then with the default ones. Set
RAY_AUTH_MODE=token and RAY_AUTH_TOKEN (64 characters).
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import string
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from benchmarks.serving_speed import device
from benchmarks.serving_speed_model import write_tokenizer
from benchmarks.serving_vllm_requests import NEW_TOKENS, write_model
from tests.provenance import commit

STREAMS, PROMPT_WORDS = 32, 200
NAME = "llama"
KILL_AFTER = 20
"""Texts that every stream has got when a replica is killed."""
_REPLICA = "ray::ServeReplica:model"


class Stream:
    """One streamed completion.

    Attributes:
        text: what has arrived.
        texts: number of events with text.
        gap: longest time between two of them, in seconds.
        error: why it ended early; empty if it did not.
    """

    def __init__(self, number: int) -> None:
        draw = random.Random(number)
        words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, 3))) for _ in range(PROMPT_WORDS)]
        self._body = json.dumps({
            "model": NAME, "prompt": " " + " ".join(words), "max_tokens": NEW_TOKENS, "stream": True, "seed": number,
            "temperature": number % 2, "ignore_eos": True,
        })  # fmt: skip
        self.text, self.texts, self.gap, self.error = "", 0, 0.0, ""

    def run(self, url: str) -> Stream:
        """Send the request and read its events."""
        connection = http.client.HTTPConnection(urlsplit(url).netloc, timeout=120)
        try:
            connection.request("POST", "/v1/completions", self._body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise RuntimeError(response.read().decode())
            self._read(response)
        except (OSError, RuntimeError, ValueError, http.client.HTTPException) as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            connection.close()
        return self

    def _read(self, response: http.client.HTTPResponse) -> None:
        last = time.monotonic()
        for line in response:
            content = line.decode().removeprefix("data: ").strip()
            if content == "[DONE]":
                return
            if not content:
                continue
            event = json.loads(content)
            if "error" in event:
                raise RuntimeError(event["error"]["message"])
            text = "".join(choice["text"] for choice in event["choices"])
            if text:
                now = time.monotonic()
                self.gap, last = max(self.gap, now - last if self.texts else 0.0), now
                self.text, self.texts = self.text + text, self.texts + 1
        raise RuntimeError("the stream ended without [DONE]")


@contextmanager
def service(model: Path, *, batch_invariant: bool, scripted: bool) -> Iterator[str]:
    """Two replicas and a gateway; yields the URL."""
    from spotune_serve.deployment import local
    from spotune_serve.deployment.config import GatewayConfig, ModelConfig
    from spotune_serve.gateway.settings import GatewaySettings

    config = ModelConfig(
        directory=model,
        replicas=2,
        engine="transformers" if scripted else "vllm",
        gpus=0.0 if scripted else 0.4,
        batch_invariant=batch_invariant,
        max_batch_size=2 * STREAMS,
        drain_seconds=1.0,
    )
    with local.local_service(GatewayConfig(NAME, GatewaySettings(), drain_seconds=1.0), config, "127.0.0.1", 0) as url:
        yield url


def replicas() -> list[Any]:
    """The processes of the replicas."""
    import psutil  # type: ignore[import-untyped]

    return [process for process in psutil.process_iter(["cmdline"]) if _is_replica(process.info["cmdline"])]


def _is_replica(command: list[str] | None) -> bool:
    return bool(command and command[0].startswith(_REPLICA))


def play(url: str, inject: Callable[[Sequence[Stream]], None] | None = None) -> list[Stream]:
    """All streams at once, with a fault if one is given."""
    streams = [Stream(number) for number in range(STREAMS)]
    with ThreadPoolExecutor(STREAMS) as pool:
        running = [pool.submit(stream.run, url) for stream in streams]
        if inject is not None:
            inject(streams)
        return [each.result() for each in running]


def kill_a_replica(streams: Sequence[Stream]) -> None:
    """Wait until every stream is in mid-answer, and kill one of two replicas."""
    deadline = time.monotonic() + 60
    while min(stream.texts for stream in streams) < KILL_AFTER and time.monotonic() < deadline:
        time.sleep(0.01)
    unfinished = sum(KILL_AFTER <= stream.texts < NEW_TOKENS - 1 for stream in streams)
    if unfinished < STREAMS or len(replicas()) != 2:
        raise RuntimeError(f"{unfinished} of {STREAMS} streams are in mid-answer, {len(replicas())} replicas run")
    replicas()[0].kill()


def measure(url: str) -> dict[str, Any]:
    """What happens to the streams."""
    play(url)  # graphs and kernels
    expected, again = play(url), play(url)
    disturbed = play(url, kill_a_replica)
    failed = [stream.error for stream in (*expected, *again, *disturbed) if stream.error]
    return {
        "streams": STREAMS,
        "failed": len(failed),
        "errors": sorted(set(failed)),
        "different texts": len({stream.text for stream in expected}),
        "equal without a fault": equal(again, expected),
        "equal after the kill": equal(disturbed, expected),
        "equal after the kill, greedy": equal(disturbed[::2], expected[::2]),
        "longest gap without a fault, seconds": round(max(stream.gap for stream in again), 3),
        "longest gap with the kill, seconds": round(max(stream.gap for stream in disturbed), 3),
    }


def equal(found: Sequence[Stream], expected: Sequence[Stream]) -> int:
    """Number of equal texts."""
    return sum(one.text == other.text for one, other in zip(found, expected, strict=True))


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/serving_gpu_faults.json"))
    parser.add_argument("--model", type=Path, help="a small model with a tokenizer, to try the script on processors")
    options = parser.parse_args()
    found: dict[str, Any] = {"commit": commit(), "device": device(), "new tokens": NEW_TOKENS}
    with tempfile.TemporaryDirectory() as work:
        model = options.model or Path(work) / "model"
        if options.model is None:
            write_model(model)
            write_tokenizer(model)
        for name, batch_invariant in {"batch-invariant kernels": True, "default kernels": False}.items():
            if options.model is not None and batch_invariant:
                continue
            began = time.monotonic()
            with service(model, batch_invariant=batch_invariant, scripted=options.model is not None) as url:
                started = round(time.monotonic() - began, 1)
                found[name] = {"start_seconds": started} | measure(url)
            options.output.parent.mkdir(parents=True, exist_ok=True)
            options.output.write_text(json.dumps(found, indent=1) + "\n")
            print(name, json.dumps(found[name]), flush=True)


if __name__ == "__main__":
    main()
