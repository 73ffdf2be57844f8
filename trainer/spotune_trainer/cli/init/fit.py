"""How much of a model can be trained in the memory of the workers, by the plan of `spotune plan`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from spotune.errors import JobError
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune.plan.execution import layout_request, training_setup
from spotune.plan.layout import choose_layout
from spotune.plan.memory import GB
from spotune_trainer.cli.init.job_file import content_of
from spotune_trainer.cli.init.profiles import Choice, MachineProfile, ModelProfile

Training = Literal["full", "lora", "qlora"]
_STATE_BYTES: Final = {"full": 16, "lora": 2, "qlora": 0.6}
"""Bytes per parameter of weights, gradients and AdamW in mixed precision (Rajbhandari et al. 2020, section 3.1)."""
_STATES_FRACTION: Final = 0.6
"""Fraction of the memory for them, of a model whose activations the plan cannot compute."""


@dataclass(frozen=True)
class Fit:
    """What fits into the memory.

    Attributes:
        training: full: all weights are trained. lora: adapters. qlora: adapters beside weights in 4 bits.
        minimum: Fewest workers on which it fits.
        execution: Choices of the section `execution`.
    """

    training: Training
    minimum: int
    execution: tuple[Choice, ...]


def find_fit(
    model: ModelProfile,
    machine: MachineProfile,
    choices: Callable[[Training], Sequence[Choice]],
    *,
    adapters: bool = True,
) -> Fit:
    """The most that fits: all weights, or else adapters, or else adapters beside weights in 4 bits.

    Args:
        model: The model.
        machine: The workers.
        choices: Returns all fields of the job but `execution` and `workers`, which determine the plan.
        adapters: Whether the objective supports adapters.

    Raises:
        JobError: Nothing fits; the message says how much is missing and what would help.
    """
    tried: tuple[Training, ...] = ("full", "lora", "qlora") if machine.gpus else ("full", "lora")
    if not (model.has_weights and adapters):
        tried = ("full",)  # adapters beside random weights would learn nothing
    if model.architecture is None:
        return _estimated_fit(model, machine, tried)
    problem = ""
    for training in tried:
        content = content_of([*choices(training), Choice("spec.workers.gpus", int(machine.gpus > 0))])
        counts = [count for count in _counts(machine) if not (problem := _problem(content, model, machine, count))]
        if counts:
            return Fit(training, min(counts), _auto(content, model, machine))
    raise JobError(problem)


def _counts(machine: MachineProfile) -> list[int]:
    """Numbers of workers to try: the powers of two, and all of them last, whose problem is reported."""
    powers = [2**power for power in range(machine.workers.bit_length()) if 2**power < machine.workers]
    return [*powers, machine.workers]


def _problem(content: dict[str, Any], model: ModelProfile, machine: MachineProfile, count: int) -> str:
    """Why the job does not fit on so many workers; empty if it does."""
    assert model.architecture is not None, "the plan knows this model"
    job = parse_job(Document(content))
    try:
        choose_layout(training_setup(model.architecture, job), count, machine.memory_bytes, layout_request(job, count))
    except JobError as error:
        return str(error)
    return ""


def _auto(content: dict[str, Any], model: ModelProfile, machine: MachineProfile) -> tuple[Choice, ...]:
    assert model.architecture is not None, "the plan knows this model"
    job = parse_job(Document(content))
    setup = training_setup(model.architecture, job)
    choice = choose_layout(setup, machine.workers, machine.memory_bytes, layout_request(job, machine.workers))
    reason = f"The memory plan decides at the start of a run. On {machine.description}: {choice.reason}."
    return (Choice("spec.execution.zeroStage", "auto", reason), Choice("spec.execution.microBatchSize", "auto"))


def _estimated_fit(model: ModelProfile, machine: MachineProfile, tried: Sequence[Training]) -> Fit:
    """For a model type that the plan does not know: explicit values, from the size of the weights alone."""
    usable = _STATES_FRACTION * machine.memory_bytes
    for training in tried:
        shared = training != "qlora"  # weights in 4 bits are not sharded
        size = _STATE_BYTES[training] * model.parameters * (1 if machine.gpus else 2)
        minimum = next((count for count in _counts(machine) if size / (count if shared else 1) <= usable), None)
        if minimum is not None:
            stage = 3 if machine.workers > 1 and shared else 2
            reason = (
                f"The memory plan does not know {model.model_type} models, so nothing can be auto: small and safe "
                "values. Raise microBatchSize while the memory is enough."
            )
            return Fit(
                training,
                minimum,
                (
                    Choice("spec.execution.zeroStage", stage, reason),
                    Choice("spec.execution.microBatchSize", 1),
                    Choice("spec.execution.gradientCheckpointing", True),
                ),
            )
    raise JobError(
        f"a model of {model.parameters:,} parameters does not fit on {machine.workers} of {machine.description} with "
        f"{machine.memory_bytes / GB:,.1f} GB each: use more or larger GPUs (--gpus, --device), or a smaller model"
    )
