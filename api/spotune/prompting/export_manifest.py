"""How to prompt an exported model: the `spotune.json` of an export directory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from spotune.errors import JobError, UsageError
from spotune.job import FinetuneJob
from spotune.job.training.hyperparameters import LABEL_OBJECTIVES

MANIFEST = "spotune.json"
_EXPORT = "export"
_JOB = "job.json"
"""Names in a job directory (docs/job-directory.md)."""


@dataclass(frozen=True)
class ExportManifest:
    """How to prompt an exported model: the content of its `spotune.json`, which `spotune predict` reads.

    Attributes:
        name: the job's name.
        task: `causal` or `seq2seq`; `reward` for a reward model, which scores answers and generates none;
            `classification` or `tokenClassification` for a classifier of texts or of words.
        prompt: the prompt template of the training data; empty if it had none.
        messages: the column with chat messages, rendered by the tokenizer's chat template; empty if there was none.
            `messages` if the training data was pairs of chats.
        max_length: maximum prompt length in tokens.
        max_new_tokens: maximum answer length in tokens.
        step: optimizer steps that the weights were trained for; None if an older version wrote the export.
        text: of a classifier, the template of the texts, or the column with their words; empty for other models.
    """

    name: str
    task: str
    prompt: str
    messages: str
    max_length: int
    max_new_tokens: int
    step: int | None = None
    text: str = ""

    @classmethod
    def from_job(cls, job: FinetuneJob, step: int | None = None) -> ExportManifest:
        """The manifest of a job's model after this number of steps."""
        dataset, spec = job.spec.dataset, job.spec
        return cls(
            name=job.metadata.name,
            task=spec.model_kind,
            prompt=dataset.prompt,
            messages=dataset.messages or ("messages" if dataset.chosen and not dataset.prompt else ""),
            max_length=dataset.max_length,
            max_new_tokens=spec.training.evaluation.max_new_tokens,
            step=step,
            text=dataset.text if spec.model_kind in LABEL_OBJECTIVES else "",
        )

    @classmethod
    def read(cls, directory: Path) -> ExportManifest:
        """Read the manifest of an export directory.

        Raises:
            JobError: there is none, it is damaged, or another version wrote it.
        """
        path = directory / MANIFEST
        try:
            value = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
            if value is None:
                raise JobError(f"{directory} is not a model exported by spotune: it has no {MANIFEST}.")
            return cls(**value)
        except (TypeError, ValueError) as error:
            raise JobError(f"{path} is damaged or of another version: {error}. Export the model again.") from error

    def check_generates(self, directory: Path) -> None:
        """Raise JobError if the model of this manifest, in `directory`, generates no text."""
        if self.task == "embedding":
            raise JobError(
                f"{directory} is a model with embeddings (training.objective: embedding): it generates no text. "
                "Load it with sentence_transformers.SentenceTransformer."
            )
        if self.task == "reward":
            raise JobError(
                f"{directory} is a reward model (training.objective: reward): it scores answers and generates none. "
                "Load it with transformers.AutoModelForSequenceClassification."
            )
        if self.classifies:
            raise JobError(
                f"{directory} is a classifier (training.objective: {self.task}): it generates no text. Use `spotune "
                f"predict`, or transformers.pipeline."
            )

    @property
    def classifies(self) -> bool:
        """Whether the model gives labels to texts or to words."""
        return self.task in LABEL_OBJECTIVES


def previous_export(export: Path, step: int) -> Path:
    """Where the export of an earlier step is kept when another one takes its place in the folder `export`."""
    return export.with_name(f"previous-{export.name}-step-{step}")


def previous_exports(export: Path) -> dict[int, Path]:
    """The kept exports of earlier steps beside the folder `export`, by step."""
    prefix = previous_export(export, 0).name.removesuffix("0")
    found = ((path.name.removeprefix(prefix), path) for path in export.parent.glob(f"{prefix}*"))
    return {int(step): path for step, path in found if step.isdecimal()}


def find_export(directory: Path) -> Path:
    """The export directory: the given directory itself, or `export` in a job directory.

    Raises:
        UsageError: neither has an exported model.
    """
    for candidate in (directory, directory / _EXPORT):
        if (candidate / MANIFEST).is_file():
            return candidate
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}.")
    if (directory / _JOB).exists():
        raise UsageError(
            f"{directory} has no exported model yet: the run has not finished. Resume it, or export its last "
            f"checkpoint with `spotune checkpoint export {directory}`."
        )
    raise UsageError(f"{directory} is neither an exported model (with a {MANIFEST}) nor a job directory.")
