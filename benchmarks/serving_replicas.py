"""Many replicas of a small model on one GPU: memory and time of 1 to 40 replicas that share one copy of the weights.

Usage:
    python -m benchmarks.serving_replicas --output benchmarks/results/serving_replicas.json

A GPT-2 of 124 million random parameters in bfloat16, so nothing is downloaded. Each replica is a process with the
engine on transformers, started as `Replica` does, but without Ray: it takes its requests from a pipe. All 1,000
requests are sent at once, each to the replica with the fewest unfinished ones, as Ray Serve would choose. There is no
gateway, and tokens do not leave the replica one by one. The time ends with the last answer.

The result is written after each step. `--seconds` ends the measurements early; what is missing then is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import ctypes
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

NEW_TOKENS, PROMPT_TOKENS, REQUESTS, VOCABULARY = 64, 64, 1000, 50_257
COUNTS, OWN_COUNTS, LARGE_COUNTS = (1, 5, 10, 20, 30, 40), (1, 10, 20), (20, 40)
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


def block_instead_of_spinning() -> None:
    """Let this process sleep while it waits for the GPU. By default it spins, and takes a processor from others.

    Raises:
        RuntimeError: the driver refuses.
    """
    driver, device = ctypes.CDLL("libcuda.so.1"), ctypes.c_int()
    blocking_sync = 4  # CU_CTX_SCHED_BLOCKING_SYNC
    codes = [driver.cuInit(0), driver.cuDeviceGet(ctypes.byref(device), 0)]
    codes.append(driver.cuDevicePrimaryCtxSetFlags_v2(device, blocking_sync))
    if any(codes):
        raise RuntimeError(f"the driver returned {codes}")


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
            block_instead_of_spinning()
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

        from spotune_serve.engine.load import load_adapters, load_model
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


class Benchmark:
    """All measurements, with one result file."""

    def __init__(self, options: argparse.Namespace, folder: Path, sockets: Path) -> None:
        self._options, self._folder, self._sockets = options, folder, sockets
        self._began, self._block = time.monotonic(), False
        self.result: dict[str, Any] = {"requests": REQUESTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}

    def step(self, name: str, measure: Callable[..., None], *arguments: Any) -> None:
        """Run a part, whose own entry in the result it fills; an error is written instead of ending the others."""
        if self.left() < 0:
            self.result.setdefault("not_measured", []).append(name)
            return
        entry: dict[str, Any] = self.result.setdefault(name, {})
        began = time.monotonic()
        try:
            measure(entry, *arguments)
        except Exception as error:  # noqa: BLE001 - reported
            entry["error"] = f"{type(error).__name__}: {error}"
        entry["seconds_of_this_part"] = round(time.monotonic() - began, 1)
        self.write()
        print(name, json.dumps(entry), flush=True)

    def left(self) -> float:
        """Seconds that are left."""
        return float(self._options.seconds - (time.monotonic() - self._began))

    def write(self) -> None:
        """Write what is known so far."""
        self._options.output.parent.mkdir(parents=True, exist_ok=True)
        self._options.output.write_text(json.dumps(self.result, indent=1) + "\n")

    def launch(self, mode: str) -> ReplicaProcess:
        """Start a process, without waiting."""
        return ReplicaProcess(mode, self._folder, self._sockets, self._options.device, self._block)

    def checks(self, entry: dict[str, Any]) -> None:
        """Shared weights give the same bits, also after the first replica died; the death of the holder is seen."""
        with stopping() as replicas:
            replicas += [self.launch(mode) for mode in ("plain", "own", "shared", "shared")]
            plain, own, first, second = (replica.wait_until_ready() for replica in replicas)
            expected = plain.ask(logits=True)["digest"]
            entry["logits_bit_for_bit_after_page_locked_copy"] = own.ask(logits=True)["digest"] == expected
            entry["logits_bit_for_bit"] = [
                replica.ask(logits=True)["digest"] == expected for replica in (first, second)
            ]
            answers = own.ask(requests=[0])["answers"]
            entry["answer_equal"] = [replica.ask(requests=[0])["answers"] == answers for replica in (first, second)]
            entry["healthy"] = [replica.ask(health=True)["error"] == "" for replica in (first, second)]
            first.stop()
            entry["logits_equal_after_the_first_replica_was_killed"] = second.ask(logits=True)["digest"] == expected
            entry["answer_equal_after_the_first_replica_was_killed"] = second.ask(requests=[0])["answers"] == answers
            os.kill(second.ask()["holder"], signal.SIGKILL)
            began = time.monotonic()
            while not (error := second.ask(health=True)["error"]) and time.monotonic() < began + 10:
                time.sleep(0.01)
            entry["health_check_after_the_holder_was_killed"] = error
            entry["seconds_until_it_failed"] = round(time.monotonic() - began, 3)
            third = self.launch("shared")
            replicas.append(third)
            entry["next_replica_has_a_new_holder"] = third.wait_until_ready().ask(logits=True)["digest"] == expected

    def memory(self, entry: dict[str, Any]) -> None:
        """What one added process takes on the GPU, with nothing else running: by the stages of its start."""
        with stopping() as replicas:
            probe = self.launch("shared").wait_until_ready()
            replicas.append(probe)
            for mode in ("context", "own", "shared"):
                before = self._settled(lambda: int(probe.ask()["gpu_used"]))
                added = self.launch(mode).wait_until_ready()
                replicas.append(added)
                found: dict[str, Any] = {"context": added.stages["context"]["gpu_used"] - before}
                if mode != "context":
                    weights = added.stages["weights"]
                    found["weights"] = weights["gpu_used"] - added.stages["context"]["gpu_used"]
                    found["weights_by_pytorch"] = weights["allocated"]
                    found["load_seconds"], found["start_seconds"] = weights["load_seconds"], added.start_seconds
                    served = added.ask(requests=list(range(DEFAULT_BATCH)))
                    found["kernels_and_cache_of_a_batch"] = served["gpu_used"] - weights["gpu_used"]
                    found["of_these_by_pytorch"] = served["reserved"] - weights["reserved"]
                    found["gpu_used_more_in_all"] = served["gpu_used"] - before
                entry[f"added_bytes_{mode}"] = found
                added.stop()
                replicas.remove(added)

    def _settled(self, used: Callable[[], int]) -> int:
        """Bytes in use on the GPU, once they do not change."""
        last = -1
        while (now := used()) != last:
            last = now
            time.sleep(0.3)
        return last

    def _empty(self) -> int:
        """Bytes in use on the GPU, by nvidia-smi, once the holder of the part before has ended."""
        deadline = time.monotonic() + 15
        while list(self._sockets.glob("*.socket")) and time.monotonic() < deadline:
            time.sleep(0.2)
        return self._settled(gpu_used)

    def fleet(self, entry: dict[str, Any], mode: str, counts: Sequence[int], block: bool = False) -> None:
        """Replicas are added until each of the counts is reached, and take all requests then."""
        self._block = block
        empty = self._empty()
        with stopping() as replicas:
            for count in counts:
                if self.left() < 0:
                    return
                replicas += [self.launch(mode) for _ in range(count - len(replicas))]
                for replica in replicas:
                    replica.wait_until_ready()
                for replica in replicas:
                    replica.send(requests=[REQUESTS, REQUESTS + 1])  # warm
                memory = [replica.read() for replica in replicas]
                found: dict[str, Any] = {"gpu_bytes_before_requests": gpu_used() - empty}
                entry[str(count)] = found
                rounds = 2 if count >= LARGE_COUNTS[0] else 1
                found[f"seconds_batch_{DEFAULT_BATCH}"] = [self._round(replicas, memory) for _ in range(rounds)]
                found["gpu_bytes_after_requests"] = gpu_used() - empty
                found["pytorch_bytes_a_replica"] = sum(each.get("reserved", 0) for each in memory) // count
                self.write()
                if count in LARGE_COUNTS:
                    for limit in (SMALL_BATCH, DEFAULT_BATCH):
                        memory = self._all(replicas, limit=limit)
                        if limit == SMALL_BATCH:
                            found[f"seconds_batch_{limit}"] = [self._round(replicas, memory) for _ in range(rounds)]
                    self.write()
        for key in (f"seconds_batch_{limit}" for limit in (DEFAULT_BATCH, SMALL_BATCH)):
            at_20, at_40 = (entry.get(str(count), {}).get(key) for count in (20, 40))
            if at_20 and at_40:
                entry[f"{key}_of_40_by_20"] = round(min(at_40) / min(at_20), 3)

    def _all(self, replicas: Sequence[ReplicaProcess], **command: Any) -> list[dict[str, Any]]:
        for replica in replicas:
            replica.send(**command)
        return [replica.read() for replica in replicas]

    def _round(self, replicas: Sequence[ReplicaProcess], memory: list[dict[str, Any]]) -> float:
        """Seconds for all requests."""
        numbers: list[list[int]] = [[] for _ in replicas]
        for number in range(REQUESTS):
            min(numbers, key=len).append(number)
        start = time.monotonic()
        for replica, mine in zip(replicas, numbers, strict=True):
            replica.send(requests=mine)
        memory[:] = [replica.read() for replica in replicas]
        if sum(len(each["answers"]) for each in memory) != REQUESTS:
            raise RuntimeError("answers are missing")
        return round(float(max(each["finished"] for each in memory)) - start, 3)


def copy_rates(entry: dict[str, Any], folder: Path, size: int = 4 * 2**30) -> None:
    """GB/s to the GPU from the page cache: pageable, through page-locked buffers, and from page-locked memory."""
    import torch
    from safetensors.torch import load_file, save_file

    from spotune_serve.engine.weights.block import bytes_of, fill, layout_of

    file = folder / "large.safetensors"
    part = torch.zeros(size // 64, dtype=torch.uint8)
    save_file({str(number): part.clone() for number in range(64)}, file)
    entry["bytes"], entry["threads"] = size, torch.get_num_threads()
    block = torch.empty(size, dtype=torch.uint8, device="cuda")

    def rate(copy: Any) -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        copy()
        torch.cuda.synchronize()
        return round(size / (time.perf_counter() - start) / 1e9, 2)

    def fill_from_file() -> None:
        weights = load_file(file)
        layout = layout_of(weights)
        assert bytes_of(layout) == size
        fill(block, weights, layout)

    def pageable() -> None:
        for number, tensor in enumerate(load_file(file).values()):
            block[number * len(tensor) : (number + 1) * len(tensor)].copy_(tensor)

    pinned = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    for name, copy in {"pageable": pageable, "through_page_locked_buffers": fill_from_file}.items():
        entry[f"{name}_gb_per_second"] = [rate(copy) for _ in range(2)]
    warm = load_file(file)
    for tensor in warm.values():
        tensor[::4096].sum()
    layout = layout_of(warm)
    entry["through_page_locked_buffers_of_mapped_pages_gb_per_second"] = rate(lambda: fill(block, warm, layout))
    locked = [rate(lambda: block[: 2**30].copy_(pinned)) for _ in range(2)]
    entry["page_locked_gb_per_second"] = [round(value * 2**30 / size, 2) for value in locked]


def gpu_used() -> int:
    """Bytes in use on the GPU; 0 without one."""
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", "--id=0"]
    try:
        return int(subprocess.run(command, capture_output=True, text=True, check=True).stdout) * 2**20
    except (OSError, subprocess.CalledProcessError):
        return 0


@contextlib.contextmanager
def stopping() -> Iterator[list[ReplicaProcess]]:
    """A list of processes, which are killed at the end."""
    replicas: list[ReplicaProcess] = []
    try:
        yield replicas
    finally:
        for replica in replicas:
            replica.stop()


@contextlib.contextmanager
def multi_process_service(folder: Path) -> Iterator[None]:
    """CUDA's multi-process service (MPS), for the processes that start meanwhile: their kernels run side by side."""
    names = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "mps"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "mps-log")}
    for path in names.values():
        Path(path).mkdir()
    os.environ.update(names)
    try:
        subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=20)
        yield
    finally:
        with contextlib.suppress(OSError, subprocess.SubprocessError):
            subprocess.run(["nvidia-cuda-mps-control"], input="quit -t 5\n", text=True, check=False, timeout=20)
        for name in names:
            del os.environ[name]


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("build/serving_replicas.json"))
    parser.add_argument("--seconds", type=float, default=250.0, help="time after which no new measurement starts")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="a tiny model, to try the script on processors")
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--replica", choices=("shared", "own", "plain", "context"), help=argparse.SUPPRESS)
    parser.add_argument("--block", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--sockets", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        asyncio.run(Served(options).run())
        return
    with tempfile.TemporaryDirectory() as name:
        measure(options, Path(name))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """All parts, the most important ones first."""
    import torch
    import transformers

    sockets = folder / "sockets"
    cuda = options.device == "cuda"
    benchmark = Benchmark(options, folder / "model", sockets)
    benchmark.result |= {
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "processors": os.cpu_count(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "bytes_of_weights": save_model(folder / "model", options.small),
    }
    benchmark.step("checks", benchmark.checks)
    if cuda:
        benchmark.step("memory", benchmark.memory)
    benchmark.step("shared", benchmark.fleet, "shared", options.counts)

    if not cuda:
        return

    def with_mps(entry: dict[str, Any]) -> None:
        with multi_process_service(folder):
            benchmark.fleet(entry, "shared", LARGE_COUNTS)

    benchmark.step("shared_without_spinning", benchmark.fleet, "shared", LARGE_COUNTS, True)
    benchmark.step("own", benchmark.fleet, "own", OWN_COUNTS)
    benchmark.step("copies", copy_rates, folder)
    benchmark.step("shared_with_mps", with_mps)


if __name__ == "__main__":
    main()
