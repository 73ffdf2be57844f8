"""CEL rules of the dataset section of FinetuneJobs."""

from typing import Final

from spotune.crd.cel_rules import Rule, merged

EVAL_RULES: Final = (
    Rule(
        "has(self.source) != has(self.fraction)",
        "set exactly one of source (separate evaluation shards) and fraction (held out of the training data)",
    ),
)

PREPARE_RULES: Final = tuple(
    rule
    for field in ("config", "split")
    for rule in (
        Rule(
            f"self.{field} == '' || self.source.startsWith('hf://')",
            "is only for datasets on the Hugging Face Hub, hf://datasets/owner/name: remove it",
            field,
        ),
        Rule(
            f"self.{field} == '' || !self.source.matches(r'[*?\\[]')",
            "cannot be combined with a pattern, which names files itself: remove one of them",
            field,
        ),
    )
)

MIXTURE_SOURCE_RULES: Final = (
    Rule(
        "has(self.train) != has(self.prepare)",
        "set exactly one of train.source (a folder of shards) and prepare.source (raw data)",
    ),
    Rule("self.untilStep == 0 || self.untilStep > self.fromStep", "must be more than fromStep, or 0", "untilStep"),
)

_MIXTURE = (
    *(
        Rule(
            f"self.mixture.size() == 0 || !has(self.{field})",
            "cannot be combined with mixture: make it a source of the mixture",
            field,
        )
        for field in ("train", "prepare")
    ),
    Rule("self.mixture.size() > 0 || !has(self.mixtureTemperature)", "is only used with mixture", "mixtureTemperature"),
    Rule(
        "self.mixture.all(one, self.mixture.exists_one(other, other.name == one.name))",
        "has two sources of the same name: give each its own name",
        "mixture",
    ),
    Rule(
        "!has(self.mixtureTemperature) || !self.mixture.exists(source, has(source.weight))",
        "cannot be combined with weights: remove it, or the weights of all sources",
        "mixtureTemperature",
    ),
    Rule(
        "self.mixture.all(source, has(source.weight)) || !self.mixture.exists(source, has(source.weight))",
        "has sources with and without weight: set weight for all sources, or for none",
        "mixture",
    ),
    Rule(
        "self.mixture.size() == 0 || (self.mixture.exists(source, source.fromStep == 0) && self.mixture.all(one, "
        "one.untilStep == 0 || self.mixture.exists(other, other.fromStep <= one.untilStep && "
        "(other.untilStep == 0 || other.untilStep > one.untilStep))))",
        "has no source for some steps: change fromStep or untilStep of a source",
        "mixture",
    ),
    Rule(
        "self.mixture.size() == 0 || !has(self.eval) || !has(self.eval.source)",
        "cannot be combined with mixture: set eval.source of its sources, or eval.fraction",
        "eval.source",
    ),
    Rule(
        "!self.mixture.exists(source, has(source.prepare)) || "
        "[self.completion, self.text, self.messages, self.chosen, self.query].exists(form, form != '')",
        "has raw data but no row format: set prompt with completion, text, messages, chosen with rejected, "
        "or query with positive",
        "mixture",
    ),
)

_DATASET: Final = (
    *_MIXTURE,
    Rule(
        "has(self.train) || has(self.prepare) || self.mixture.size() > 0",
        "is required: set train.source (a folder of shards), prepare.source (raw data), or mixture (several)",
        "train",
    ),
    Rule(
        "self.prompt == '' || self.completion != '' || self.chosen != ''",
        "prompt and completion must be set together; for plain text use text",
        "completion",
    ),
    Rule(
        "self.completion == '' || self.prompt != ''",
        "prompt and completion must be set together; for plain text use text",
        "prompt",
    ),
    Rule(
        "(self.chosen == '') == (self.rejected == '')",
        "chosen and rejected must be set together",
        "rejected",
    ),
    Rule(
        "[self.completion, self.text, self.messages, self.chosen, self.query].filter(form, form != '').size() <= 1",
        "set only one of prompt with completion, text, messages, chosen with rejected, or query with positive",
    ),
    Rule(
        "!has(self.prepare) || "
        "[self.completion, self.text, self.messages, self.chosen, self.query].exists(form, form != '')",
        "requires a row format: set prompt with completion, text, messages, chosen with rejected, "
        "or query with positive",
        "prepare",
    ),
    *(
        Rule(
            f"self.{field} == '' || self.prompt != '' || self.{field}.matches(r'^\\{{[^{{}}]+\\}}$')",
            "without prompt, must be one column with a chat in braces: set prompt for text",
            field,
        )
        for field in ("chosen", "rejected")
    ),
    Rule(
        "self.label == '' || self.label.matches(r'^\\{[^{}]+\\}$')",
        'must be one column in braces, such as "{label}"',
        "label",
    ),
    Rule("self.labels.size() != 1", "needs at least two labels, or there is nothing to learn", "labels"),
    Rule("(self.query == '') == (self.positive == '')", "query and positive must be set together", "positive"),
    Rule("self.negative == '' || self.query != ''", "requires query and positive", "negative"),
    Rule("self.query == '' || !self.packing", "is not supported for texts with embeddings: remove it", "packing"),
    *(
        Rule(
            f"self.messages != '' || {default}",
            "is only for chats: set messages, the column with the chat, or remove it",
            field,
        )
        for field, default in {
            "tools": "(self.chosen != '' && self.prompt == '') || self.tools == ''",
            "trainOn": "self.trainOn == 'assistant'",
            "trainTrailingWhitespace": "!self.trainTrailingWhitespace",
        }.items()
    ),
    Rule(
        "self.maxSkipped == 0 || "
        "[self.completion, self.text, self.messages, self.chosen, self.query].exists(form, form != '')",
        "is only for raw rows, and shards are made already: set a row format, or remove it",
        "maxSkipped",
    ),
)

_SHARED: Final = tuple(f"self.{field}" for field in ("prompt", "completion", "text", "messages", "chosen", "query"))
"""CEL paths that many of the rules read."""

DATASET_RULES: Final = tuple(merged(_DATASET, (), _SHARED, "spec.dataset"))
