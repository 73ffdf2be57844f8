"""Answers of an exported model, asked the way it was trained: same template, same tokens, same ends of text."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import TemplateError

from spotune.errors import UsageError
from spotune_trainer.data.tokenization import RowError, Template, cut_prompt, encode_prompts
from spotune_trainer.export.huggingface import MANIFEST, ExportManifest
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.decoding import generate_texts, greedy_config
from spotune_trainer.models.pretrained import load_exported

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BATCH_SIZE = 8


@dataclass(frozen=True)
class Answer:
    """One answer, with the prompt that the model was given."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Predictor:
    """An exported model, ready to be asked."""

    manifest: ExportManifest
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, directory: Path) -> Predictor:
        """The model of an export or job directory, on the GPU if there is one.

        Raises:
            UsageError: the directory is neither.
            JobError: what is in it cannot be loaded.
        """
        export = find_export(directory)
        manifest = ExportManifest.read(export)
        model, tokenizer = load_exported(export, manifest.task)
        module: torch.nn.Module = model
        module.to("cuda" if torch.cuda.is_available() else "cpu")
        return cls(manifest, model, tokenizer)

    def prompt(self, question: str, fields: Mapping[str, Any]) -> str:
        """The text that the model is given for a question.

        Raises:
            UsageError: the fields are not those of the template that the model was trained with.
        """
        if self.manifest.messages:
            return self._chat(question, fields)
        if not self.manifest.prompt:
            if fields:
                raise UsageError("this model was trained without a prompt template: give a plain text, without fields.")
            return question
        template = Template(self.manifest.prompt)
        try:
            return template.render(fill_fields(template.columns, self.manifest.prompt, question, fields))
        except RowError as error:
            raise UsageError(f"the prompt {self.manifest.prompt!r} cannot be filled: {error}.") from error

    def answer(self, prompts: Sequence[str], max_new_tokens: int | None = None) -> Iterator[Answer]:
        """Greedy answers to prompts, in their order.

        Args:
            prompts: as `prompt` made them.
            max_new_tokens: longest answer; by default that of the training's evaluation.
        """
        config = greedy_config(self.model.generation_config, max_new_tokens or self.manifest.max_new_tokens)
        for start in range(0, len(prompts), _BATCH_SIZE):
            batch = prompts[start : start + _BATCH_SIZE]
            texts = generate_texts(self.model, self.tokenizer, self._encode(batch), config)
            yield from (Answer(prompt, text) for prompt, text in zip(batch, texts, strict=True))

    def _chat(self, question: str, fields: Mapping[str, Any]) -> str:
        column = self.manifest.messages
        if bool(question) == (column in fields):
            raise UsageError(f"give a question, or a JSON object with a list of chat messages as {column!r}.")
        messages = fields.get(column, [{"role": "user", "content": question}])
        try:
            return str(self.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError, TypeError, KeyError) as error:
            raise UsageError(f"the model's chat template refuses the messages: {error}") from error

    def _encode(self, prompts: Sequence[str]) -> list[list[int]]:
        encoded = self._encode_all(prompts)
        if not all(encoded):
            raise UsageError("the prompt is empty: there is nothing to answer.")
        return encoded

    def _encode_all(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids as in training: seq2seq inputs are cut to `maxLength`; a chat has its special tokens already."""
        if self.manifest.task == "seq2seq":
            encoded = encode_prompts(self.tokenizer, "seq2seq", prompts)
            return [cut_prompt(ids, self.manifest.max_length, int(self.tokenizer.eos_token_id)) for ids in encoded]
        if self.manifest.messages:
            ids: list[list[int]] = self.tokenizer(list(prompts), add_special_tokens=False)["input_ids"]
            return ids
        return encode_prompts(self.tokenizer, "causal", prompts)


def find_export(directory: Path) -> Path:
    """The export directory that is meant: the folder itself, or `export` in a job's folder.

    Raises:
        UsageError: neither holds an exported model.
    """
    job = JobDirectory(directory)
    for candidate in (directory, job.export):
        if (candidate / MANIFEST).is_file():
            return candidate
    if not directory.is_dir():
        raise UsageError(f"there is no directory {directory}.")
    if job.job.exists():
        raise UsageError(
            f"{directory} has no exported model yet: the run has not ended. Run it on, or export its last "
            f"checkpoint with `spotune checkpoint export {directory}`."
        )
    raise UsageError(f"{directory} is neither an exported model (with a {MANIFEST}) nor the directory of a run.")


def fill_fields(columns: Sequence[str], template: str, question: str, fields: Mapping[str, Any]) -> dict[str, Any]:
    """The template's columns with their values: given fields, and the question for the one that is left.

    Raises:
        UsageError: a field is unknown, several are left, or none is left for the question.
    """
    missing = [name for name in columns if name not in fields]
    if not question and not missing:
        return dict(fields)  # a whole row of a data set may have more columns than the prompt needs
    unknown = [name for name in fields if name not in columns]
    if unknown:
        raise UsageError(f"the prompt {template!r} has no field {unknown[0]!r}; it has {', '.join(columns) or 'none'}.")
    if not question:
        raise UsageError(f"the prompt {template!r} also needs {', '.join(missing)}: give {_as_options(missing)}.")
    if len(missing) != 1:
        hint = (
            f"give {_as_options(missing)}, or a JSON object with all of them" if missing else "leave the question out"
        )
        raise UsageError(f"the question cannot be placed in the prompt {template!r}: {hint}.")
    return {**fields, missing[0]: question}


def parse_question(text: str) -> tuple[str, dict[str, Any]]:
    """A question as plain text, or as the fields of a JSON object."""
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except ValueError:
            return text, {}
        if isinstance(value, dict):
            return "", value
    return text, {}


def read_questions(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The questions of a file, a line each: plain text, a JSON string, or a JSON object of fields.

    Raises:
        UsageError: the file cannot be read, holds no question, or a line is JSON of another kind.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the questions in {path} cannot be read: {error}.") from error
    json_lines = path.suffix in {".jsonl", ".json", ".ndjson"}
    questions = [
        _json_question(line, f"{path}:{number}") if json_lines else parse_question(line)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not questions:
        raise UsageError(f"{path} holds no question.")
    return questions


def _json_question(line: str, place: str) -> tuple[str, dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(
            f"{place} is not JSON: {error}. For plain text, a question a line, name the file *.txt."
        ) from error
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict):
        return "", value
    raise UsageError(f"{place} is {value!r}; a question is a JSON string or an object of fields.")


def _as_options(names: Sequence[str]) -> str:
    return " ".join(f"--field {name}=..." for name in names)
