"""What is trained on: shards, the text in them, and how raw data becomes shards."""

import re
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from spotune.job.base import NotNegative, Positive, Section, Source, checked_by_server, invalid


def _check_template(template: str) -> str:
    lone = re.search(r"[{}]", re.sub(r"\{\{|\}\}|\{[^{}]+\}", "", template))
    if lone:
        invalid("", f'has a lone {lone.group()} in "{template}"; write it twice for a brace in the text')
    return template


def _check_names_a_column(template: str) -> str:
    if template and not re.search(r"\{[^{}]+\}", re.sub(r"\{\{|\}\}", "", template)):
        invalid(
            "", f'"{template}" has no {{column}} in it, so every row would be the same; write column names in braces'
        )
    return template


_NO_LONE_BRACE = (
    r"self.matches(r'^([^{}]|\{\{|\}\}|\{[^{}]+\})*$')",
    "has a lone brace; write it twice for a brace in the text",
)
_NAMES_A_COLUMN = (
    r"self == '' || self.matches(r'^([^{}]|\{\{|\}\})*\{[^{}]+\}')",
    "has no {column} in it, so every row would be the same; write column names in braces",
)

Template = Annotated[str, AfterValidator(_check_template), checked_by_server(_NO_LONE_BRACE)]
ColumnTemplate = Annotated[
    Template, AfterValidator(_check_names_a_column), checked_by_server(_NO_LONE_BRACE, _NAMES_A_COLUMN)
]


class ShardsSpec(Section):
    """A folder of tokenised shards."""

    source: Source
    """Folder with an index.json: s3://, gs://, az://, hf:// or a path."""
    format: Literal["mds"] = "mds"
    """Shard format: mds is MosaicML streaming's."""


class EvalSpec(Section):
    """What is evaluated on: shards of their own, or a part held out of the training data."""

    source: Source | None = None
    """Folder of evaluation shards."""
    fraction: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Part of the training samples that is held out, between 0 and 1."""
    seed: NotNegative = 42
    """Seed of the choice of held-out samples."""

    @model_validator(mode="after")
    def _exactly_one(self) -> Self:
        if (self.source is None) == (self.fraction is None):
            invalid("", "give exactly one of source (shards of their own) and fraction (held out of the training data)")
        return self


class PrepareSpec(Section):
    """Raw data that is tokenised into shards once, before the first step."""

    source: Source
    """Files or a folder of *.jsonl, *.csv or *.parquet; a pattern such as data/*.jsonl is allowed."""


class CredentialsSpec(Section):
    """Access to an object store."""

    secret_name: str
    """Secret in the job's namespace whose keys become environment variables of the pods."""
    endpoint: str = ""
    """URL of an S3-compatible store; empty: the provider's own."""


class DatasetSpec(Section):
    """The training data, how a row becomes text, and what is held out for evaluation."""

    train: ShardsSpec | None = None
    """Training shards; required unless prepare makes them."""
    eval: EvalSpec | None = None
    """Evaluation data; without it nothing is evaluated."""
    max_length: Positive = 512
    """Longest sequence in tokens; what is longer is cut off, counted and reported."""
    max_completion_length: NotNegative = 0
    """Longest target sequence of a seq2seq model in tokens; 0: maxLength."""
    packing: bool = False
    """Put several short documents into one row of maxLength tokens when shards are made; causal models only."""
    prompt: ColumnTemplate = ""
    """Template of the prompt over the row's columns, such as "{instruction}: {input}"; carries no loss."""
    completion: ColumnTemplate = ""
    """Template of what the model shall answer, such as "{output}"; carries the loss."""
    text: Template = ""
    """Column, or template over columns, of plain text that is learned as a whole."""
    messages: str = ""
    """Column with chat messages (role and content), rendered by the tokenizer's chat template."""
    keep: list[str] = Field(default=[])
    """Columns that are carried into the shards as text, for example the database that a query is run in."""
    prepare: PrepareSpec | None = None
    """Raw data that is made into shards before training; the shards are kept in the job's folder."""
    credentials: CredentialsSpec | None = None
    """Access to the object store that data is read from."""

    @property
    def row_format(self) -> Literal["completion", "text", "messages"] | None:
        """Which of the three forms of text the rows have; None for shards that are ready as they are."""
        if self.completion:
            return "completion"
        if self.text:
            return "text"
        return "messages" if self.messages else None

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.train is None and self.prepare is None:
            invalid("train", "is required: give train.source (a folder of shards) or prepare.source (raw data)")
        return self

    @model_validator(mode="after")
    def _check_row_format(self) -> Self:
        if bool(self.prompt) != bool(self.completion):
            missing = "completion" if self.prompt else "prompt"
            invalid(missing, "prompt and completion go together; plain text goes into text")
        given = [name for name in ("completion", "text", "messages") if getattr(self, name)]
        if len(given) > 1:
            invalid(given[1], "give one of prompt with completion, text, and messages")
        if self.prepare is not None and not given:
            invalid("prepare", "needs to know what to learn: give prompt with completion, text, or messages")
        return self
