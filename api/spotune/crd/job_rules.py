"""CEL rules of FinetuneJobs that span several fields: the models' checks, and which fields are immutable."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from pydantic import BaseModel

from spotune.crd.cel_rules import NAME_RULES, Rule, frozen_fields, has_defaults, merge, merged, unchanged
from spotune.crd.dataset_rules import DATASET_RULES, EVAL_RULES, MIXTURE_SOURCE_RULES, PREPARE_RULES
from spotune.crd.execution_rules import (
    PRECISION_RULES,
    REPRODUCIBLE_EXECUTION_RULES,
    REPRODUCIBLE_RULES,
    SAME_PRECISION,
)
from spotune.crd.pool_rules import LIMIT_RULES, SUPPLY_RULES, WORKERS_RULES
from spotune.crd.service_rules import SERVING_RULES, SERVING_SECTION_RULES
from spotune.crd.storage_rules import STORAGE_RULES, STORAGE_SECTION_RULES
from spotune.crd.training_rules import TRAINING_RULES
from spotune.crd.user_code_rules import OPTIONAL_SECTIONS, USER_CODE_RULES
from spotune.job import (
    BackoffSpec,
    DatasetSpec,
    EvalSpec,
    EvaluationSpec,
    ExecutionSpec,
    FinetuneJob,
    FinetuneJobSpec,
    JobServingSpec,
    MixtureSourceSpec,
    ModelSpec,
    PrepareSpec,
    StorageSpec,
    TrainingSpec,
    WorkersSpec,
)
from spotune.job.execution import LOWEST_STAGE
from spotune.job.training.hyperparameters import LABEL_OBJECTIVES, PREFERENCE_OBJECTIVES, WHOLE_MATRIX_OPTIMIZERS

_WORKERS = (
    Rule("type(self.min) != int || self.min <= self.count", "must not be more than count", "min"),
    *WORKERS_RULES,
    Rule(
        "self.onStraggler != 'replace' || (type(self.min) == int ? self.min < self.count : self.count > 1)",
        "replace needs a min below count: otherwise no worker can be left out; lower workers.min",
        "onStraggler",
    ),
)

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
        "float16 overflows in T5-style models (its largest value is 65504): use bfloat16 or float32",
        "dtype",
    ),
)

_LABELS: Final = list(LABEL_OBJECTIVES)
_LANGUAGE_MODELS: Final = ["sft", *PREFERENCE_OBJECTIVES]
_OF_HARNESS: Final = ("harness", "best", "earlyStopping")
"""Fields of an evaluation that its tasks need; earlyStopping requires best."""
_BEST: Final = "self.training.evaluation.best"
_DEFAULT_EVALUATION: Final = (
    f"{has_defaults('self.training.evaluation', EvaluationSpec, _OF_HARNESS)} && "
    f"(!has({_BEST}) || {_BEST}.metric.contains('/'))"
)
"""CEL expression that is true if the evaluation section has only default values, but for what harness needs."""

_SPEC = (
    Rule(
        "self.training.objective != 'sft' || self.dataset.chosen == ''",
        "sft does not use dataset.chosen and rejected: use dpo, orpo, simpo or reward",
        "training.objective",
    ),
    Rule(
        "self.training.objective == 'sft' || self.model.task != 'seq2seq'",
        "all objectives but sft are for causal models; model.task is seq2seq",
        "training.objective",
    ),
    Rule(
        f"self.training.objective in {['sft', 'kto', 'embedding', *_LABELS]} || "
        "(self.dataset.completion == '' && self.dataset.text == '' && self.dataset.messages == '')",
        "dpo, orpo, simpo and reward learn from pairs: set chosen and rejected instead of the other row formats",
        "dataset",
    ),
    *(
        Rule(
            f"!(self.training.objective in {_LABELS}) || self.dataset.{field} == ''",
            "is no text with a label: replace it by dataset.text and dataset.label",
            f"dataset.{field}",
        )
        for field in ("completion", "messages", "chosen")
    ),
    Rule(
        f"!(self.training.objective in {_LABELS}) || self.dataset.labels.size() > 0",
        "is required by classification: name all labels, such as [negative, positive]",
        "dataset.labels",
    ),
    Rule(
        f"!(self.training.objective in {_LABELS}) || (self.dataset.text == '') == (self.dataset.label == '')",
        "classification needs text and label together: name the column, or remove both",
        "dataset.label",
    ),
    Rule(
        "self.training.objective != 'tokenClassification' || self.dataset.text.matches(r'^(\\{[^{}]+\\}|[^{}]*)$')",
        "must be one column with lists of words for tokenClassification",
        "dataset.text",
    ),
    Rule(
        f"!(self.training.objective in {_LABELS}) || !self.dataset.packing",
        "is not supported for classification: remove it",
        "dataset.packing",
    ),
    Rule(
        f"self.training.objective in {['kto', *_LABELS]} || self.dataset.label == ''",
        "is only used by kto, classification and tokenClassification: set training.objective",
        "dataset.label",
    ),
    Rule(
        f"self.training.objective in {_LABELS} || self.dataset.labels.size() == 0",
        "is only used by classification and tokenClassification: set training.objective",
        "dataset.labels",
    ),
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
        "self.training.objective != 'reward' || !self.dataset.packing",
        "is not supported for reward, which scores each answer in its own row: remove it",
        "dataset.packing",
    ),
    Rule(
        "self.training.objective != 'kto' || self.dataset.trainOn != 'all'",
        "all is not supported for kto, which learns from the last message: remove it",
        "dataset.trainOn",
    ),
    Rule(
        "self.training.objective == 'sft' || !self.training.evaluation.generate",
        "is only supported for sft: remove it",
        "training.evaluation.generate",
    ),
    Rule(
        f"self.training.objective in {_LANGUAGE_MODELS} || !has(self.serving)",
        "is not supported for models that generate no text: remove it",
        "serving",
    ),
    Rule(
        f"!(self.training.objective in {['reward', *_LABELS]}) || self.output.mergeAdapter",
        "false is not supported for models with a head for scores or labels: the head is exported with the model",
        "output.mergeAdapter",
    ),
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
        "self.model.task != 'seq2seq' || !self.dataset.packing",
        "is only supported for causal models; model.task is seq2seq",
        "dataset.packing",
    ),
    Rule(
        "self.model.task != 'seq2seq' || self.dataset.text == ''",
        "is not supported for seq2seq models: use prompt and completion",
        "dataset.text",
    ),
    Rule(
        "self.model.task != 'seq2seq' || self.dataset.messages == ''",
        "is not supported for seq2seq models: use prompt and completion",
        "dataset.messages",
    ),
    Rule(
        "self.model.task == 'seq2seq' || self.dataset.maxCompletionLength == 0",
        "is only used by seq2seq models; for causal models maxLength limits prompt and completion together",
        "dataset.maxCompletionLength",
    ),
    Rule(
        f"has(self.dataset.eval) || self.dataset.mixture.exists(source, has(source.eval)) || ({_DEFAULT_EVALUATION})",
        "has no evaluation data: set dataset.eval.source or dataset.eval.fraction",
        "training.evaluation",
    ),
    Rule(
        "!self.training.evaluation.generate || self.dataset.text == ''",
        "requires prompts, and dataset.text has none: use dataset.prompt and dataset.completion",
        "training.evaluation.generate",
    ),
    Rule(
        f"!has(self.training.evaluation.harness) || self.training.objective in {_LANGUAGE_MODELS}",
        "evaluates language models, and this training.objective trains a model that generates no text: remove it",
        "training.evaluation.harness",
    ),
    Rule(
        "!has(self.training.evaluation.harness) || self.output.mergeAdapter",
        "evaluates a whole model, not an adapter alone: set output.mergeAdapter to true",
        "training.evaluation.harness",
    ),
    Rule(
        "!has(self.training.evaluation.sql) || "
        "(!has(self.dataset.prepare) && !self.dataset.mixture.exists(source, has(source.prepare))) || "
        "self.training.evaluation.sql.column in self.dataset.keep",
        "must contain the column that training.evaluation.sql.column names",
        "dataset.keep",
    ),
    Rule(
        "type(self.execution.microBatchSize) != int || self.execution.microBatchSize <= self.training.globalBatchSize",
        "must not be more than training.globalBatchSize",
        "execution.microBatchSize",
    ),
    Rule(
        "self.output.export != 'best' || has(self.training.evaluation.best)",
        "best requires evaluations that are compared: set training.evaluation.best",
        "output.export",
    ),
    Rule(
        "self.output.mergeAdapter || has(self.adapter)",
        "false requires an adapter: remove this field, or set spec.adapter",
        "output.mergeAdapter",
    ),
    Rule(
        "self.output.mergeAdapter || self.model.initialise == 'pretrained'",
        "must be true for a randomly initialised model, because its base weights are stored nowhere else",
        "output.mergeAdapter",
    ),
    Rule(
        "!has(self.adapter) || self.adapter.quantization == 'none' || self.execution.offload != 'parameters'",
        "parameters cannot be offloaded with quantized weights: use optimizer or none",
        "execution.offload",
    ),
    Rule(
        "!has(self.adapter) || self.adapter.quantization == 'none' || self.execution.zeroStage != 3",
        "3 cannot shard quantized weights: use auto or at most 2",
        "execution.zeroStage",
    ),
    Rule(
        f"!(self.training.optimizer in {sorted(WHOLE_MATRIX_OPTIMIZERS)}) || self.execution.offload == 'none'",
        "is not supported for this training.optimizer: use none, or another optimizer",
        "execution.offload",
    ),
    Rule(
        f"!(self.training.optimizer in {sorted(WHOLE_MATRIX_OPTIMIZERS)}) || self.execution.zeroStage != 3",
        "3 cuts every matrix, but this training.optimizer updates whole matrices: use auto or at most 2",
        "execution.zeroStage",
    ),
    Rule(
        "self.training.optimizer != 'muon' || !has(self.adapter)",
        "muon is for whole weight matrices, not for those of an adapter: use another optimizer",
        "training.optimizer",
    ),
    Rule(
        "!has(self.serving) || self.output.mergeAdapter",
        "cannot serve an adapter without its base model: set output.mergeAdapter to true, or write a ModelService with "
        "the base model and this job under adapters",
        "serving",
    ),
)

_EXECUTION = (
    Rule(
        "self.offload == 'none' || type(self.zeroStage) != int || "
        f"self.zeroStage >= (self.offload == 'optimizer' ? {LOWEST_STAGE['optimizer']} : {LOWEST_STAGE['parameters']})",
        "does not support this offload: use auto, at least 1 for optimizer, or 3 for parameters",
        "zeroStage",
    ),
    Rule(
        "self.flopsProfile == 0 || self.attention != 'flash_attention_2'",
        "cannot count flash_attention_2: set it to 0, or use attention sdpa or eager",
        "flopsProfile",
    ),
)

_SERVICE_NAME: Final = "(self.spec.serving.name == '' ? self.metadata.name : self.spec.serving.name)"
"""CEL equivalent of `spotune.job.FinetuneJob.service_name`."""

_JOB = (
    Rule(
        f"!has(self.spec.serving) || self.spec.serving.adapters.all(adapter, adapter.name != {_SERVICE_NAME})",
        "must not contain the model's own id: every adapter needs its own name",
        "spec.serving.adapters",
    ),
)

_EXTENDABLE: Final = ("epochs", "maxSteps")
"""Fields that may be increased after the first checkpoint, to train longer."""
_CHANGEABLE: Final = ("command", "code", "codeFrom", "config")
"""Fields that may change at any time."""
_FROZEN_SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "model": ModelSpec,
    "dataset": DatasetSpec,
    "training": TrainingSpec,
}
"""Sections that define what is trained, in addition to the adapter."""
_NO_CHECKPOINT_YET: Final = "!has(self.status) || !has(self.status.lastCheckpoint)"
_OTHER_STEP: Final = (
    "(has(oldSelf.status) && [self.status].all(new, [oldSelf.status].all(old, "
    "has(new.step) && has(old.step) && new.step != old.step)))"
)
"""CEL expression that is true for most updates of the status. They leave the spec as it is: the API server takes an
update of the spec or of the status, never of both."""
_FROZEN: Final = "must not change after the first checkpoint: undo the change, or create a job with another name"


def _freeze_rules() -> Iterator[Rule]:
    """Rules that make model, adapter, dataset, training, FP8 and the bucket immutable after the first checkpoint.

    A checkpoint fits no other model, adapter, data or hyperparameters. Training may only be extended. The API server
    validates an update of the spec against the stored status, so omitting the status does not bypass the rules.
    """
    for path, same in (
        ("spec.adapter", unchanged("spec.adapter", optional=True)),
        ("spec.storage.bucket", unchanged("spec.storage.bucket", optional=False)),
        ("spec.execution.precision", SAME_PRECISION),
    ):
        yield Rule(same, _FROZEN, path, "FieldValueForbidden")
    for section, model in _FROZEN_SECTIONS.items():
        fields = {
            field.alias or name: not field.is_required() and field.default is None
            for name, field in model.model_fields.items()
            if (field.alias or name) not in (*_EXTENDABLE, *_CHANGEABLE)
        }
        yield frozen_fields(f"spec.{section}", fields, _FROZEN, optional=f"self.{section}" in OPTIONAL_SECTIONS)
    for name in _EXTENDABLE:
        yield Rule(
            f"!has(self.spec.training.{name}) || "
            f"(has(oldSelf.spec.training.{name}) && self.spec.training.{name} >= oldSelf.spec.training.{name})",
            "may only grow after the first checkpoint: set a larger number, or remove it for no limit",
            f"spec.training.{name}",
            "FieldValueForbidden",
        )


def _after_checkpoint(rule: Rule) -> Rule:
    """The rule for jobs with a checkpoint, skipped by most updates of the status."""
    return replace(rule, expression=f"{_NO_CHECKPOINT_YET} || {_OTHER_STEP} || ({rule.expression})")


_SHARED: Final = (
    *(f"self.training.{field}" for field in ("evaluation", "objective", "optimizer")),
    *("self.model.task", "self.dataset", "self.execution", "self.output"),
)
"""CEL paths that many of the rules read that span sections."""
_SPANNING: Final = (*USER_CODE_RULES, *LIMIT_RULES, *_SPEC, *STORAGE_RULES, *REPRODUCIBLE_RULES, *PRECISION_RULES)
JOB_RULES: Final[Mapping[type[BaseModel], Sequence[Rule]]] = {
    **SERVING_SECTION_RULES,
    ModelSpec: _MODEL,
    WorkersSpec: _WORKERS,
    **SUPPLY_RULES,
    BackoffSpec: _BACKOFF,
    EvalSpec: EVAL_RULES,
    MixtureSourceSpec: MIXTURE_SOURCE_RULES,
    PrepareSpec: PREPARE_RULES,
    DatasetSpec: DATASET_RULES,
    **TRAINING_RULES,
    StorageSpec: STORAGE_SECTION_RULES,
    ExecutionSpec: (*_EXECUTION, *REPRODUCIBLE_EXECUTION_RULES),
    FinetuneJobSpec: tuple(merged(_SPANNING, OPTIONAL_SECTIONS, _SHARED, "spec")),
    JobServingSpec: SERVING_RULES,
    FinetuneJob: (*NAME_RULES, *_JOB, _after_checkpoint(merge(tuple(_freeze_rules()), (), ""))),
}
"""CEL rules of a FinetuneJob by section."""
