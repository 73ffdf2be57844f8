"""The README.md of an exported model: what it is, how it was trained, how well it does, how to use it."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import yaml

from spotune.formatting import score, scores_of
from spotune.job import FinetuneJob

_PIPELINES = {"causal": "text-generation", "seq2seq": "text2text-generation"}
_AUTO_MODELS = {"causal": "AutoModelForCausalLM", "seq2seq": "AutoModelForSeq2SeqLM"}

# Field of result.json -> what it is called here, and how it is written.
_FIGURES: Mapping[str, tuple[str, str]] = {
    "evalLoss": ("Evaluation loss", "{:.4f}"),
    "trainLoss": ("Mean training loss", "{:.4f}"),
    "steps": ("Optimizer steps", "{:,}"),
    "samples": ("Samples seen", "{:,}"),
    "wallSeconds": ("Wall clock", "{:,.0f} s"),
    "tokensPerSecond": ("Label tokens per second", "{:,.0f}"),
    "samplesPerSecond": ("Samples per second", "{:,.1f}"),
    "mfu": ("Model FLOPs utilisation", "{:.1%}"),
    "peakMemoryBytes": ("Peak memory of a worker", "{:,} bytes"),
    "restarts": ("Restarts", "{}"),
    "exportSha256": ("SHA-256 of the weights", "`{}`"),
}


def model_card(job: FinetuneJob, figures: Mapping[str, Any]) -> str:
    """Markdown with the Hub's YAML front matter.

    Args:
        job: what was trained.
        figures: fields of `result.json`; unknown ones are None or absent and left out.
    """
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(job), sort_keys=True)}---",
        f"# {job.metadata.name}",
        f"{_origin(job)} Trained with spotune {version('spotune')}.",
        f"## Results\n\n{_table('figure', _results(figures))}",
        f"## Training\n\n{_table('setting', _settings(job))}",
        f"## Use\n\n{_usage(job)}",
    ]
    return "\n\n".join(parts) + "\n"


def _results(figures: Mapping[str, Any]) -> dict[str, str]:
    scores = {metric: score(metric, value) for metric, value in scores_of(figures).items()}
    named = {title if title == metric else title.capitalize(): text for metric, (title, text) in scores.items()}
    return named | {
        title: text.format(figures[name]) for name, (title, text) in _FIGURES.items() if figures.get(name) is not None
    }


def _front_matter(job: FinetuneJob) -> dict[str, Any]:
    model = job.spec.model
    matter: dict[str, Any] = {
        "library_name": "transformers",
        "pipeline_tag": _PIPELINES[model.task],
        "tags": ["spotune"],
    }
    if model.initialise == "pretrained" and model.source.startswith("hf://"):
        matter["base_model"] = model.source.removeprefix("hf://")
    return matter


def _origin(job: FinetuneJob) -> str:
    model = job.spec.model
    if model.initialise == "random":
        return f"{'An encoder-decoder' if model.task == 'seq2seq' else 'A decoder'} trained from scratch."
    return f"Finetuned from `{model.source}` at revision `{model.revision}`."


def _settings(job: FinetuneJob) -> dict[str, str]:
    training, dataset = job.spec.training, job.spec.dataset
    length = {"Epochs": training.epochs, "Steps at most": training.max_steps}
    return {
        "Precision": job.spec.model.dtype,
        **{title: f"{value:,}" for title, value in length.items() if value is not None},
        "Global batch size": f"{training.global_batch_size} samples",
        "Optimizer": training.optimizer,
        "Learning rate": f"{training.learning_rate:g}, {training.scheduler}",
        "Weight decay": f"{training.weight_decay:g}",
        "Largest gradient norm": f"{training.max_grad_norm:g}" if training.max_grad_norm else "not clipped",
        "Longest sequence": f"{dataset.max_length} tokens",
        "Seed": str(training.seed),
    }


def _usage(job: FinetuneJob) -> str:
    prompt = job.spec.dataset.prompt
    template = f"The prompt it was trained with:\n\n```\n{prompt}\n```\n\n" if prompt else ""
    return f"""{template}```sh
spotune predict DIRECTORY "your question"
```

```python
from transformers import {_AUTO_MODELS[job.spec.model.task]}, AutoTokenizer

model = {_AUTO_MODELS[job.spec.model.task]}.from_pretrained(directory)
tokenizer = AutoTokenizer.from_pretrained(directory)
```"""


def _table(title: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {title} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join(lines)
