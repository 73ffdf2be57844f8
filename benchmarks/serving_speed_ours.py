"""Our endpoint with what benchmarks need: dummy weights in vLLM, or an engine that plays a script instead of vLLM.

Usage: python -m benchmarks.serving_speed_ours --model FOLDER --port PORT [--engine scripted] [--gateways N]

It starts the service as `spotune serve` does, and runs until SIGTERM.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from spotune_serve.deployment import application, local
from spotune_serve.deployment.config import GatewayConfig, ModelConfig
from spotune_serve.deployment.replica import Replica
from spotune_serve.deployment.token_transport.sender import TokenSender
from spotune_serve.engine.base import EngineStats, GeneratedToken, GenerationRequest, TokenChunk
from spotune_serve.engine.vllm_parameters import VllmSettings
from spotune_serve.gateway.settings import GatewaySettings

NAME = "speed"
STEP_SECONDS = float(os.environ.get("SCRIPTED_STEP_SECONDS", "0.02"))
"""Time between two tokens of the scripted engine."""


class DummyReplica(Replica):
    """A replica whose vLLM fills the weights with random numbers instead of loading them."""

    def __init__(self, config: ModelConfig) -> None:
        from spotune_serve.engine import vllm_engine

        arguments = vars(vllm_engine)["engine_arguments"]

        def dummy_arguments(*values: Any) -> dict[str, Any]:
            found: dict[str, Any] = arguments(*values)
            return found | {"load_format": "dummy"}

        vars(vllm_engine)["engine_arguments"] = dummy_arguments
        super().__init__(config)


class ScriptedEngine:
    """Gives every running sequence one token per step, as an engine with continuous batching does."""

    def __init__(self) -> None:
        self._queues: set[asyncio.Queue[int]] = set()
        self._steps: asyncio.Task[None] | None = None

    async def generate(self, request: GenerationRequest) -> AsyncIterator[TokenChunk]:
        """Tokens of words, `max_tokens` of them."""
        self._steps = self._steps or asyncio.create_task(self._run())
        queue: asyncio.Queue[int] = asyncio.Queue()
        self._queues.add(queue)
        try:
            for number in range(len(request.generated) + 1, request.sampling.max_tokens + 1):
                token = GeneratedToken(await queue.get())
                yield TokenChunk((token,), "length" if number == request.sampling.max_tokens else None)
        finally:
            self._queues.discard(queue)

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        at, number = loop.time(), 0
        while True:
            at = max(at + STEP_SECONDS, loop.time())
            await asyncio.sleep(at - loop.time())
            number += 1
            for queue in self._queues:
                queue.put_nowait(1000 + number % 20_000)

    def stats(self) -> EngineStats:
        """No load."""
        return EngineStats(0, 0, 0)

    def check_health(self) -> None:
        """Always healthy."""


class ScriptedReplica(Replica):
    """A replica with the scripted engine."""

    def __init__(self, _config: ModelConfig) -> None:
        engine: Any = ScriptedEngine()
        self._engine = engine
        self._sender = TokenSender()


def main() -> None:
    """Serve until a signal."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--engine", choices=("vllm", "scripted"), default="vllm")
    parser.add_argument("--memory", type=float, default=0.42, help="Part of the GPU's memory.")
    parser.add_argument("--batch", type=int, default=256, help="Maximum number of sequences at once.")
    parser.add_argument("--gateways", type=int, default=1, help="As that of `spotune serve`.")
    options = parser.parse_args()

    from benchmarks import serving_speed_ours as module  # not __main__: workers of Ray import the class by its name

    scripted = options.engine == "scripted"
    gateway = GatewayConfig(
        NAME, GatewaySettings(max_waiting_requests=4096), drain_seconds=1.0, processes=options.gateways
    )
    config = ModelConfig(
        directory=options.model,
        engine="vllm",
        gpus=0.0 if scripted else options.memory / VllmSettings.memory_fraction,
        max_batch_size=options.batch,
        drain_seconds=1.0,
    )
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    replica = module.ScriptedReplica if scripted else module.DummyReplica
    keep_logs = mock.patch.object(local, "shutil", SimpleNamespace(rmtree=lambda *_, **__: None))
    with (
        mock.patch.object(application, "Replica", replica),
        keep_logs,
        local.local_service(gateway, config, "127.0.0.1", options.port) as url,
    ):
        print(url, flush=True)
        stop.wait()


if __name__ == "__main__":
    main()
