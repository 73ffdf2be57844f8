"""What spans fields, as CEL rules of the API server: the models' own checks, and what is frozen in a running job.

Rules of one text (a source, a template, a duration) stand beside that text's check, in ``spotune.job``. A section that
has a default is always there when a rule runs, and so is each field in it that has one; ``has`` asks for the others.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pydantic import BaseModel

from spotune.job import (
    BackoffSpec,
    DatasetSpec,
    EvalSpec,
    EvaluationSpec,
    ExecutionSpec,
    FinetuneJob,
    FinetuneJobSpec,
    ModelSpec,
    TrainingSpec,
    WorkersSpec,
)
from spotune.job.execution import LOWEST_STAGE
from spotune.job.metadata import MAX_NAME_LENGTH, NAME_PATTERN
from spotune.job.metric import BUILT_IN


@dataclass(frozen=True)
class Rule:
    """One of ``x-kubernetes-validations``.

    Attributes:
        expression: CEL that is true for what is allowed.
        message: What is wrong otherwise and what to do, a sentence without the field's name.
        field: camelCase path of the offending field, relative to the section; empty: the section itself.
        reason: Kind of the error, which the API server says before the message.
    """

    expression: str
    message: str
    field: str = ""
    reason: Literal["FieldValueInvalid", "FieldValueForbidden"] = "FieldValueInvalid"

    def as_json(self) -> dict[str, str]:
        """The rule as the definition holds it."""
        place = {"fieldPath": f".{self.field}"} if self.field else {}
        reason = {"reason": self.reason} if self.reason != Rule.reason else {}
        return {"rule": self.expression, "message": self.message} | place | reason


_WORKERS = (Rule("self.min <= self.count", "must not be more than count", "min"),)

_BACKOFF = (
    Rule(
        "self.initial.contains('d') || self.max.contains('d') || duration(self.initial) <= duration(self.max)",
        "must not be shorter than initial",
        "max",
    ),
)

_MODEL = (
    Rule(
        "self.task != 'seq2seq' || self.dtype != 'float16'",
        "float16 overflows in T5 and models like it (its largest number is 65504): use bfloat16 or float32",
        "dtype",
    ),
)

_EVAL = (
    Rule(
        "has(self.source) != has(self.fraction)",
        "give exactly one of source (shards of their own) and fraction (held out of the training data)",
    ),
)

_DATASET = (
    Rule(
        "has(self.train) || has(self.prepare)",
        "is required: give train.source (a folder of shards) or prepare.source (raw data)",
        "train",
    ),
    Rule(
        "self.prompt == '' || self.completion != ''",
        "prompt and completion go together; plain text goes into text",
        "completion",
    ),
    Rule(
        "self.completion == '' || self.prompt != ''",
        "prompt and completion go together; plain text goes into text",
        "prompt",
    ),
    Rule(
        "[self.completion, self.text, self.messages].filter(form, form != '').size() <= 1",
        "give one of prompt with completion, text, and messages",
    ),
    Rule(
        "!has(self.prepare) || self.completion != '' || self.text != '' || self.messages != ''",
        "needs to know what to learn: give prompt with completion, text, or messages",
        "prepare",
    ),
)


def _name_in_cel(metric: str) -> str:
    """CEL for what the figures of a metric go by; `spotune.job.metric.metric_name` in Python."""
    return f"{metric}.substring({metric}.indexOf(':') + 1)"


_EVALUATION = (
    Rule(
        "self.generate || !self.metrics.exists(metric, metric != 'loss')",
        "all metrics but loss compare generated answers: set generate: true",
        "metrics",
    ),
    Rule(
        f"self.metrics.all(one, !one.contains(':') || !({_name_in_cel('one')} in {list(BUILT_IN)}))",
        "has a function with the name of a metric that there is: give the function another one",
        "metrics",
    ),
    Rule(
        f"self.metrics.all(one, self.metrics.exists_one(other, {_name_in_cel('other')} == {_name_in_cel('one')}))",
        "names a metric twice, or two functions of one name, which their figures go by",
        "metrics",
    ),
    Rule(
        "has(self.sql) || !('executionAccuracy' in self.metrics)",
        "executionAccuracy runs queries: give sql.databases, a folder of <name>.sqlite files",
        "sql",
    ),
    Rule(
        "!has(self.sql) || 'executionAccuracy' in self.metrics",
        "is used by the metric executionAccuracy only, which is not in metrics",
        "sql",
    ),
)

_TRAINING = (
    Rule("has(self.epochs) || has(self.maxSteps)", "says nothing about how long: give epochs, maxSteps, or both"),
    Rule(
        "self.warmupRatio == 0.0 || self.warmupSteps == 0", "give warmupRatio or warmupSteps, not both", "warmupSteps"
    ),
    Rule(
        "self.scheduler != 'constant' || (self.warmupRatio == 0.0 && self.warmupSteps == 0)",
        "constant has no warm-up: use constant_with_warmup",
        "scheduler",
    ),
    Rule("!has(self.maxSteps) || self.warmupSteps <= self.maxSteps", "must not be more than maxSteps", "warmupSteps"),
)


def _nothing_to_evaluate() -> str:
    """CEL that is true for an evaluation section with nothing but its defaults."""
    defaults = EvaluationSpec().model_dump(mode="json", exclude_none=True)
    spelled = {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in defaults.items()}
    given = [f"self.training.evaluation.{name} == {value}" for name, value in spelled.items()]
    return " && ".join([*given, "!has(self.training.evaluation.sql)"])


_SPEC = (
    Rule(
        "self.model.task != 'seq2seq' || !self.dataset.packing",
        "packs documents of causal models only; this job's model.task is seq2seq",
        "dataset.packing",
    ),
    Rule(
        "self.model.task != 'seq2seq' || self.dataset.text == ''",
        "a seq2seq model needs prompt and completion",
        "dataset.text",
    ),
    Rule(
        "self.model.task != 'seq2seq' || self.dataset.messages == ''",
        "a seq2seq model needs prompt and completion",
        "dataset.messages",
    ),
    Rule(
        "self.model.task == 'seq2seq' || self.dataset.maxCompletionLength == 0",
        "is for seq2seq models; maxLength bounds prompt and completion together",
        "dataset.maxCompletionLength",
    ),
    Rule(
        f"has(self.dataset.eval) || ({_nothing_to_evaluate()})",
        "has nothing to evaluate on: give dataset.eval a source or a fraction",
        "training.evaluation",
    ),
    Rule(
        "!self.training.evaluation.generate || self.dataset.text == ''",
        "needs prompts to answer; dataset.text is learned as a whole",
        "training.evaluation.generate",
    ),
    Rule(
        "!has(self.training.evaluation.sql) || !has(self.dataset.prepare) || "
        "self.training.evaluation.sql.column in self.dataset.keep",
        "must carry the column that training.evaluation.sql.column names into the shards",
        "dataset.keep",
    ),
    Rule(
        "type(self.execution.microBatchSize) != int || self.execution.microBatchSize <= self.training.globalBatchSize",
        "must not be more than training.globalBatchSize",
        "execution.microBatchSize",
    ),
    Rule(
        "self.output.mergeAdapter || has(self.adapter)",
        "there is no adapter: leave it out",
        "output.mergeAdapter",
    ),
    Rule(
        "self.output.mergeAdapter || self.model.initialise == 'pretrained'",
        "an adapter alone needs the weights it was trained beside, which a model from scratch has nowhere: use true",
        "output.mergeAdapter",
    ),
    Rule(
        "!has(self.adapter) || self.adapter.quantization == 'none' || self.execution.offload != 'parameters'",
        "parameters cannot be quantised: use optimizer or none",
        "execution.offload",
    ),
    Rule(
        "!has(self.adapter) || self.adapter.quantization == 'none' || self.execution.zeroStage != 3",
        "3 cannot shard quantised weights: use auto, or 2 at most",
        "execution.zeroStage",
    ),
)

_EXECUTION = (
    Rule(
        "self.offload == 'none' || type(self.zeroStage) != int || "
        f"self.zeroStage >= (self.offload == 'optimizer' ? {LOWEST_STAGE['optimizer']} : {LOWEST_STAGE['parameters']})",
        "cannot offload: use auto, or 1 at least for the optimizer and 3 for the parameters",
        "zeroStage",
    ),
    Rule(
        "self.flopsProfile == 0 || self.attention != 'flash_attention_2'",
        "counts nothing of flash_attention_2: leave it out, or use attention sdpa or eager",
        "flopsProfile",
    ),
)

_NAME = (
    Rule(
        f"self.metadata.name.size() <= {MAX_NAME_LENGTH}",
        f"metadata.name: {MAX_NAME_LENGTH} characters at most leave room for the names of the job's pods",
    ),
    Rule(
        f"self.metadata.name.matches('^{NAME_PATTERN}$')",
        "metadata.name: use a-z, 0-9 and - only, no - at either end, so that pods and services can be named after it",
    ),
)

_GROWING: Final = ("epochs", "maxSteps")
"""How long a job trains may be extended while it does."""
_FROZEN_SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "model": ModelSpec,
    "dataset": DatasetSpec,
    "training": TrainingSpec,
}
"""With the adapter, the sections that say what is trained."""
_UNTIL_THE_FIRST_CHECKPOINT: Final = "!has(self.status) || !has(self.status.lastCheckpoint)"


def _frozen() -> Iterator[Rule]:
    """Once there is a checkpoint it fits no other model, adapter, data or optimization; those may only go on longer.

    An update of the spec comes with the stored status, so that nobody thaws a job by leaving its status out.
    """
    yield _frozen_field("spec.adapter", optional=True)
    for section, model in _FROZEN_SECTIONS.items():
        for name, field in model.model_fields.items():
            if field.alias not in _GROWING:
                optional = not field.is_required() and field.default is None
                yield _frozen_field(f"spec.{section}.{field.alias or name}", optional=optional)
    for name in _GROWING:
        yield Rule(
            f"{_UNTIL_THE_FIRST_CHECKPOINT} || !has(self.spec.training.{name}) || "
            f"(has(oldSelf.spec.training.{name}) && self.spec.training.{name} >= oldSelf.spec.training.{name})",
            "may only grow since the first checkpoint: give a larger number, or leave it out for no limit",
            f"spec.training.{name}",
            "FieldValueForbidden",
        )


def _frozen_field(path: str, *, optional: bool) -> Rule:
    new, old = f"self.{path}", f"oldSelf.{path}"
    same = f"has({new}) == has({old}) && (!has({new}) || {new} == {old})" if optional else f"{new} == {old}"
    return Rule(
        f"{_UNTIL_THE_FIRST_CHECKPOINT} || ({same})",
        "what is trained is frozen since the first checkpoint: undo the change, or make a job of another name",
        path,
        "FieldValueForbidden",
    )


RULES: Final[Mapping[type[BaseModel], Sequence[Rule]]] = {
    ModelSpec: _MODEL,
    WorkersSpec: _WORKERS,
    BackoffSpec: _BACKOFF,
    EvalSpec: _EVAL,
    DatasetSpec: _DATASET,
    EvaluationSpec: _EVALUATION,
    TrainingSpec: _TRAINING,
    ExecutionSpec: _EXECUTION,
    FinetuneJobSpec: _SPEC,
    FinetuneJob: (*_NAME, *_frozen()),
}
"""The rules of each section."""
