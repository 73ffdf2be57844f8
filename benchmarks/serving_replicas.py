"""Many replicas of a small model on one GPU: memory and time of 1 to 40 replicas that share one copy of the weights.

Usage:
    python -m benchmarks.serving_replicas --output benchmarks/results/serving_replicas.json

A GPT-2 of 124 million random parameters in bfloat16, so nothing is downloaded. Each replica is a process with the
engine on transformers, started as `Replica` does, but without Ray: it takes its requests from a pipe. All 1,000
requests are sent at once, each to the replica with the fewest unfinished ones, as Ray Serve would choose. There is no
gateway, and tokens do not leave the replica one by one. The time ends with the last answer. The first round loads
kernels and is not counted; the ratio of 40 to 20 replicas is that of the medians of the rounds after it.

The result is written after each step. `--seconds` ends the measurements early; what is missing then is not in it.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serving_replicas_process import (
    DEFAULT_BATCH,
    NEW_TOKENS,
    PROMPT_TOKENS,
    REQUESTS,
    SMALL_BATCH,
    ReplicaProcess,
    Served,
    save_model,
)
from tests.provenance import commit

PARTS = ("checks", "memory", "shared", "shared_without_spinning", "own", "copies", "shared_with_mps")
COUNTS, OWN_COUNTS, LARGE_COUNTS = (1, 5, 10, 20, 30, 40), (1, 10, 20), (20, 40)


class Benchmark:
    """All measurements, with one result file."""

    def __init__(self, options: argparse.Namespace, folder: Path, sockets: Path) -> None:
        self._options, self._folder, self._sockets = options, folder, sockets
        self._began, self._block = time.monotonic(), False
        self.result: dict[str, Any] = {"requests": REQUESTS, "prompt_tokens": PROMPT_TOKENS, "new_tokens": NEW_TOKENS}

    def step(self, name: str, measure: Callable[..., None], *arguments: Any) -> None:
        """Run a part, whose own entry in the result it fills; an error is written instead of ending the others."""
        if name not in self._options.parts:
            return
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
                rounds = self._options.rounds if count >= LARGE_COUNTS[0] else 1
                found["seconds_of_the_first_round"] = self._round(replicas, memory)
                found[f"seconds_batch_{DEFAULT_BATCH}"] = [self._round(replicas, memory) for _ in range(rounds)]
                found["gpu_bytes_after_requests"] = gpu_used() - empty
                found["pytorch_bytes_a_replica"] = sum(each.get("reserved", 0) for each in memory) // count
                self.write()
                if count in LARGE_COUNTS and SMALL_BATCH in self._options.batches:
                    for limit in (SMALL_BATCH, DEFAULT_BATCH):
                        memory = self._all(replicas, limit=limit)
                        if limit == SMALL_BATCH:
                            found[f"seconds_batch_{limit}"] = [self._round(replicas, memory) for _ in range(rounds)]
                    self.write()
        for key in (f"seconds_batch_{limit}" for limit in (DEFAULT_BATCH, SMALL_BATCH)):
            at_20, at_40 = (entry.get(str(count), {}).get(key) for count in (20, 40))
            if at_20 and at_40:
                entry[f"{key}_of_40_by_20"] = round(statistics.median(at_40) / statistics.median(at_20), 3)

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
    parser.add_argument("--rounds", type=int, default=5, help="measurements of 20 and 40 replicas, after a first round")
    parser.add_argument("--batches", type=int, nargs="+", choices=(DEFAULT_BATCH, SMALL_BATCH), default=[DEFAULT_BATCH])
    parser.add_argument("--counts", type=int, nargs="+", default=COUNTS)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
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
        "commit": commit(),
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
