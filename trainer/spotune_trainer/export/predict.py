"""Predictions with an exported model, prompted as in training: same template, special tokens and truncation."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from spotune.errors import UsageError
from spotune.prompting.content import render_content, rendering_errors
from spotune.prompting.encoding import encode_for_inference
from spotune.prompting.export_manifest import ExportManifest, find_export
from spotune.prompting.template import fill_prompt
from spotune_trainer.models.decoding import generate_texts, greedy_config
from spotune_trainer.models.pretrained import load_exported

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_BATCH_SIZE = 8
_RENDERING_ERRORS = rendering_errors()


@dataclass(frozen=True)
class Answer:
    """A generated answer with its prompt."""

    prompt: str
    answer: str


@dataclass(frozen=True)
class Predictor:
    """An exported model, loaded for generation."""

    manifest: ExportManifest
    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase

    @classmethod
    def load(cls, directory: Path) -> Predictor:
        """Load the model of an export directory or a job directory, onto the GPU if there is one.

        Raises:
            UsageError: the directory has no exported model.
            JobError: the export cannot be loaded, or is a reward model.
        """
        export = find_export(directory)
        manifest = ExportManifest.read(export)
        manifest.check_generates(export)
        model, tokenizer = load_exported(export, manifest.task)
        module: torch.nn.Module = model
        module.to("cuda" if torch.cuda.is_available() else "cpu")
        return cls(manifest, model, tokenizer)

    def prompt(self, question: str, fields: Mapping[str, Any]) -> str:
        """The prompt for a question, rendered as in training.

        Args:
            question: plain text; empty if the fields are complete.
            fields: values of the prompt template's columns.

        Raises:
            UsageError: the fields do not match the prompt template.
        """
        if self.manifest.messages:
            return self._chat(question, fields)
        if not self.manifest.prompt:
            if fields:
                raise UsageError("this model was trained without a prompt template: pass plain text without fields.")
            return question
        return fill_prompt(self.manifest.prompt, question, fields)

    def answer(self, prompts: Sequence[str], max_new_tokens: int | None = None) -> Iterator[Answer]:
        """Greedily decoded answers, in the order of the prompts.

        Args:
            prompts: results of `prompt`.
            max_new_tokens: maximum answer length in tokens; by default that of the job's evaluation.
        """
        config = greedy_config(self.model.generation_config, max_new_tokens or self.manifest.max_new_tokens)
        for start in range(0, len(prompts), _BATCH_SIZE):
            batch = prompts[start : start + _BATCH_SIZE]
            texts = generate_texts(self.model, self.tokenizer, self._encode(batch), config)
            yield from (Answer(prompt, text) for prompt, text in zip(batch, texts, strict=True))

    def _chat(self, question: str, fields: Mapping[str, Any]) -> str:
        column = self.manifest.messages
        if bool(question) == (column in fields):
            raise UsageError(f"pass a question, or a JSON object with a list of chat messages as {column!r}.")
        messages = fields.get(column, [{"role": "user", "content": question}])

        def render(conversation: list[dict[str, Any]]) -> str:
            return str(self.tokenizer.apply_chat_template(conversation, tokenize=False, add_generation_prompt=True))

        try:
            return render_content(render, messages, _RENDERING_ERRORS)
        except _RENDERING_ERRORS as error:
            raise UsageError(f"the model's chat template cannot render the messages: {error}") from error

    def _encode(self, prompts: Sequence[str]) -> list[list[int]]:
        encoded = encode_for_inference(self.tokenizer, self.manifest, prompts)
        if not all(encoded):
            raise UsageError("the prompt is empty: pass a question.")
        return encoded


def parse_question(text: str) -> tuple[str, dict[str, Any]]:
    """A question as (plain text, no fields), or, if it is a JSON object, as (empty text, its fields)."""
    if text.lstrip().startswith("{"):
        try:
            value = json.loads(text)
        except ValueError:
            return text, {}
        if isinstance(value, dict):
            return "", value
    return text, {}


def read_questions(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The questions in a file, one per line: plain text, a JSON string, or a JSON object of fields.

    Raises:
        UsageError: the file cannot be read or is empty, or a line is neither a JSON string nor a JSON object.
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
        raise UsageError(f"{path} has no questions.")
    return questions


def _json_question(line: str, place: str) -> tuple[str, dict[str, Any]]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise UsageError(
            f"{place} is not JSON: {error}. For plain text with one question per line, name the file *.txt."
        ) from error
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict):
        return "", value
    raise UsageError(f"{place} is {value!r}; a question is a JSON string or an object of fields.")
