"""What `spotune init` decides on: profiles of the rows, of the model and of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spotune.plan.architecture import Architecture

Kind = Literal["text", "number", "boolean", "chat", "answer", "sharegpt", "texts", "numbers", "list", "object"]
"""Kind of a value. chat: a list of messages with role and content. answer: one of the assistant's messages only, whose
prompt is in another column. sharegpt: a list of messages with from and value. texts and numbers: lists of them, such as
words and their labels. list: any other list."""

TEMPLATE_KINDS: frozenset[Kind] = frozenset({"text", "number", "boolean"})
"""Kinds that a template can contain."""


@dataclass(frozen=True)
class ColumnProfile:
    """A column of all rows.

    Attributes:
        name: Its name.
        rows: Rows that have a value other than null.
        empty: Rows whose value is an empty text or list.
        kinds: Number of values by kind.
        missing_at: File and line of the first row without a value; empty if every row has one.
        scripts: Number of letters by Unicode script, in a sample of the rows.
        values: Number of rows by value, as `dataset.labels` names it; of a column with lists, number of their entries.
            Empty if there are too many different values, or long ones, for labels.
    """

    name: str
    rows: int
    empty: int
    kinds: Mapping[Kind, int]
    missing_at: str
    scripts: Mapping[str, int]
    values: Mapping[str, int] = field(default_factory=dict)

    @property
    def kind(self) -> Kind | None:
        """The kind of most values; None if all are null."""
        return max(self.kinds, key=lambda kind: self.kinds[kind], default=None)

    @property
    def fits_templates(self) -> bool:
        """Whether a template can contain every value that is not null."""
        return bool(self.kinds) and self.kinds.keys() <= TEMPLATE_KINDS and not set("{}") & set(self.name)

    @property
    def script(self) -> str:
        """The Unicode script of most letters, such as Latin; empty without letters."""
        return max(self.scripts, key=lambda script: self.scripts[script], default="")


@dataclass(frozen=True)
class RowFormat:
    """How a row becomes text: the fields of `dataset` with these names, and the reason for them.

    With `chosen` and `rejected`, rows are preference pairs: two answers to the same prompt. With `label`, they are
    texts or words with labels if `text` is set, or else answers that are desirable or not.
    """

    prompt: str = ""
    completion: str = ""
    text: str = ""
    messages: str = ""
    tools: str = ""
    chosen: str = ""
    rejected: str = ""
    label: str = ""
    labels: tuple[str, ...] = ()
    label_each_word: bool = False
    query: str = ""
    positive: str = ""
    negative: str = ""
    reason: str = ""

    @property
    def has_labelled_texts(self) -> bool:
        """Whether rows are texts with a label, or words with one each."""
        return bool(self.label and self.text)

    @property
    def has_labelled_answers(self) -> bool:
        """Whether rows are answers that are desirable or not."""
        return bool(self.label and not self.text)

    @property
    def is_plain_text(self) -> bool:
        """Whether rows are plain text, which is packed."""
        return bool(self.text and not self.label)

    @property
    def templates(self) -> str:
        """All templates, one after the other; a column that is no template is in braces."""
        columns = [self.messages, self.tools, *([] if "{" in self.text else [self.text])]
        named = "".join(f"{{{column}}}" for column in columns if column)
        answers = self.prompt + self.completion + self.chosen + self.rejected
        return named + self.text + answers + self.label + self.query + self.positive + self.negative

    @property
    def description(self) -> str:
        """What the rows are, for people."""
        if self.label:
            answers = "answers with a label"
            return "words with labels" if self.label_each_word else "texts with a label" if self.text else answers
        if self.query:
            return "texts that belong together"
        if self.chosen:
            return "preference pairs"
        return "prompt and completion" if self.completion else "plain text" if self.text else "chats"


@dataclass(frozen=True)
class DataProfile:
    """The rows.

    Attributes:
        source: `dataset.prepare.source` of the job file.
        rows: Number of all rows.
        columns: In the order of the first rows.
        format: How a row becomes text.
        measured_rows: Rows that were tokenized; the lengths are theirs.
        duplicates: Those of them whose text equals that of a row before.
        lengths: Number of rows by their length in tokens. For a seq2seq model it is that of the input, for preference
            pairs that of the prompt with the longer answer, for texts that belong together that of the longest.
        target_lengths: The same of a seq2seq model's targets; None for causal models.
        prompt_lengths: Number of rows of a causal model by the tokens before the first one that is trained.
    """

    source: str
    rows: int
    columns: tuple[ColumnProfile, ...]
    format: RowFormat
    measured_rows: int
    duplicates: int
    lengths: Mapping[int, int]
    target_lengths: Mapping[int, int] | None
    prompt_lengths: Mapping[int, int] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelProfile:
    """The model.

    Attributes:
        source: `model.source` of the job file.
        tokenizer: `model.tokenizer` of the job file; empty for the model's own.
        task: causal or seq2seq.
        model_type: Of its configuration, such as llama.
        parameters: Number of parameters.
        architecture: For the memory plan; None for a model type that the plan does not know.
        max_positions: Most tokens that it has positions for; None without a limit.
        has_weights: False for a folder with a configuration only, which is trained from random weights.
        has_chat_template: Whether the tokenizer has one.
        is_encoder: Whether it is an encoder such as BERT, which generates no text.
        classifies_texts: Whether transformers has a class of it with a head for labels of texts.
        separator: What divides texts of one row: the tokenizer's separator token, or a line break.
    """

    source: str
    tokenizer: str
    task: Literal["causal", "seq2seq"]
    model_type: str
    parameters: int
    architecture: Architecture | None
    max_positions: int | None
    has_weights: bool
    has_chat_template: bool
    is_encoder: bool = False
    classifies_texts: bool = True
    separator: str = "\n"


@dataclass(frozen=True)
class MachineProfile:
    """The workers to plan for.

    Attributes:
        gpus: Number of GPUs, one worker each; 0: one worker on the CPU.
        memory_bytes: Memory of one worker.
        description: What the device is, and how that is known.
        bfloat16: Whether the GPUs compute in bfloat16.
        plan_options: Options with which `spotune plan` plans for this device.
    """

    gpus: int
    memory_bytes: int
    description: str
    bfloat16: bool = True
    plan_options: str = ""

    @property
    def workers(self) -> int:
        """Number of workers."""
        return max(self.gpus, 1)


@dataclass(frozen=True)
class Choice:
    """A field of the job file and the reason for its value.

    Attributes:
        path: camelCase path, such as `spec.training.epochs`.
        value: Its value; None leaves the field out, and the reason remains as a comment.
        reason: What was observed, why the value was chosen, and what to change.
    """

    path: str
    value: Any
    reason: str = ""
