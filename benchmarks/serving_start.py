"""The start of a replica on processors: how long a model takes to load, and how much memory replicas of one node share.

Usage:
    python -m benchmarks.serving_start --size 110M --output build/serving_start.json

Random weights of a Llama, saved as safetensors, so nothing is downloaded. Every figure is of a fresh process, which
loads the model as a replica does (`mapped`), or loads it and then copies all weights (`copied`), as a loader without
memory mapping would. `cold` drops the file from the page cache before the load. The bytes that the process read from
the disk show whether that worked: on a file system in memory it does not.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, LlamaConfig

from spotune_serve.engine.load import load_model

SIZES: dict[str, dict[str, Any]] = {
    "110M": {
        "vocab_size": 30_522, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12,
        "num_attention_heads": 12,
    },
    "3B": {
        "vocab_size": 128_256, "hidden_size": 3072, "intermediate_size": 8192, "num_hidden_layers": 28,
        "num_attention_heads": 24, "num_key_value_heads": 8,
    },
}  # fmt: skip
"""Configurations: as large as BERT, and Llama 3.2 3B. Input and output embeddings are the same weights."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MODES = ("mapped", "copied")
MEMORY = {"rss": "Rss", "pss": "Pss", "private_copies": "Anonymous", "shared": "Shared_Clean"}
"""Fields of a result and of smaps_rollup. PSS counts a page that several processes map as a part for each of them."""


def save(folder: Path, size: str, dtype: str) -> int:
    """Write a model with random weights; returns the bytes of its files."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=True)
    auto: Any = AutoModelForCausalLM
    auto.from_config(config, dtype=DTYPES[dtype]).save_pretrained(folder)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def drop_from_page_cache(folder: Path) -> None:
    """Write the weights to the disk and drop them from memory."""
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def memory() -> dict[str, int]:
    """The memory of this process in bytes."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()[1:]
    found = {name: int(value.split()[0]) * 1024 for name, _, value in (line.partition(":") for line in lines)}
    return {name: found[field] for name, field in MEMORY.items()}


def bytes_read() -> int:
    """Bytes that this process has read from disks."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(dict(line.split(": ") for line in lines)["read_bytes"])


def run_replica(folder: Path, mode: str) -> None:
    """The fresh process: load the model, report, and report the memory each time that a line arrives."""
    torch.zeros(1)
    before, read = memory(), bytes_read()
    start = time.perf_counter()
    model: Any = load_model(folder)
    if mode == "copied":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    loaded = time.perf_counter()
    with torch.inference_mode():
        model(torch.arange(16)[None])
    times = {"load_seconds": round(loaded - start, 3), "first_pass_seconds": round(time.perf_counter() - loaded, 3)}
    figures = {**times, "bytes_read_from_disk": bytes_read() - read, "bytes_before_load": before}
    print(json.dumps(figures), flush=True)
    for _ in sys.stdin:
        print(json.dumps(memory()), flush=True)


class ReplicaProcess:
    """A fresh process that loads the model.

    Attributes:
        start: its times, the bytes that it read, and its memory before the load.
    """

    def __init__(self, folder: Path, mode: str) -> None:
        command = [sys.executable, "-m", "benchmarks.serving_start", "--replica", mode, "--folder", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.start = self._read()

    def memory(self) -> dict[str, int]:
        """The memory of the process in bytes."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return self._read()

    def stop(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process ended with code {self._process.wait()}")
        values: dict[str, Any] = json.loads(line)
        return values


def measure(folder: Path, mode: str) -> dict[str, Any]:
    """All figures of one way to load: of a process alone, and of two at the same time."""
    drop_from_page_cache(folder)
    first = ReplicaProcess(folder, mode)
    alone = first.memory()
    second = ReplicaProcess(folder, mode)
    together = [first.memory(), second.memory()]
    first.stop()
    second.stop()
    return {
        "cold": first.start,
        "in_page_cache": second.start,
        "bytes_of_one_process": alone,
        "bytes_of_each_of_two_processes": together,
        "pss_of_two_processes": sum(process["pss"] for process in together),
    }


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="110M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--folder", type=Path, help="where to write the model; a temporary folder if not given")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--replica", choices=MODES, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        run_replica(options.folder, options.replica)
        return
    found: dict[str, Any] = {
        "machine": f"{os.cpu_count()} processors, {platform.machine()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "size": options.size,
        "dtype": options.dtype,
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        found["bytes_of_weights"] = save(Path(folder), options.size, options.dtype)
        for mode in MODES:
            found[mode] = measure(Path(folder), mode)
            print(mode, json.dumps(found[mode]), flush=True)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        options.output.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
