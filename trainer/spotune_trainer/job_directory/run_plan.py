"""`plan.json`: the values to which each `auto` and each branch or tag of a job was resolved at its first start.

Later starts use the same plan, so a changed library, data set or machine does not change the run. Changes of
`execution` by the user apply from the next worker group on, and are recorded with their step.
"""

from __future__ import annotations

import platform
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from importlib.metadata import version
from typing import Any

from pydantic import ConfigDict, TypeAdapter
from pydantic.alias_generators import to_camel, to_snake

from spotune.errors import JobError
from spotune.job import ExecutionSpec
from spotune.job.execution import LOWEST_STAGE

MOST_MEMORY_SAVING: dict[str, Any] = {"gathered_layers": 0, "whole_gradients": False}
"""Plan values that use the least memory for gathered layers and gradients."""
LIBRARIES = ("torch", "deepspeed", "transformers", "mosaicml-streaming", "ray", "numpy")


@dataclass(frozen=True)
class RunPlan:
    """Resolved values of one run.

    Attributes:
        version: incremented by each recorded change.
        fingerprint: of the job that the plan was made for.
        zero_stage: ZeRO stage.
        micro_batch_size: samples in one forward pass of one rank.
        gradient_checkpointing: recompute layers in the backward pass.
        compile: compile layers and loss.
        gathered_layers: at stage 3, number of layers whose weights are gathered once a step; the others are gathered
            at each use.
        whole_gradients: at stage 3, reduce gradients once a step.
        kept_layers: with gradient checkpointing, number of layers at the end of the model that are not recomputed; 0 in
            older plans.
        offload_activations: with gradient checkpointing, keep what recomputed layers save in host memory.
        min_world_size: number of workers that these values were planned for; 1 in older plans. With `workers.min: auto`
            a worker group has at least as many.
        second_copy_from: number of workers from which each keeps a second commit in memory, if
            `checkpoint.memoryCopies` is auto; None: none does, as in older plans.
        evaluation_batch_limit: samples of an evaluation batch at most, after a larger one ran out of memory; None: none
            did, as in older plans.
        peer_copy_from: number of workers from which each has memory for a commit of another node, if
            `checkpoint.peerCopy` is auto; None: none has, as in older plans.
        function: training function of the user, which decides all of these values itself; empty: there is none.
        command: command of the user, likewise.
        code: version of the code of the user that was read from `training.codeFrom`; empty: there is none.
        reason: explanation of these values for people.
        data: hash of each data set's index by role (train, eval).
        requested: `execution` of the job as last applied.
        libraries: versions at the first start.
        changes: later changes, each with the first step that it applies to.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")  # for `from_json`

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
    kept_layers: int = 0
    offload_activations: bool = False
    min_world_size: int = 1
    evaluation_batch_limit: int | None = None
    second_copy_from: int | None = None
    peer_copy_from: int | None = None
    function: str = ""
    command: str = ""
    code: str = ""

    def to_json(self) -> dict[str, Any]:
        """As a JSON object."""
        return {to_camel(name): value for name, value in asdict(self).items()}

    @classmethod
    def from_json(cls, value: dict[str, Any]) -> RunPlan:
        """Inverse of `to_json`; fields that older plans lack get their defaults.

        Raises:
            ValueError: a field is missing, not known, or of another type.
        """
        return _validator().validate_python({to_snake(name): entry for name, entry in value.items()})

    def change(self, step: int, **values: Any) -> RunPlan:
        """The plan with new values from `step` on, and a record of them; the same plan if nothing changes."""
        changed = {name: value for name, value in values.items() if getattr(self, name) != value}
        if not changed:
            return self
        record = {"step": step, **{to_camel(name): [getattr(self, name), value] for name, value in changed.items()}}
        return replace(self, version=self.version + 1, changes=(*self.changes, record), **changed)

    @property
    def layout(self) -> dict[str, Any]:
        """What decides how each worker trains, for the ledger."""
        code = {"code": self.code} if self.code else {}
        if self.function:
            return {"function": self.function, **code}
        if self.command:
            return {"command": self.command, **code}
        return {"zeroStage": self.zero_stage, "microBatchSize": self.micro_batch_size}

    def evaluation_batch_size(self, asked: int) -> int:
        """Samples of an evaluation batch: as asked for, or, if that is 0, what fits without gradients.

        These are four micro-batches, or one with gathered layers. `evaluation_batch_limit` limits both.
        """
        size = asked or self.micro_batch_size * (1 if self.gathered_layers else 4)
        return min(size, self.evaluation_batch_limit or size)

    def use_less_memory(self, step: int, evaluation_batch: int | None = None) -> RunPlan:
        """The plan after a worker ran out of memory; the same plan if no value of it can be lower.

        In the evaluation it halves the evaluation batch. If that has one sample, or in training, it turns off whole
        gradients, or else gathered layers. In training it then halves the number of layers that are not recomputed
        despite gradient checkpointing, or else the micro-batch.

        Args:
            step: from which the plan applies.
            evaluation_batch: samples of the evaluation batch that ran out of memory; None: training did.
        """
        if evaluation_batch is not None and evaluation_batch > 1:
            return self.change(step, evaluation_batch_limit=evaluation_batch // 2)
        if self.whole_gradients:
            return self.change(step, whole_gradients=False)
        if self.gathered_layers:
            return self.change(step, gathered_layers=0)
        if evaluation_batch is not None:
            return self
        if self.kept_layers:
            return self.change(step, kept_layers=self.kept_layers // 2)
        return self.change(step, micro_batch_size=max(1, self.micro_batch_size // 2))

    def apply_execution(self, execution: ExecutionSpec, step: int) -> RunPlan:
        """The plan with the explicit values of `execution` that have changed since they were last applied.

        Offloading sets the minimum ZeRO stage, and offloading activations recomputes layers.
        """
        now_requested = requested(execution)
        changed = {
            to_snake(name): value
            for name, value in now_requested.items()
            if value != "auto" and value != self.requested.get(name, "auto")
        }
        stage = max(changed.get("zero_stage", self.zero_stage), LOWEST_STAGE[execution.offload])
        changed["zero_stage"] = stage
        if changed.get("offload_activations"):
            changed["gradient_checkpointing"] = True
        # These were planned for the old values, and may not fit with the new ones.
        if any(getattr(self, name) != value for name, value in changed.items()):
            changed |= MOST_MEMORY_SAVING | {"kept_layers": 0}
        elif execution.offload != "none":
            changed |= MOST_MEMORY_SAVING
        return replace(self.change(step, **changed), requested=now_requested)

    def check_data(self, data: dict[str, str]) -> None:
        """Check that the data sets are those that the run began with.

        Raises:
            JobError: the index of a data set has changed since the first start.
        """
        for role, digest in self.data.items():
            if data.get(role) != digest:
                raise JobError(
                    f"dataset.{role}: its index.json changed since the run began ({digest[:12]} then, "
                    f"{(data.get(role) or 'missing')[:12]} now); put the data back, or start a new run elsewhere"
                )


@cache
def _validator() -> TypeAdapter[RunPlan]:
    return TypeAdapter(RunPlan)


def requested(execution: ExecutionSpec) -> dict[str, Any]:
    """The job's values of the settings that a plan resolves, `auto` included."""
    names = ("zero_stage", "micro_batch_size", "gradient_checkpointing", "offload_activations", "compile")
    return {to_camel(name): getattr(execution, name) for name in names}


def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that determine the numerical results."""
    return {"python": platform.python_version(), **{name: version(name) for name in LIBRARIES}}
