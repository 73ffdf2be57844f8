"""CEL rules of the objectives kto and embedding, for the training section and for the whole spec."""

from typing import Final

from spotune.crd.cel_rules import Rule

TRAINING_RULES: Final = (
    *(
        Rule(f"self.objective == 'kto' || self.preference.{field} == 1.0", "is only used by kto", f"preference.{field}")
        for field in ("desirableWeight", "undesirableWeight")
    ),
    Rule(
        "self.objective == 'embedding' || (self.embedding.pooling == 'mean' && self.embedding.normalize && "
        "self.embedding.temperature == 0.05)",
        "is only used by the objective embedding",
        "embedding",
    ),
    Rule(
        "self.objective != 'embedding' || self.globalBatchSize > 1",
        "must be at least 2: embedding needs other rows in a step as negatives",
        "globalBatchSize",
    ),
)

_KTO = (
    Rule("self.training.objective == 'kto' || self.dataset.label == ''", "is only used by kto", "dataset.label"),
    *(
        Rule(
            f"self.training.objective != 'kto' || self.dataset.{field} == ''",
            "kto learns from answers with a label: set prompt, completion and label instead, or messages and label",
            f"dataset.{field}",
        )
        for field in ("chosen", "text")
    ),
    Rule(
        "self.training.objective != 'kto' || self.dataset.label != '' || "
        "(self.dataset.completion == '' && self.dataset.messages == '')",
        "is required by kto: set the column that says whether an answer is desirable",
        "dataset.label",
    ),
    Rule(
        "self.training.objective != 'kto' || !self.dataset.packing",
        "is not supported for kto, whose labels belong to one row each: remove it",
        "dataset.packing",
    ),
    Rule(
        "self.training.objective != 'kto' || self.dataset.trainOn != 'all'",
        "all is not supported for kto, which learns from the last message: remove it",
        "dataset.trainOn",
    ),
)

_EMBEDDING = (
    Rule(
        "self.training.objective == 'embedding' || self.dataset.query == ''",
        "is only used by embedding",
        "dataset.query",
    ),
    *(
        Rule(
            f"self.training.objective != 'embedding' || self.dataset.{field} == ''",
            "embedding learns from texts: set query and positive instead",
            f"dataset.{field}",
        )
        for field in ("completion", "text", "messages", "chosen")
    ),
    Rule(
        "self.training.objective != 'embedding' || !has(self.adapter)",
        "is not supported for embedding: remove it",
        "adapter",
    ),
    Rule(
        "self.training.objective != 'embedding' || !has(self.serving)",
        "is not supported for embedding, whose model generates no text: remove it",
        "serving",
    ),
)

SPEC_RULES: Final = (*_KTO, *_EMBEDDING)
