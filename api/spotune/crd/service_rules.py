"""CEL rules of ModelServices that span several fields: the models' checks."""

from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import BaseModel

from spotune.crd.cel_rules import NAME_RULES, Rule
from spotune.service import (
    HttpRouteSpec,
    ModelService,
    ModelServiceSpec,
    ReplicasSpec,
    RolloutSpec,
    ServedAdapterSpec,
    ServedModelSpec,
    ServingClusterSpec,
)

_MODEL = (
    Rule(
        "[self.finetuneJob != '', self.source != '', has(self.claim)].filter(given, given).size() == 1",
        "set exactly one of finetuneJob, source and claim",
    ),
    Rule("self.source.startsWith('hf://') || self.revision == 'main'", "is only used with an hf:// source", "revision"),
    Rule(
        "self.source.startsWith('hf://') || !has(self.tokenSecretRef)",
        "is only used with an hf:// source",
        "tokenSecretRef",
    ),
)

_ADAPTER = (Rule("(self.finetuneJob != '') != has(self.claim)", "set exactly one of finetuneJob and claim"),)

_REPLICAS = (Rule("self.min <= self.max", "must not be more than max", "min"),)

_ROLLOUT = (
    Rule(
        "self.steps.isSorted() && self.steps.all(one, self.steps.exists_one(other, other == one))",
        "must be ascending, such as [10, 50, 100]",
        "steps",
    ),
    Rule(
        "self.steps.size() == 0 || self.steps[self.steps.size() - 1] == 100",
        "must end with 100: the last step promotes the new version",
        "steps",
    ),
)

_HTTP_ROUTE = (
    Rule(
        "self.parentRefs.all(one, self.parentRefs.exists_one(other, other.name == one.name "
        "&& other.__namespace__ == one.__namespace__ && (other.sectionName == one.sectionName "
        "|| other.sectionName == '' || one.sectionName == '')))",
        "give each reference to the same Gateway another sectionName",
        "parentRefs",
    ),
)

_CLUSTER = (
    Rule(
        "self.redisAddress != '' || !has(self.redisPasswordSecretRef)",
        "is only used with redisAddress",
        "redisPasswordSecretRef",
    ),
)

SERVING_RULES: Final = (
    Rule(
        "self.capacity != 'mixed' || self.onDemandBase <= self.replicas.max",
        "must not be more than replicas.max",
        "onDemandBase",
    ),
    Rule("self.engine != 'vllm' || self.gpus > 0", "vllm needs a GPU: set gpus, or leave engine to auto", "engine"),
    Rule(
        "!self.batchInvariant || (self.engine != 'transformers' && self.gpus > 0)",
        "is only used with vLLM, which runs on GPUs",
        "batchInvariant",
    ),
)
"""Rules of a spec with the fields of `spotune.service.ServingSpec`."""

SERVING_SECTION_RULES: Final[Mapping[type[BaseModel], Sequence[Rule]]] = {
    ServedAdapterSpec: _ADAPTER,
    ReplicasSpec: _REPLICAS,
    RolloutSpec: _ROLLOUT,
    HttpRouteSpec: _HTTP_ROUTE,
    ServingClusterSpec: _CLUSTER,
}
"""CEL rules of the sections that a ModelService and the serving section of a FinetuneJob share."""

_METRIC = Rule(
    "self.rollout.promoteIf.metric == '' || self.model.finetuneJob != ''",
    "is only used with model.finetuneJob, which evaluates the model",
    "rollout.promoteIf.metric",
)

_MODEL_ID: Final = "(self.spec.model.name == '' ? self.metadata.name : self.spec.model.name)"
"""CEL equivalent of `spotune.service.ModelService.model_id`."""

_SERVICE = (
    Rule(
        f"self.spec.adapters.all(adapter, adapter.name != {_MODEL_ID})",
        "must not contain the model's own id: every adapter needs its own name",
        "spec.adapters",
    ),
)

SERVICE_RULES: Final[Mapping[type[BaseModel], Sequence[Rule]]] = {
    **SERVING_SECTION_RULES,
    ServedModelSpec: _MODEL,
    ModelServiceSpec: (*SERVING_RULES, _METRIC),
    ModelService: (*NAME_RULES, *_SERVICE),
}
"""CEL rules of a ModelService by section. Unique names of adapters need none: their list is a map by name."""
