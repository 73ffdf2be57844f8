"""Speed of the preparation of shards with one and two processes, beside `datasets.map`.

Usage:
    python -m benchmarks.preparation_speed --output benchmarks/results/preparation_speed.json

The rows are the source files of Python's standard library, in pieces of at most 4,000 characters, ten times over, as
JSON lines. The tokenizer is a byte-level BPE of 16,384 tokens that is trained on a part of them. Each way runs in
turns, several times, in a process of its own, with one thread of the tokenizer in each process: the preparation to MDS
shards (`spotune shard`), and tokenization by `datasets.map` to an Arrow file. The times include the start of the pools,
not the imports before. `datasets` is no dependency of spotune (`uv pip install --target FOLDER --no-deps datasets
pyarrow pandas dill multiprocess xxhash fsspec`, and FOLDER in PYTHONPATH).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from tests.provenance import commit, machine

_PIECE_CHARACTERS = 4_000
_VOCABULARY = 16_384
_MAX_LENGTH = 1_024
_COPIES = 10
_PROCESSES = (1, 2)


def pieces() -> Iterator[str]:
    """The text of the rows."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).rglob("*.py")):
        if "site-packages" in path.parts:
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        yield from (text[start : start + _PIECE_CHARACTERS] for start in range(0, len(text), _PIECE_CHARACTERS))


def write_inputs(folder: Path) -> int:
    """Write the rows and the tokenizer; returns the number of rows."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as ByteLevelDecoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from tokenizers.trainers import BpeTrainer
    from transformers import PreTrainedTokenizerFast

    rows = [text for text in pieces() if text.strip()]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in rows)
    (folder / "rows.jsonl").write_text(lines * _COPIES, encoding="utf-8")
    backend = Tokenizer(BPE())
    backend.pre_tokenizer = ByteLevel(add_prefix_space=False)
    backend.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(vocab_size=_VOCABULARY, special_tokens=["<pad>", "</s>"], show_progress=False)
    backend.train_from_iterator(islice(rows, 0, None, 10), trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>")
    fast.save_pretrained(folder / "tokenizer")
    return _COPIES * len(rows)


def prepare_shards(folder: Path, processes: int) -> Callable[[], int]:
    """A function that prepares shards and returns the tokens written."""
    from transformers import AutoTokenizer

    from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
    from spotune_trainer.data.rows.options import TextOptions

    text = TextOptions("causal", text="text", max_length=_MAX_LENGTH)
    options = PrepareOptions(text, part_size=1 << 21, processes=processes)
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def run() -> int:
        prepared = prepare([folder / "rows.jsonl"], folder / "out" / "shards", options, tokenizer)
        return int(prepared.manifest["splits"]["train"]["tokens"])

    return run


def map_dataset(folder: Path, processes: int) -> Callable[[], int]:
    """A function that tokenizes with `datasets.map`, 256 rows at once as the preparation does; returns the tokens."""
    import datasets
    import pyarrow.compute
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        encoded = tokenizer(batch["text"], truncation=True, max_length=_MAX_LENGTH)
        return {"input_ids": encoded["input_ids"]}

    def run() -> int:
        rows = datasets.Dataset.from_json(str(folder / "rows.jsonl"), cache_dir=str(folder / "out" / "cache"))
        mapped = rows.map(
            tokenize,
            batched=True,
            batch_size=256,
            num_proc=processes,
            remove_columns=["text"],
            new_fingerprint="mapped",
        )
        return int(pyarrow.compute.sum(pyarrow.compute.list_value_length(mapped.data.column("input_ids"))).as_py())

    return run


WAYS: dict[str, Callable[[Path, int], Callable[[], int]]] = {"spotune": prepare_shards, "datasets": map_dataset}


def measure(way: str, folder: Path, processes: int) -> dict[str, float]:
    """Run one way in a process of its own; returns its seconds, from before the first row was read, and its tokens."""
    shutil.rmtree(folder / "out", ignore_errors=True)
    (folder / "out").mkdir()
    command = [sys.executable, "-m", "benchmarks.preparation_speed", "--run", way, str(folder), str(processes)]
    single_thread = {
        "TOKENIZERS_PARALLELISM": "false",
        "RAYON_NUM_THREADS": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
    }
    found = subprocess.run(command, env=os.environ | single_thread, stdout=subprocess.PIPE, text=True, check=True)
    result: dict[str, float] = json.loads(found.stdout.splitlines()[-1])
    return result


def main() -> None:
    """Measure all ways in turns and write the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", nargs=3, metavar=("WAY", "FOLDER", "PROCESSES"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.run:
        way, folder, processes = options.run
        run = WAYS[way](Path(folder), int(processes))
        began = time.monotonic()
        tokens = run()
        sys.stdout.write(json.dumps({"seconds": round(time.monotonic() - began, 3), "tokens": tokens}) + "\n")
        return
    runs: dict[str, list[dict[str, float]]] = {f"{way} {count}": [] for way in WAYS for count in _PROCESSES}
    with tempfile.TemporaryDirectory() as name:
        rows = write_inputs(Path(name))
        for _ in range(options.repeats):
            for way in WAYS:
                for count in _PROCESSES:
                    runs[f"{way} {count}"].append(measure(way, Path(name), count))
    rates = {name: [round(run["tokens"] / run["seconds"]) for run in found] for name, found in runs.items()}
    medians = {name: statistics.median(found) for name, found in rates.items()}
    speedups = {
        way: statistics.median(two / one for one, two in zip(rates[f"{way} 1"], rates[f"{way} 2"], strict=True))
        for way in WAYS
    }
    result = {
        "commit": commit(),
        "machine": machine(),
        "rows": rows,
        "tokens": {name: found[0]["tokens"] for name, found in runs.items()},
        "tokensPerSecond": rates,
        "medianTokensPerSecond": medians,
        "speedupFromOneToTwoProcesses": {way: round(value, 3) for way, value in speedups.items()},
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
