"""The model card: the README.md of an exported model, with its origin, results, training settings and usage."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import version
from typing import Any

import yaml

from spotune.formatting import score, scores_of
from spotune.job import FinetuneJob
from spotune.job.training.hyperparameters import LABEL_OBJECTIVES

_PIPELINES = {
    "causal": "text-generation",
    "seq2seq": "text2text-generation",
    "reward": "text-classification",
    "classification": "text-classification",
    "tokenClassification": "token-classification",
    "embedding": "sentence-similarity",
}
_AUTO_MODELS = {
    "causal": "AutoModelForCausalLM",
    "seq2seq": "AutoModelForSeq2SeqLM",
    "reward": "AutoModelForSequenceClassification",
    "classification": "AutoModelForSequenceClassification",
    "tokenClassification": "AutoModelForTokenClassification",
}
_KINDS = {
    "causal": "decoder-only model",
    "seq2seq": "encoder-decoder model",
    "reward": "reward model",
    "embedding": "model with embeddings",
}

_REWARD = (
    "This is a reward model. It generates no text. Its only logit, for a prompt with its answer, is the reward: higher "
    "for answers like those that were preferred. Rewards compare answers to the same prompt."
)

_EMBEDDING = """```python
from sentence_transformers import SentenceTransformer

model = SentenceTransformer(directory)
queries = model.encode_query(["a question"])
documents = model.encode_document(["a text", "another text"])
print(model.similarity(queries, documents))
```"""

# Field of result.json -> its title in the model card and its number format.
_RESULT_ROWS: Mapping[str, tuple[str, str]] = {
    "evalLoss": ("Evaluation loss", "{:.4f}"),
    "trainLoss": ("Mean training loss", "{:.4f}"),
    "steps": ("Optimizer steps", "{:,}"),
    "exportStep": ("Step of these weights", "{:,}"),
    "samples": ("Samples processed", "{:,}"),
    "wallSeconds": ("Wall-clock time", "{:,.0f} s"),
    "tokensPerSecond": ("Tokens per second", "{:,.0f}"),
    "samplesPerSecond": ("Samples per second", "{:,.1f}"),
    "mfu": ("Model FLOPs utilisation", "{:.1%}"),
    "peakMemoryBytes": ("Peak memory per worker", "{:,} bytes"),
    "restarts": ("Restarts", "{}"),
    "exportSha256": ("SHA-256 of the weights", "`{}`"),
}


def model_card(job: FinetuneJob, result: Mapping[str, Any]) -> str:
    """The model card as Markdown, with the Hub's YAML front matter.

    Args:
        job: the job that trained the model.
        result: fields of `result.json`. Fields that are None or absent are left out.
    """
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(job), sort_keys=True)}---",
        f"# {job.metadata.name}",
        f"{_origin(job)} Trained with spotune {version('spotune')}.",
        f"## Results\n\n{_table('metric', _results(result))}",
        f"## Training\n\n{_table('setting', _settings(job))}",
        f"## Use\n\n{_usage(job)}",
    ]
    return "\n\n".join(parts) + "\n"


def _results(result: Mapping[str, Any]) -> dict[str, str]:
    scores = {metric: score(metric, value) for metric, value in scores_of(result).items()}
    named = {title if title == metric else title.capitalize(): text for metric, (title, text) in scores.items()}
    return named | {
        title: text.format(result[name]) for name, (title, text) in _RESULT_ROWS.items() if result.get(name) is not None
    }


def _front_matter(job: FinetuneJob) -> dict[str, Any]:
    model = job.spec.model
    matter: dict[str, Any] = {
        "library_name": "sentence-transformers" if job.spec.model_kind == "embedding" else "transformers",
        "pipeline_tag": _PIPELINES[job.spec.model_kind],
        "tags": ["spotune", *(["reward-model"] if job.spec.model_kind == "reward" else [])],
    }
    if model.initialise == "pretrained" and model.source.startswith("hf://"):
        matter["base_model"] = model.source.removeprefix("hf://")
    return matter


def _origin(job: FinetuneJob) -> str:
    model = job.spec.model
    if model.initialise == "random":
        return f"Trained from scratch ({_KINDS.get(job.spec.model_kind, 'classifier')})."
    return f"Finetuned from `{model.source}` at revision `{model.revision}`."


def _settings(job: FinetuneJob) -> dict[str, str]:
    training, dataset = job.spec.training, job.spec.dataset
    length = {"Epochs": training.epochs, "Maximum steps": training.max_steps}
    return {
        "Precision": job.spec.model.dtype,
        **{title: f"{value:,}" for title, value in length.items() if value is not None},
        "Global batch size": f"{training.global_batch_size} samples",
        "Optimizer": training.optimizer,
        "Learning rate": f"{training.learning_rate:g}, {training.scheduler}",
        "Weight decay": f"{training.weight_decay:g}",
        "Gradient clipping (maximum norm)": f"{training.max_grad_norm:g}" if training.max_grad_norm else "none",
        **({"NEFTune noise (alpha)": f"{training.neftune_noise_alpha:g}"} if training.neftune_noise_alpha else {}),
        "Maximum sequence length": f"{dataset.max_length} tokens",
        "Seed": str(training.seed),
    }


def _usage(job: FinetuneJob) -> str:
    prompt = job.spec.dataset.prompt
    if job.spec.model_kind == "embedding":
        return _EMBEDDING
    auto_model = _AUTO_MODELS[job.spec.model_kind]
    template = f"The model was trained with this prompt template:\n\n```\n{prompt}\n```\n\n" if prompt else ""
    load = f"""```python
from transformers import {auto_model}, AutoTokenizer

model = {auto_model}.from_pretrained(directory)
tokenizer = AutoTokenizer.from_pretrained(directory)
```"""
    if job.spec.model_kind == "reward":
        return f"{template}{_REWARD}\n\n{load}"
    if job.spec.model_kind in LABEL_OBJECTIVES:
        return _usage_of_classifier(job)
    return f"""{template}```sh
spotune predict DIRECTORY "your question"
```

{load}"""


def _usage_of_classifier(job: FinetuneJob) -> str:
    dataset, pipeline = job.spec.dataset, _PIPELINES[job.spec.model_kind]
    what = "each text" if job.spec.model_kind == "classification" else "each word of a text"
    labels = ", ".join(f"`{label}`" for label in dataset.labels)
    template = f"The texts of the training data were `{dataset.text}`. " if "{" in dataset.text else ""
    return f"""{template}The model gives {what} one of these labels: {labels}.

```python
from transformers import pipeline

classify = pipeline("{pipeline}", directory)
classify("your text")
```

```sh
spotune predict DIRECTORY "your text"
```"""


def _table(title: str, rows: Mapping[str, str]) -> str:
    lines = [f"| {title} | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())]
    return "\n".join(lines)
