"""CEL rules of jobs whose workers call a training function of the user (training.function)."""

from collections.abc import Iterator, Mapping
from typing import Final

from pydantic import BaseModel

from spotune.crd.cel_rules import Rule, has_defaults
from spotune.job import CheckpointSpec, ExecutionSpec, OutputSpec, TrainingSpec
from spotune.job.finetunejob import NOT_FOR_FUNCTIONS, USED_WITH_FUNCTION

OPTIONAL_SECTIONS: Final = ("self.model", "self.dataset")
"""CEL paths of the sections that only a job with training.function does not have."""

_SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "training": TrainingSpec,
    "execution": ExecutionSpec,
    "checkpoint": CheckpointSpec,
    "output": OutputSpec,
}


def _unused_fields() -> Iterator[Rule]:
    """For each section with fields that training.function does not use: a rule that they have their defaults."""
    for name, section in _SECTIONS.items():
        used = USED_WITH_FUNCTION.get(name, ())
        fields = f"has fields that are not used with training.function: remove all but {', '.join(used)}"
        defaults = has_defaults(f"self.{name}", section, used)
        yield Rule(f"self.training.function == '' || ({defaults})", fields if used else NOT_FOR_FUNCTIONS, name)


FUNCTION_RULES: Final = (
    *(
        Rule(
            f"self.training.function != '' || has(self.{section})",
            "is required, unless training.function names a training function of your own",
            section,
        )
        for section in ("model", "dataset")
    ),
    *(
        Rule(f"self.training.function == '' || !has(self.{section})", NOT_FOR_FUNCTIONS, section)
        for section in ("model", "dataset", "adapter", "serving")
    ),
    *_unused_fields(),
    Rule(
        "self.training.function == '' || self.storage.bucket == ''",
        "is not supported with training.function: use a volume",
        "storage.bucket",
    ),
)
"""Rules that span sections of the spec."""
