"""`plan.json`: what every `auto` and every moving name of a job was resolved to at its first start.

Later starts follow it, so that a run does not change under way because a library, a data set or a machine did. What
the user changes in `execution` is taken over at the next worker group and recorded with its step.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from typing import Any

from pydantic.alias_generators import to_camel, to_snake

from spotune.errors import JobError
from spotune.job import ExecutionSpec
from spotune.job.execution import LOWEST_STAGE

NOTHING_SPARE: dict[str, Any] = {"gathered_layers": 0, "whole_gradients": False}
"""Values of a plan for which no memory is used that could be spared."""
LIBRARIES = ("torch", "deepspeed", "transformers", "mosaicml-streaming", "ray", "numpy")


@dataclass(frozen=True)
class RunPlan:
    """Resolved values of one run.

    Attributes:
        version: grows by one with every recorded change.
        fingerprint: hash of the job's meaning that this was resolved for.
        zero_stage: ZeRO stage.
        micro_batch_size: samples that go through the model at once on one rank.
        gradient_checkpointing: recompute activations.
        compile: compile layers and loss.
        gathered_layers: at stage 3 so many layers' weights are gathered once a step, those of the others at each use.
        whole_gradients: at stage 3 reduce gradients once a step.
        reason: why these were chosen, for people.
        data: hash of each data set's index by role (train, eval).
        requested: `execution` of the job as it was last taken into account.
        libraries: versions at the first start.
        changes: what changed since, each with the step from which it applied.
    """

    version: int
    fingerprint: str
    zero_stage: int
    micro_batch_size: int
    gradient_checkpointing: bool
    reason: str
    data: dict[str, str]
    requested: dict[str, Any] = field(default_factory=dict)
    libraries: dict[str, str] = field(default_factory=dict)
    changes: tuple[dict[str, Any], ...] = ()
    compile: bool = False
    gathered_layers: int = 0
    whole_gradients: bool = False

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {to_camel(name): value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunPlan:
        """From what `to_json` gave; what older plans lack has a default."""
        fields = {to_snake(name): entry for name, entry in value.items()}
        return cls(**{**fields, "changes": tuple(fields["changes"])})

    def change(self, step: int, **values: Any) -> RunPlan:
        """The plan with new values from `step` on, recorded; itself where they are what it has."""
        news = {name: value for name, value in values.items() if getattr(self, name) != value}
        if not news:
            return self
        record = {"step": step, **{to_camel(name): [getattr(self, name), value] for name, value in news.items()}}
        return replace(self, version=self.version + 1, changes=(*self.changes, record), **news)

    @property
    def evaluation_batch_size(self) -> int:
        """Samples of an evaluation batch: without gradients four micro-batches fit, unless layers take the memory."""
        return self.micro_batch_size * (1 if self.gathered_layers else 4)

    @property
    def can_use_less_memory(self) -> bool:
        """Whether `use_less_memory` has something to change."""
        return self.whole_gradients or self.gathered_layers > 0 or self.micro_batch_size > 1

    def use_less_memory(self, step: int) -> RunPlan:
        """The plan after a worker ran out of memory.

        It gives up whole gradients, or else the layers that stay gathered, or else half the micro-batch.
        """
        if self.whole_gradients:
            return self.change(step, whole_gradients=False)
        if self.gathered_layers:
            return self.change(step, gathered_layers=0)
        return self.change(step, micro_batch_size=self.micro_batch_size // 2)

    def follow(self, execution: ExecutionSpec, step: int) -> RunPlan:
        """The plan after the user's changes of `execution`: explicit values that are new since the last look.

        What is to be offloaded decides about the lowest ZeRO stage.
        """
        wanted = requested(execution)
        news = {
            to_snake(name): value
            for name, value in wanted.items()
            if value != "auto" and value != self.requested.get(name, "auto")
        }
        stage = max(news.get("zero_stage", self.zero_stage), LOWEST_STAGE[execution.offload])
        news["zero_stage"] = stage
        if execution.offload != "none" or any(getattr(self, name) != value for name, value in news.items()):
            news |= NOTHING_SPARE  # they were planned beside what is changed, and may not fit now
        return replace(self.change(step, **news), requested=wanted)

    def check_data(self, data: dict[str, str]) -> None:
        """Refuse to go on with other data than the run began with.

        Raises:
            JobError: an index is not the one that the first start saw.
        """
        for role, digest in self.data.items():
            if data.get(role) != digest:
                raise JobError(
                    f"dataset.{role}: its index.json changed since the run began ({digest[:12]} then, "
                    f"{(data.get(role) or 'missing')[:12]} now); put the data back, or start a new run elsewhere"
                )


def requested(execution: ExecutionSpec) -> dict[str, Any]:
    """What a job asks for of the values that a plan resolves."""
    names = ("zero_stage", "micro_batch_size", "gradient_checkpointing", "compile")
    return {to_camel(name): getattr(execution, name) for name in names}


def library_versions() -> dict[str, str]:
    """Versions of what the numbers depend on, with Python's."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
