"""One replica of `benchmarks.serving_replicas` as a process of its own, without Ray, and the model that it serves."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

NEW_TOKENS, PROMPT_TOKENS, REQUESTS, VOCABULARY = 64, 64, 1000, 50_257
DEFAULT_BATCH, SMALL_BATCH = 32, 8
"""The engine's default, and a limit with which 20 replicas have as many full batches to decode as 40."""
ROOT = Path(__file__).parent.parent


def save_model(folder: Path, small: bool) -> int:
    """Write the model; returns the bytes of its weights."""
    import torch
    from transformers import AutoModelForCausalLM, GPT2Config

    torch.manual_seed(0)
    sizes: dict[str, Any] = {"n_embd": 64, "n_layer": 2, "n_head": 2} if small else {}
    auto: Any = AutoModelForCausalLM
    # Wider than GPT-2's 0.02: with it, random models answer with one token over and over.
    model = auto.from_config(GPT2Config(initializer_range=0.1, **sizes), dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


class Served:
    """What a replica process does."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._engine: Any = None
        self._model: Any = None
        self._shared: Any = None
        self._loaded: Any = None
        self._cuda = options.device == "cuda"

    async def run(self) -> None:
        """Start, then obey the commands on standard input; each gets one line of JSON."""
        import torch

        torch.set_num_threads(1)
        self._say({"stage": "imported"})
        if self._options.block:
            from spotune_serve.engine.gpu_waits import sleep_during_gpu_waits

            assert sleep_during_gpu_waits()
        if self._cuda:
            torch.zeros(1, device="cuda").add_(1).item()
        self._say({"stage": "context", **self._memory()})
        if self._options.replica == "context":
            sys.stdin.readline()
            return
        start = time.monotonic()
        self._load()
        self._say({"stage": "weights", "load_seconds": round(time.monotonic() - start, 3), **self._memory()})
        while line := await asyncio.to_thread(sys.stdin.readline):
            self._say(await self._obey(json.loads(line)))

    def _load(self) -> None:
        import torch

        from spotune_serve.engine.weights.load import load_adapters, load_model
        from spotune_serve.engine.weights.shared import share_weights

        folder = Path(self._options.folder)
        if self._options.replica == "own":
            model: Any = load_model(folder, self._options.device)
        elif self._options.replica == "plain":
            model = load_model(folder).to(self._options.device)
        else:
            model = load_model(folder)
            device = torch.device("cuda", 0) if self._cuda else torch.device("cpu")
            sockets = Path(self._options.sockets)
            self._shared = share_weights(model, folder, device, sockets=sockets, linger_seconds=2.0)
        self._model = model
        self._loaded = load_adapters(model, {})
        self._start_engine(DEFAULT_BATCH)

    def _start_engine(self, batch: int) -> None:
        from spotune_serve.engine.transformers_engine import TransformersEngine

        check = self._shared.check if self._shared else lambda: None
        self._engine = TransformersEngine(self._loaded, batch, check_weights=check)

    async def _obey(self, command: dict[str, Any]) -> dict[str, Any]:
        if "limit" in command:
            await self._engine.close()
            self._start_engine(command["limit"])
        if "health" in command:
            return {"error": self._error()}
        if "logits" in command:
            return {"digest": self._digest_of_logits()}
        digests = await asyncio.gather(*(self._answer(number) for number in command.get("requests", ())))
        return {"finished": time.monotonic(), "answers": digests, "holder": getattr(self._shared, "holder", 0)} | (
            self._memory()
        )

    async def _answer(self, number: int) -> str:
        import torch

        from spotune_serve.engine.base import GenerationRequest, SamplingParams

        generator = torch.Generator().manual_seed(number)
        prompt = torch.randint(3, VOCABULARY, (PROMPT_TOKENS,), generator=generator).tolist()
        sampling = SamplingParams(max_tokens=NEW_TOKENS, seed=number, temperature=0.0, ignore_eos=True)
        request = GenerationRequest(str(number), tuple(prompt), sampling)
        tokens = [token.token async for chunk in self._engine.generate(request) for token in chunk.tokens]
        return hashlib.sha256(json.dumps(tokens).encode()).hexdigest()[:16]

    def _digest_of_logits(self) -> str:
        """Of the bits of all logits of a batch."""
        import torch

        ids = torch.arange(4 * 128, device=self._options.device).view(4, 128)
        with torch.inference_mode():
            logits = self._model(ids).logits.float().cpu()
        return hashlib.sha256(logits.numpy().tobytes()).hexdigest()

    def _error(self) -> str:
        try:
            self._engine.check_health()
        except Exception as error:  # noqa: BLE001 - reported
            return f"{type(error).__name__}: {error}"
        return ""

    def _memory(self) -> dict[str, int]:
        """Bytes: of the whole GPU in use, and of this process by PyTorch's allocator, shared memory not counted."""
        import torch

        cuda: Any = torch.cuda
        if not self._cuda or not cuda.is_initialized():
            return {}
        free, total = torch.cuda.mem_get_info()
        return {
            "gpu_used": total - free,
            "allocated": torch.cuda.memory_allocated(),
            "reserved": torch.cuda.memory_reserved(),
        }

    def _say(self, values: dict[str, Any]) -> None:
        print(json.dumps(values), flush=True)


class ReplicaProcess:
    """One replica.

    Attributes:
        stages: memory after each stage of its start, in the order of their names.
        start_seconds: from the start of the process until it could take requests.
    """

    def __init__(self, mode: str, folder: Path, sockets: Path, device: str, block: bool) -> None:
        command = [sys.executable, "-m", "benchmarks.serving_replicas", "--replica", mode, "--device", device]
        command += ["--block"] if block else []
        self._began = time.monotonic()
        self.process = subprocess.Popen(
            [*command, "--folder", str(folder), "--sockets", str(sockets)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"},
        )  # fmt: skip
        self._last = "context" if mode == "context" else "weights"
        self.stages: dict[str, Any] = {}
        self.start_seconds = 0.0

    def wait_until_ready(self) -> ReplicaProcess:
        """Read the stages of its start."""
        while self._last not in self.stages:
            stage = self.read()
            self.stages[stage.pop("stage")] = stage
        self.start_seconds = round(time.monotonic() - self._began, 3)
        return self

    def send(self, **command: Any) -> None:
        """Send a command."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def read(self) -> dict[str, Any]:
        """Wait for an answer."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"a replica ended with code {self.process.wait()}")
        values: dict[str, Any] = json.loads(line)
        return values

    def ask(self, **command: Any) -> dict[str, Any]:
        """Send a command and wait for its answer."""
        self.send(**command)
        return self.read()

    def stop(self) -> None:
        """Kill it."""
        self.process.kill()
        self.process.wait()
