"""The training data: shards, how a row becomes text, and how raw data becomes shards."""

import re
from collections import Counter
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from spotune.custom_resource.base import (
    NonNegativeInt,
    PositiveInt,
    RawSource,
    Section,
    Source,
    invalid,
    with_cel_rules,
)
from spotune.custom_resource.metadata import MAX_NAME_LENGTH, NAME_PATTERN
from spotune.job.storage import CredentialsSpec

MAX_MIXED_SOURCES = 64
MAX_LABELS = 1000
MAX_HUB_NAME_LENGTH = 200


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


def _check_source_name(name: str) -> str:
    if len(name) > MAX_NAME_LENGTH or not re.fullmatch(NAME_PATTERN, name):
        invalid("", f"{name!r} is not a name of a source: {_SOURCE_NAME_EXPECTED}")
    return name


def _check_hub_name_length(name: str) -> str:
    if len(name) > MAX_HUB_NAME_LENGTH:
        invalid("", f"has {len(name)} characters; at most {MAX_HUB_NAME_LENGTH} are allowed")
    return name


def _check_split_name(name: str) -> str:
    if re.search(r"[][+:%]", name):
        invalid("", f"{name!r} {_NO_SPLIT_EXPRESSION}")
    return name


_NO_SPLIT_EXPRESSION = (
    "is not the name of a split: slices and sums such as train[:10%] or train+test are not supported; name one split, "
    "and take several as sources of a mixture"
)
_SPLIT_NAME = (r"!self.matches(r'[\[\]+:%]')", _NO_SPLIT_EXPRESSION)

_SOURCE_NAME_EXPECTED = (
    f"use a-z, 0-9 and -, start and end with a letter or digit, at most {MAX_NAME_LENGTH} characters"
)
_SOURCE_NAME = (f"self.matches('^{NAME_PATTERN}$')", f"is not a name of a source: {_SOURCE_NAME_EXPECTED}")
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


ConfigName = Annotated[
    str,
    AfterValidator(_check_hub_name_length),
    WithJsonSchema({"type": "string", "maxLength": MAX_HUB_NAME_LENGTH}),
]
SplitName = Annotated[
    str,
    AfterValidator(_check_hub_name_length),
    AfterValidator(_check_split_name),
    with_cel_rules(_SPLIT_NAME, max_length=MAX_HUB_NAME_LENGTH),
]


class PrepareSpec(Section):
    """Raw data to tokenize into shards once, before the first step."""

    source: RawSource
    """Files or a folder of *.jsonl, *.csv, *.parquet or *.arrow, or a dataset, hf://datasets/owner/name. Patterns such
    as data/*.jsonl are allowed. A web server has single files only."""
    config: ConfigName = ""
    """Configuration (subset) of a dataset on the Hugging Face Hub. Default: the default one of its card, or the only
    one."""
    split: SplitName = ""
    """Split of a dataset on the Hugging Face Hub, or of a folder in it, such as train. Required if there are
    several."""

    def __str__(self) -> str:
        """The source, with configuration and split, for messages."""
        named = [f"{name} {value}" for name, value in (("config", self.config), ("split", self.split)) if value]
        return f"{self.source} ({', '.join(named)})" if named else self.source

    @model_validator(mode="after")
    def _check_names_a_dataset(self) -> Self:
        for field in ("config", "split"):
            if not getattr(self, field):
                continue
            if not self.source.startswith("hf://"):
                invalid(field, "is only for datasets on the Hugging Face Hub, hf://datasets/owner/name: remove it")
            if re.search(r"[*?[]", self.source):
                invalid(field, "cannot be combined with a pattern, which names files itself: remove one of them")
        return self


SourceName = Annotated[
    str, AfterValidator(_check_source_name), with_cel_rules(_SOURCE_NAME, max_length=MAX_NAME_LENGTH)
]


class MixtureSourceSpec(Section):
    """A source of a mixture: its data, its share of the samples, and when it is used."""

    name: SourceName
    """Name of the source in logs, results and trackers."""
    train: ShardsSpec | None = None
    """Training shards. Set this or prepare."""
    prepare: PrepareSpec | None = None
    """Raw data to convert into shards before training, with the row format of the dataset. Set this or train."""
    weight: Annotated[float, Field(gt=0)] | None = None
    """Share of the samples, relative to the other sources' weights. Set it for all sources or for none."""
    max_epochs: NonNegativeInt = 0
    """Maximum passes over this source. A run that needs more is refused. 0: no limit."""
    from_step: NonNegativeInt = 0
    """Number of optimizer steps before this source is used."""
    until_step: NonNegativeInt = 0
    """Number of optimizer steps after which this source is not used any more. 0: it is used to the end."""
    eval: EvalSpec | None = None
    """Evaluation data of this source. Default: the fraction of dataset.eval."""

    @model_validator(mode="after")
    def _check_data(self) -> Self:
        if (self.train is None) == (self.prepare is None):
            invalid("", "set exactly one of train.source (a folder of shards) and prepare.source (raw data)")
        return self

    @model_validator(mode="after")
    def _check_steps(self) -> Self:
        if self.until_step and self.until_step <= self.from_step:
            invalid("untilStep", "must be more than fromStep, or 0")
        return self

    def is_used_at(self, step: int) -> bool:
        """Whether samples of this source are trained on in a step, which counts from 0."""
        return self.from_step <= step and (self.until_step == 0 or step < self.until_step)


class DatasetSpec(Section):
    """The training data, how a row becomes text, and what is held out for evaluation."""

    train: ShardsSpec | None = None
    """Training shards. Required unless prepare creates them, or a mixture has them."""
    mixture: list[MixtureSourceSpec] = Field(default=[], max_length=MAX_MIXED_SOURCES)
    """Several sources of training data, instead of train and prepare. Without weights and mixtureTemperature, each
    source's share is that of its samples."""
    mixture_temperature: Annotated[float, Field(ge=1)] | None = None
    """Shares proportional to samples^(1/T), instead of weights. 1: proportional to the samples; the larger, the more
    equal."""
    eval: EvalSpec | None = None
    """Evaluation data. Without it, no evaluation runs. In a mixture: a fraction that is held out of every source
    without eval of its own."""
    max_length: PositiveInt = 512
    """Maximum sequence length in tokens. Longer sequences are truncated, counted and reported."""
    max_completion_length: NonNegativeInt = 0
    """Maximum target length of a seq2seq model in tokens. 0: same as maxLength."""
    packing: bool = False
    """Pack several short documents into one row of maxLength tokens when shards are created, or several pairs into one
    of 2 * maxLength. Causal models only."""
    prompt: ColumnTemplate = ""
    """Prompt template over the row's columns, such as "{instruction}: {input}". The loss excludes its tokens."""
    completion: ColumnTemplate = ""
    """Template of the expected answer, such as "{output}". The loss is computed on its tokens."""
    text: Template = ""
    """Column, or template over columns, of plain text. The loss is computed on all of it."""
    messages: str = ""
    """Column with chat messages (role and content), rendered with the tokenizer's chat template."""
    chosen: ColumnTemplate = ""
    """Template of the preferred answer, such as "{chosen}", for dpo, orpo, simpo and reward. With prompt: the
    answer to it. Without prompt: a column with a chat whose last message is the answer."""
    rejected: ColumnTemplate = ""
    """Template of the answer that is not preferred, in the same form as chosen."""
    label: ColumnTemplate = ""
    """Column with the label of a row, such as "{label}". kto: whether the answer, completion or the last message of
    messages, is desirable: true or false, 1 or 0. classification: a name or a number of labels. tokenClassification: a
    list with the label of each word, and text names the column with the list of words."""
    labels: list[str] = Field(default=[], max_length=MAX_LABELS)
    """For classification and tokenClassification: names of all labels, in the order of the model's outputs. A row may
    name its label by its position here, from 0, unless a name is a number itself."""
    query: ColumnTemplate = ""
    """Template of the text that embedding brings near to positive, such as "{question}" or "query: {question}"."""
    positive: ColumnTemplate = ""
    """Template of the text that is near to query, such as "{passage}". Those of other rows are not."""
    negative: ColumnTemplate = ""
    """Template of a text that resembles positive, but is not near to query (a hard negative)."""
    tools: str = ""
    """Column with the tools that the assistant of a chat, or of a pair of chats, may call: a list of JSON schemas.
    Empty or null: none."""
    train_on: Literal["assistant", "last", "all"] = "assistant"
    """The text of a chat that the loss is computed on: every assistant message, only the last, or all text."""
    train_trailing_whitespace: bool = False
    """Also compute the loss on whitespace that the chat template writes after the token that ends a turn."""
    max_skipped: NonNegativeInt = 0
    """Maximum rows, and assistant messages of chats, of each source to leave out because nothing can be learned from
    them: maxLength leaves nothing to learn, a text or an answer is empty, all messages of a row are marked not to be
    trained on, or the chat template does not render an answer as it is. More than that is refused."""
    keep: list[str] = Field(default=[])
    """Columns to keep in the shards as text, for example the database that a query runs in."""
    prepare: PrepareSpec | None = None
    """Raw data to convert into shards before training. The shards are stored in the job's folder."""
    credentials: CredentialsSpec | None = None
    """Credentials for the object store that data is read from."""

    @property
    def row_format(self) -> Literal["completion", "text", "messages", "chosen", "query"] | None:
        """Which row format is configured; None for shards that need no conversion.

        chosen: pairs of answers. query: texts with embeddings.
        """
        if self.completion:
            return "completion"
        if self.chosen:
            return "chosen"
        if self.query:
            return "query"
        if self.text:
            return "text"
        return "messages" if self.messages else None

    @property
    def has_evaluation(self) -> bool:
        """Whether there is evaluation data: `eval`, or that of a source of the mixture."""
        return self.eval is not None or any(source.eval is not None for source in self.mixture)

    @property
    def prepared_sources(self) -> dict[str, PrepareSpec]:
        """Raw data to convert into shards, by the name of the mixture's source; the name is empty without a mixture."""
        if self.mixture:
            return {source.name: source.prepare for source in self.mixture if source.prepare is not None}
        return {"": self.prepare} if self.prepare is not None and self.train is None else {}

    @model_validator(mode="after")
    def _check_sources(self) -> Self:
        if self.mixture:
            for name in ("train", "prepare"):
                if getattr(self, name) is not None:
                    invalid(name, "cannot be combined with mixture: make it a source of the mixture")
        elif self.train is None and self.prepare is None:
            invalid(
                "train",
                "is required: set train.source (a folder of shards), prepare.source (raw data), or mixture (several)",
            )
        return self

    @model_validator(mode="after")
    def _check_mixture(self) -> Self:
        if self.mixture_temperature is not None and not self.mixture:
            invalid("mixtureTemperature", "is only used with mixture")
        if not self.mixture:
            return self
        [(name, times)] = Counter(source.name for source in self.mixture).most_common(1)
        if times > 1:
            invalid("mixture", f"has {times} sources named {name}: give each its own name")
        weighted = [source.name for source in self.mixture if source.weight is not None]
        if weighted and self.mixture_temperature is not None:
            invalid("mixtureTemperature", "cannot be combined with weights: remove it, or the weights of all sources")
        if weighted and len(weighted) < len(self.mixture):
            without = next(source.name for source in self.mixture if source.weight is None)
            invalid("mixture", f"has weights, but none for {without}: set weight for all sources, or for none")
        for step in (0, *sorted(source.until_step for source in self.mixture if source.until_step)):
            if not any(source.is_used_at(step) for source in self.mixture):
                reason = f"has no source for the steps after step {step}: change fromStep or untilStep of a source"
                invalid("mixture", reason)
        if self.eval is not None and self.eval.source is not None:
            invalid("eval.source", "cannot be combined with mixture: set eval.source of its sources, or eval.fraction")
        return self

    @model_validator(mode="after")
    def _check_row_format(self) -> Self:
        if bool(self.chosen) != bool(self.rejected):
            missing = "rejected" if self.chosen else "chosen"
            invalid(missing, "chosen and rejected must be set together")
        if bool(self.prompt) != bool(self.completion) and not (self.prompt and self.chosen):
            missing = "completion" if self.prompt else "prompt"
            invalid(missing, "prompt and completion must be set together; for plain text use text")
        given = [name for name in ("completion", "text", "messages", "chosen", "query") if getattr(self, name)]
        if len(given) > 1:
            invalid(
                given[1],
                "set only one of prompt with completion, text, messages, chosen with rejected, or query with positive",
            )
        formats = "set prompt with completion, text, messages, chosen with rejected, or query with positive"
        if not given and self.prepare is not None:
            invalid("prepare", f"requires a row format: {formats}")
        if not given and self.prepared_sources:
            invalid("mixture", f"has raw data but no row format: {formats}")
        return self

    @model_validator(mode="after")
    def _check_pairs(self) -> Self:
        for name in ("chosen", "rejected"):
            template = getattr(self, name)
            if template and not self.prompt and not re.fullmatch(r"\{[^{}]+\}", template):
                example = f'"{{{name}}}"'
                invalid(name, f"without prompt, must be one column with a chat, such as {example}: set prompt for text")
        return self

    @model_validator(mode="after")
    def _check_labels(self) -> Self:
        if self.label and not re.fullmatch(r"\{[^{}]+\}", self.label):
            invalid("label", 'must be one column in braces, such as "{label}"')
        if "" in self.labels:
            invalid("labels", "contains an empty name: name the label, or remove it")
        if len(self.labels) == 1:
            invalid("labels", "needs at least two labels, or there is nothing to learn")
        if len(set(self.labels)) < len(self.labels):
            [(name, _)] = Counter(self.labels).most_common(1)
            invalid("labels", f"contains {name!r} twice: each label has one output of the model")
        return self

    @model_validator(mode="after")
    def _check_texts(self) -> Self:
        if bool(self.query) != bool(self.positive):
            invalid("positive" if self.query else "query", "query and positive must be set together")
        if self.negative and not self.query:
            invalid("negative", "requires query and positive")
        if self.query and self.packing:
            invalid("packing", "is not supported for texts with embeddings: remove it")
        return self

    @model_validator(mode="after")
    def _check_chat_fields(self) -> Self:
        has_pairs_of_chats = bool(self.chosen) and not self.prompt
        for name in ("tools", "train_on", "train_trailing_whitespace"):
            field = type(self).model_fields[name]
            if self.messages or (name == "tools" and has_pairs_of_chats):
                continue
            if getattr(self, name) != field.default:
                invalid(field.alias or name, "is only for chats: set messages, the column with the chat, or remove it")
        if self.max_skipped and self.row_format is None:
            invalid("maxSkipped", "is only for raw rows, and shards are made already: set a row format, or remove it")
        return self
