"""The start of a replica on processors: how long weights take to load, and how much memory replicas of a node share.

Usage:
    python -m benchmarks.serving_start --size 110M --output benchmarks/results/serving_start.json
    python -m benchmarks.serving_start --size 3B --dtype bfloat16 --output benchmarks/results/serving_start.json

Random weights of a Llama, saved as safetensors, so nothing is downloaded. Every figure is of a fresh process. It loads
the model in one of these ways:

- `mapped`: as a replica does, by mapping the file.
- `object_store`: weights from Ray's object store without a copy, into a pickled model without weights. This is the
  measurement of IBM's and Ray's "340 times faster" (BERT in 0.004 s).
- `copied`: as `mapped`, and then a copy of all weights.
- `ordinary`: a new module with initialized weights, `torch.load` of a file and `load_state_dict`, which was the usual
  way at the time of that measurement, and its baseline.

Each has two times: `load_seconds`, without imports and the connection to Ray, and `from_process_start_seconds`, with
them. `attach_seconds` are of a process that has loaded the model before: `with_model` unpickles the model without
weights and gives it those of the file or of the object store, as in that measurement; `weights_only` replaces the
weights of a model that is there. `cold` drops the file from the page cache before the load. The bytes that the process
read from the disk show whether that worked: on a file system in memory it does not. The object store has no cold start
of its own: its first replica loads the file, copies it into the store (`put_seconds`), and keeps it there.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import pickle
import platform
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig

from spotune_serve.engine.weights.load import load_model
from tests.provenance import commit

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
MODES = ("mapped", "object_store", "copied", "ordinary")
ORDINARY_SIZES = ("110M",)
"""It needs memory for the weights twice."""
SHARING_MODES = ("mapped", "object_store")
ATTACH_ROUNDS = 5
STORE, NAMESPACE = "weights", "serving_start"
"""Name and namespace of the Ray actor that has put the weights into the object store."""
MEMORY = {"rss": "Rss", "pss": "Pss", "private_copies": "Anonymous", "shared": "Shared_Clean"}
"""Fields of a result and of smaps_rollup. PSS counts a page that several processes map as a part for each of them."""


def save(folder: Path, size: str, dtype: str) -> int:
    """Write a model with random weights; returns the bytes of its files."""
    torch.manual_seed(0)
    config = LlamaConfig(**SIZES[size], tie_word_embeddings=True)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=DTYPES[dtype])
    model.save_pretrained(folder, max_shard_size="100GB")
    if size in ORDINARY_SIZES:
        torch.save(model.state_dict(), folder / "weights.pt")
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def drop_from_page_cache(folder: Path) -> None:
    """Write the weights to the disk and drop them from memory."""
    for path in (*folder.glob("*.safetensors"), *folder.glob("*.pt")):
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


def without_weights(model: Any) -> tuple[bytes, dict[str, Any]]:
    """A pickled model whose modules have no parameters, and the parameters as arrays with their types and shapes.

    Empty tensors in their places would take most of the time to unpickle.
    """
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in named.items()}
    places: list[tuple[int, str, str]] = []
    for number, module in enumerate(model.modules()):
        for attribute, parameter in module._parameters.items():
            if parameter is not None:
                places.append((number, attribute, names[id(parameter)]))
                module._parameters[attribute] = None
    arrays = {
        name: (tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy(), tensor.dtype, tensor.shape)
        for name, tensor in named.items()
    }
    return pickle.dumps((model, places), protocol=pickle.HIGHEST_PROTOCOL), arrays


def with_weights(skeleton: bytes, tensors: Mapping[str, Tensor]) -> Any:
    """The model again, with these tensors as its parameters; tied ones stay tied."""
    model, places = pickle.loads(skeleton)  # noqa: S301 - made by this script
    parameters = {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in tensors.items()}
    modules = list(model.modules())
    for number, attribute, name in places:
        modules[number]._parameters[attribute] = parameters[name]
    return model


def tensors_of(arrays: Mapping[str, Any]) -> dict[str, Tensor]:
    """Tensors over the memory of the arrays."""
    return {name: torch.from_numpy(array).view(dtype).view(shape) for name, (array, dtype, shape) in arrays.items()}


class Store:
    """A Ray actor that owns the weights in the object store."""

    def __init__(self, folder: str) -> None:
        import ray

        content = without_weights(load_model(Path(folder)))
        start = time.perf_counter()
        self._reference = ray.put(content)
        self._seconds = round(time.perf_counter() - start, 3)

    def reference(self) -> list[Any]:
        """The reference, in a list so that Ray does not resolve it, and the seconds of the copy into the store."""
        return [self._reference, self._seconds]


def stored() -> Any:
    """The reference of the weights; connects this process to Ray."""
    import ray

    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    ray.init(address=os.environ["RAY_ADDRESS"], namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    return ray.get(ray.get_actor(STORE).reference.remote())[0]


def load_from_store(reference: Any) -> Any:
    """The model, with weights in the object store."""
    import ray

    skeleton, arrays = ray.get(reference)
    return with_weights(skeleton, tensors_of(arrays))


def load_ordinary(folder: Path) -> Any:
    """The model by initialized weights, a pickled file and a copy."""
    config = AutoConfig.from_pretrained(folder)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=config.dtype)
    model.load_state_dict(torch.load(folder / "weights.pt"))
    return model


def load(folder: Path, mode: str, reference: Any) -> Any:
    """The model in one of the ways."""
    if mode == "object_store":
        return load_from_store(reference)
    if mode == "ordinary":
        return load_ordinary(folder)
    model: Any = load_model(folder)
    if mode == "copied":
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
    return model


def run_replica(folder: Path, mode: str) -> None:
    """The fresh process: load the model, report, and report the memory each time that a line arrives."""
    importlib.import_module("transformers.models.llama.modeling_llama")
    reference = stored() if mode == "object_store" else None
    before, read = memory(), bytes_read()
    start = time.perf_counter()
    model = load(folder, mode, reference)
    loaded, finished = time.perf_counter(), time.monotonic()
    with torch.inference_mode():
        model(torch.arange(16)[None])
    times = {"load_seconds": round(loaded - start, 4), "first_pass_seconds": round(time.perf_counter() - loaded, 3)}
    figures = {**times, "bytes_read_from_disk": bytes_read() - read, "bytes_before_load": before, "loaded": finished}
    print(json.dumps(figures), flush=True)
    for _ in sys.stdin:
        print(json.dumps(memory()), flush=True)


def run_attach(folder: Path) -> None:
    """The fresh process: how long the weights of a model that is there take, several times."""
    reference = stored()
    import ray

    skeleton, _ = without_weights(load_model(folder))
    found: dict[str, dict[str, list[float]]] = {"with_model": {}, "weights_only": {}}
    sources: dict[str, Callable[[], dict[str, Tensor]]] = {
        "file": lambda: load_file(folder / "model.safetensors"),
        "object_store": lambda: tensors_of(ray.get(reference)[1]),
    }
    for name, tensors in sources.items():
        model = with_weights(skeleton, tensors())
        for kind, times in found.items():
            for _ in range(ATTACH_ROUNDS):
                start = time.perf_counter()
                if kind == "with_model":
                    model = with_weights(skeleton, tensors())
                else:
                    weights = tensors()
                    for parameter_name, parameter in model.named_parameters():
                        parameter.data = weights[parameter_name]
                times.setdefault(name, []).append(round(time.perf_counter() - start, 5))
    print(json.dumps(found), flush=True)


class ReplicaProcess:
    """A fresh process that loads the model.

    Attributes:
        start: its times, the bytes that it read, and its memory before the load.
    """

    def __init__(self, folder: Path, mode: str) -> None:
        began = time.monotonic()
        command = [sys.executable, "-m", "benchmarks.serving_start", "--replica", mode, "--folder", str(folder)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.start = self._read()
        self.start["from_process_start_seconds"] = round(self.start.pop("loaded") - began, 3)

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
    """All figures of one way to load; of two processes at the same time, where they share memory."""
    found: dict[str, Any] = {}
    if mode != "object_store":
        drop_from_page_cache(folder)
    first = ReplicaProcess(folder, mode)
    found["in_object_store" if mode == "object_store" else "cold"] = first.start
    found["bytes_of_one_process"] = first.memory()
    if mode not in SHARING_MODES:
        first.stop()
    second = ReplicaProcess(folder, mode)
    found["again" if mode == "object_store" else "in_page_cache"] = second.start
    if mode in SHARING_MODES:
        together = [first.memory(), second.memory()]
        found["bytes_of_each_of_two_processes"] = together
        found["pss_of_two_processes"] = sum(process["pss"] for process in together)
        first.stop()
    second.stop()
    return found


def start_store(folder: Path, size: int) -> float:
    """A Ray on this machine with the weights in its object store; returns the seconds of the copy into it."""
    import ray

    context: Any = ray.init(
        num_cpus=1, include_dashboard=False, object_store_memory=int(size * 1.2) + 2**28, namespace=NAMESPACE,
        log_to_driver=False, logging_level=logging.ERROR,
    )  # fmt: skip
    os.environ["RAY_ADDRESS"] = context.address_info["address"]
    actor: Any = ray.remote(num_cpus=0)(Store)
    store = actor.options(name=STORE, lifetime="detached").remote(str(folder))
    return float(ray.get(store.reference.remote())[1])


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="110M")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--folder", type=Path, help="where to write the model; a temporary folder if not given")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--replica", choices=MODES, help=argparse.SUPPRESS)
    parser.add_argument("--attach", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replica:
        run_replica(options.folder, options.replica)
        return
    if options.attach:
        run_attach(options.folder)
        return
    found: dict[str, Any] = {
        "commit": commit(),
        "machine": f"{os.cpu_count()} processors, {platform.machine()}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "dtype": options.dtype,
    }
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        found["bytes_of_weights"] = save(folder, options.size, options.dtype)
        for mode in ("mapped", "copied", *(("ordinary",) if options.size in ORDINARY_SIZES else ())):
            found[mode] = measure(folder, mode)
            write(options, found)
        found["put_seconds"] = start_store(folder, found["bytes_of_weights"])
        found["object_store"] = measure(folder, "object_store")
        found["attach_seconds"] = attach_seconds(folder)
        write(options, found)


def attach_seconds(folder: Path) -> dict[str, Any]:
    """See `run_attach`."""
    command = [sys.executable, "-m", "benchmarks.serving_start", "--attach", "--folder", str(folder)]
    line = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    values: dict[str, Any] = json.loads(line.splitlines()[-1])
    return values


def write(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Write the figures of this size beside those of others."""
    print(json.dumps(found), flush=True)
    if options.output is not None:
        options.output.parent.mkdir(parents=True, exist_ok=True)
        others = json.loads(options.output.read_text()) if options.output.is_file() else {}
        options.output.write_text(json.dumps({**others, options.size: found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
