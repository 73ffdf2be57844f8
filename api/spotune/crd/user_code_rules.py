"""CEL rules of jobs that a function or command of the user trains (training.function, training.command)."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from pydantic import BaseModel

from spotune.crd.cel_rules import Rule, has_defaults
from spotune.job import CheckpointSpec, ExecutionSpec, OutputSpec, TrainingSpec
from spotune.job.finetunejob import (
    MISSING_WITHOUT_USER_CODE,
    NOT_WITH_USER_CODE,
    USED_WITH_USER_CODE,
)
from spotune.job.training.code_source import (
    ARCHIVE,
    NO_ARCHIVE,
    NOT_ONE_SOURCE,
    NOT_WITHIN,
    ArchiveSource,
    CodeFromSpec,
)

CODE_FROM_RULES: Final[Mapping[type[BaseModel], Sequence[Rule]]] = {
    ArchiveSource: (Rule(f"self.source.matches(r'{ARCHIVE}')", NO_ARCHIVE, "source"),),
    CodeFromSpec: (
        Rule(
            "[has(self.git), has(self.archive), has(self.configMap)].filter(given, given).size() == 1", NOT_ONE_SOURCE
        ),
        Rule("!self.directory.startsWith('/') && !('..' in self.directory.split('/'))", NOT_WITHIN, "directory"),
    ),
}
"""Rules of spec.training.codeFrom by section."""

OPTIONAL_SECTIONS: Final = ("self.model", "self.dataset")
"""CEL paths of the sections that only a job with code of the user does not have."""
NO_USER_CODE: Final = "self.training.function == '' && size(self.training.command) == 0"
"""CEL expression: spotune's own loop trains."""
_NO_USER_CODE_OR_MODEL: Final = f"has(self.model) || ({NO_USER_CODE})"
"""The same for rules of other sections. With a model, code of the user is refused anyway, and to see it is cheap."""

_SECTIONS: Final[Mapping[str, type[BaseModel]]] = {
    "training": TrainingSpec,
    "execution": ExecutionSpec,
    "checkpoint": CheckpointSpec,
    "output": OutputSpec,
}


def _unused_fields() -> Iterator[Rule]:
    """For each section with fields that code of the user does not use: a rule that they have their defaults."""
    for name, section in _SECTIONS.items():
        used = USED_WITH_USER_CODE.get(name, ())
        remedy = f"remove all but {', '.join(used)}"
        fields = f"has fields that are not used with training.function and training.command: {remedy}"
        defaults = has_defaults(f"self.{name}", section, used)
        yield Rule(f"{_NO_USER_CODE_OR_MODEL} || {defaults}", fields if used else NOT_WITH_USER_CODE, name)


USER_CODE_RULES: Final = (
    *(
        Rule(f"has(self.{section}) || !({NO_USER_CODE})", MISSING_WITHOUT_USER_CODE, section)
        for section in ("model", "dataset")
    ),
    Rule(f"!has(self.model) || {NO_USER_CODE}", NOT_WITH_USER_CODE, "model"),
    *(
        Rule(f"{_NO_USER_CODE_OR_MODEL} || !has(self.{section})", NOT_WITH_USER_CODE, section)
        for section in ("dataset", "adapter", "serving")
    ),
    *_unused_fields(),
)
"""Rules that span sections of the spec."""
