"""The training data: shards, how a row becomes text, and how raw data becomes shards."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from spotune.custom_resource.base import (
    NonNegativeInt,
    PositiveInt,
    Section,
    Source,
    invalid,
    with_cel_rules,
)


def _check_template(template: str) -> str:
    lone = re.search(r"[{}]", re.sub(r"\{\{|\}\}|\{[^{}]+\}", "", template))
    if lone:
        invalid("", f'has an unmatched {lone.group()} in "{template}"; write it twice for a literal brace')
    return template


def _check_names_a_column(template: str) -> str:
    if template and not re.search(r"\{[^{}]+\}", re.sub(r"\{\{|\}\}", "", template)):
        invalid(
            "", f'"{template}" has no {{column}} in it, so every row would be the same; write column names in braces'
        )
    return template


_NO_LONE_BRACE = (
    r"self.matches(r'^([^{}]|\{\{|\}\}|\{[^{}]+\})*$')",
    "has an unmatched brace; write it twice for a literal brace",
)
_NAMES_A_COLUMN = (
    r"self == '' || self.matches(r'^([^{}]|\{\{|\}\})*\{[^{}]+\}')",
    "has no {column} in it, so every row would be the same; write column names in braces",
)

Template = Annotated[str, AfterValidator(_check_template), with_cel_rules(_NO_LONE_BRACE)]
ColumnTemplate = Annotated[
    Template, AfterValidator(_check_names_a_column), with_cel_rules(_NO_LONE_BRACE, _NAMES_A_COLUMN)
]


class ShardsSpec(Section):
    """A folder of tokenized shards."""

    source: Source
    """Folder with an index.json: s3://, gs://, az://, hf:// or a path."""
    format: Literal["mds"] = "mds"
    """Shard format. mds: the format of MosaicML Streaming."""


class EvalSpec(Section):
    """The evaluation data: separate shards, or a part held out of the training data."""

    source: Source | None = None
    """Folder of evaluation shards."""
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Fraction of the training samples to hold out, between 0 and 1."""
    seed: NonNegativeInt = 42
    """Random seed for choosing the held-out samples."""

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.source is None) == (self.fraction is None):
            invalid(
                "",
                "set exactly one of source (separate evaluation shards) and fraction (held out of the training data)",
            )
        return self


class PrepareSpec(Section):
    """Raw data to tokenize into shards once, before the first step."""

    source: Source
    """Files or a folder of *.jsonl, *.csv or *.parquet. Patterns such as data/*.jsonl are allowed."""


class CredentialsSpec(Section):
    """Access to an object store."""

    secret_name: str
    """Secret in the job's namespace. Its keys become environment variables of the pods."""
    endpoint: str = ""
    """URL of an S3-compatible store. Empty: the provider's default."""


class DatasetSpec(Section):
    """The training data, how a row becomes text, and what is held out for evaluation."""

    train: ShardsSpec | None = None
    """Training shards. Required unless prepare creates them."""
    eval: EvalSpec | None = None
    """Evaluation data. Without it, no evaluation runs."""
    max_length: PositiveInt = 512
    """Maximum sequence length in tokens. Longer sequences are truncated, counted and reported."""
    max_completion_length: NonNegativeInt = 0
    """Maximum target length of a seq2seq model in tokens. 0: same as maxLength."""
    packing: bool = False
    """Pack several short documents into one row of maxLength tokens when shards are created. Causal models only."""
    prompt: ColumnTemplate = ""
    """Prompt template over the row's columns, such as "{instruction}: {input}". The loss excludes its tokens."""
    completion: ColumnTemplate = ""
    """Template of the expected answer, such as "{output}". The loss is computed on its tokens."""
    text: Template = ""
    """Column, or template over columns, of plain text. The loss is computed on all of it."""
    messages: str = ""
    """Column with chat messages (role and content), rendered with the tokenizer's chat template."""
    chosen: ColumnTemplate = ""
    """Template of the preferred answer, such as "{chosen}", for the objectives dpo, orpo and simpo. With prompt: the
    answer to it. Without prompt: a column with a chat whose last message is the answer."""
    rejected: ColumnTemplate = ""
    """Template of the answer that is not preferred, in the same form as chosen."""
    tools: str = ""
    """Column with the tools that the chat's assistant may call: a list of JSON schemas. Empty or null: none."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """The text of a chat that the loss is computed on: every assistant message, only the last, or all text."""
    train_trailing_whitespace: bool = False
    """Also compute the loss on whitespace that the chat template writes after the token that ends a turn."""
    max_skipped: NonNegativeInt = 0
    """Maximum assistant messages to leave out because the chat template does not render them as they are."""
    keep: list[str] = Field(default=[])
    """Columns to keep in the shards as text, for example the database that a query runs in."""
    prepare: PrepareSpec | None = None
    """Raw data to convert into shards before training. The shards are stored in the job's folder."""
    credentials: CredentialsSpec | None = None
    """Credentials for the object store that data is read from."""

    @property
    def row_format(self) -> Literal["completion", "text", "messages", "chosen"] | None:
        """Which row format is configured; None for shards that need no conversion. chosen: pairs of answers."""
        if self.completion:
            return "completion"
        if self.chosen:
            return "chosen"
        if self.text:
            return "text"
        return "messages" if self.messages else None

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.train is None and self.prepare is None:
            invalid("train", "is required: set train.source (a folder of shards) or prepare.source (raw data)")
        return self

    @model_validator(mode="after")
    def _check_row_format(self) -> Self:
        if bool(self.chosen) != bool(self.rejected):
            missing = "rejected" if self.chosen else "chosen"
            invalid(missing, "chosen and rejected must be set together")
        if bool(self.prompt) != bool(self.completion) and not (self.prompt and self.chosen):
            missing = "completion" if self.prompt else "prompt"
            invalid(missing, "prompt and completion must be set together; for plain text use text")
        given = [name for name in ("completion", "text", "messages", "chosen") if getattr(self, name)]
        if len(given) > 1:
            invalid(given[1], "set only one of prompt with completion, text, messages, or chosen with rejected")
        if self.prepare is not None and not given:
            reason = "requires a row format: set prompt with completion, text, messages, or chosen with rejected"
            invalid("prepare", reason)
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        if self.chosen and self.packing:
            invalid("packing", "is not supported for pairs: chosen and rejected already share a row")
        for name in ("chosen", "rejected"):
            template = getattr(self, name)
            if template and not self.prompt and not re.fullmatch(r"\{[^{}]+\}", template):
                example = f'"{{{name}}}"'
                invalid(name, f"without prompt, must be one column with a chat, such as {example}: set prompt for text")
        return self

    @model_validator(mode="after")
    def _check_chat_fields(self) -> Self:
        for name in ("tools", "train_on", "train_trailing_whitespace", "max_skipped"):
            field = type(self).model_fields[name]
            if not self.messages and getattr(self, name) != field.default:
                invalid(field.alias or name, "is only for chats: set messages, the column with the chat, or remove it")
        return self
