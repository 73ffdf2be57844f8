"""What `spotune init` decides on: profiles of the rows, of the model and of the machine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from spotune.plan.architecture import Architecture
from spotune_trainer.cli.init.formats.profile import ColumnProfile, RowFormat


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
        config: Configuration of a dataset on the Hub, if one was asked for.
        split: Split of it, if one was asked for.
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
    config: str = ""
    split: str = ""


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
