"""A plan as a rich table: one column per number of workers, one row per quantity."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console
from rich.table import Table
from rich.text import Text

from spotune.plan.job.job_plan import JobPlan, WorkersPlan
from spotune.plan.layout import LayoutChoice
from spotune.plan.memory import GB
from spotune.plan.speed.step_time import StepTime

_ABSENT = "-"
_SPEED_ASSUMPTIONS = (
    "Step time: from measurements on H200s, for rows of full length and one document, without communication between "
    "workers. "
)


def print_plan(plan: JobPlan, console: Console) -> None:
    """Print the model, the table, the reasons for layouts that do not fit, and the assumptions.

    If nothing fits, the caller raises an error with the reason instead.
    """
    counts = plan.parameters
    console.print(
        Text.assemble(
            (plan.name, "bold"),
            f": {plan.model} ({plan.architecture.model_type}), {counts.total:,} parameters{_trained(plan)} (embedding "
            f"{_share(counts.embedding + counts.output, counts.total)}, layers "
            f"{_share(counts.encoder + counts.decoder, counts.total)}), {plan.setup.global_batch_size} samples per "
            f"step of up to {_lengths(plan)} tokens",
        )
    )
    console.print(_table(plan))
    for workers in plan.workers:
        reason = workers.choice.reason if workers.choice else workers.problem
        fits = workers.choice is not None and workers.choice.fits
        if not fits and plan.feasible:
            console.print(Text.assemble((f"Workers {workers.world_size}: ", "bold red"), reason))
    console.print(Text(_assumptions(plan), style="dim"))


def _trained(plan: JobPlan) -> str:
    """The number of trained parameters, if the model's own are frozen."""
    trained = plan.setup.trained
    return f" and {trained.count:,} trained adapter parameters" if trained.frozen else ""


def _table(plan: JobPlan) -> Table:
    table = Table(title="Per worker", title_justify="left", title_style="bold")
    table.add_column("Workers")
    for workers in plan.workers:
        table.add_column(str(workers.world_size), justify="right")
    for section in (_memory_rows(plan), _layout_rows(plan), _speed_rows(plan), _checkpoint_rows()):
        for label, cell in section:
            table.add_row(label, *(cell(workers) for workers in plan.workers))
        table.add_section()
    return table


_Cell = Callable[[WorkersPlan], str]


def _memory_rows(plan: JobPlan) -> list[tuple[str, _Cell]]:
    offloaded = ("Host memory for offload", _of_choice(lambda choice: _gb(choice.memory.offloaded_bytes)))
    # On CPU workers the copies are part of the total.
    copied = (
        "Copies for commits" if plan.setup.on_cpu else "Host memory for commits",
        _of_choice(lambda choice: _gb(choice.memory.commit_bytes)),
    )
    return [
        ("Device memory", lambda workers: _gb(workers.device.memory_bytes)),
        ("Weights", _of_choice(lambda choice: _gb(choice.memory.states.weights_bytes))),
        ("Gradients", _of_choice(lambda choice: _gb(choice.memory.states.gradients_bytes))),
        ("Optimizer states", _of_choice(lambda choice: _gb(choice.memory.states.optimizer_bytes))),
        ("Activations", _of_choice(lambda choice: _gb(choice.memory.activations.layers_bytes))),
        ("Logits or recomputed layer", _of_choice(lambda choice: _gb(choice.memory.activations.working_bytes))),
        ("Gradients in reduction", _of_choice(lambda choice: _gb(choice.memory.reduction_bytes))),
        ("Buffers", _of_choice(lambda choice: _gb(choice.memory.buffers_bytes))),
        ("Runtime", _of_choice(lambda choice: _gb(choice.memory.runtime_bytes))),
        *([copied] if plan.setup.on_cpu else []),
        ("Total at the fullest moment", _of_choice(_total)),
        *([offloaded] if any(w.choice and w.choice.memory.offloaded_bytes for w in plan.workers) else []),
        *([] if plan.setup.on_cpu else [copied]),
    ]


def _layout_rows(plan: JobPlan) -> list[tuple[str, _Cell]]:
    layouts = [workers.choice.layout for workers in plan.workers if workers.choice]
    layers, recomputable = plan.setup.trained.layers, plan.setup.architecture.decoder.layers
    gathered = ("Layers gathered once a step", _of_choice(lambda c: f"{c.layout.gathered_layers} of {layers}"))
    reduced = ("Gradients reduced once a step", _of_choice(lambda c: "yes" if c.layout.whole_gradients else "no"))
    return [
        ("ZeRO stage", _of_choice(lambda choice: str(choice.layout.zero_stage))),
        ("Micro-batch size", _of_choice(lambda choice: str(choice.layout.micro_batch_size))),
        ("Accumulation", lambda workers: str(workers.accumulation) if workers.choice else _ABSENT),
        (
            "Gradient checkpointing",
            _of_choice(lambda choice: _recomputed(choice, recomputable)),
        ),
        *([gathered] if any(layout.gathered_layers for layout in layouts) else []),
        *([reduced] if any(layout.whole_gradients for layout in layouts) else []),
        ("Commits kept in memory", _of_choice(lambda choice: str(choice.memory_copies))),
        ("Copied to another node", _of_choice(lambda choice: "yes" if choice.peer_copy else "no")),
        *([("Compiled layers", _of_choice(lambda _choice: "yes"))] if plan.setup.compiled else []),
    ]


def _speed_rows(plan: JobPlan) -> list[tuple[str, _Cell]]:
    """The estimated speed; no rows if it is not known for any number of workers."""
    if not any(workers.step for workers in plan.workers):
        return []
    rows: list[tuple[str, _Cell]] = [
        ("Step time (estimated)", _of_step(lambda step: _step_seconds(step.seconds))),
        ("Tokens/s", _of_step(lambda step: f"{step.tokens_per_second:,.0f}")),
        ("MFU", _of_step(lambda step: _percent(step.mfu))),
    ]
    steps = plan.workers[0].max_steps
    return [*rows, (f"Time of {steps:,} steps", _run_time)] if steps else rows


def _checkpoint_rows() -> list[tuple[str, _Cell]]:
    return [
        ("Checkpoint, all workers", lambda workers: _gb(workers.checkpoint.size_bytes)),
        ("Checkpoint every", _interval),
        ("Lost per failure, on average", _lost),
        ("Time lost to saving and repeating", lambda workers: _percent(workers.checkpoint.lost_fraction)),
    ]


def _of_choice(cell: Callable[[LayoutChoice], str]) -> _Cell:
    return lambda workers: cell(workers.choice) if workers.choice else _ABSENT


def _of_step(cell: Callable[[StepTime], str]) -> _Cell:
    return lambda workers: cell(workers.step) if workers.step else _ABSENT


def _run_time(workers: WorkersPlan) -> str:
    return _ABSENT if workers.run_seconds is None else _duration(workers.run_seconds)


def _step_seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:.1f} s"


def _recomputed(choice: LayoutChoice, layers: int) -> str:
    layout = choice.layout
    if not layout.gradient_checkpointing:
        return "no"
    extent = f"{layers - layout.kept_layers} of {layers} layers" if layout.kept_layers else "yes"
    return f"{extent}, offloaded" if layout.offload_activations else extent


def _total(choice: LayoutChoice) -> str:
    total = _gb(choice.memory.total_bytes)
    return f"[bold]{total}[/bold]" if choice.fits else f"[bold red]{total}[/bold red]"


def _interval(workers: WorkersPlan) -> str:
    checkpoint = workers.checkpoint
    parts = [_duration(checkpoint.interval_seconds)] if checkpoint.interval_seconds is not None else []
    parts += [f"{checkpoint.interval_steps} steps"] if checkpoint.interval_steps is not None else []
    return ", ".join(parts)


def _lost(workers: WorkersPlan) -> str:
    checkpoint = workers.checkpoint
    parts = [_duration(checkpoint.seconds_lost)] if checkpoint.seconds_lost is not None else []
    parts += [f"{checkpoint.steps_lost:.1f} steps"] if checkpoint.steps_lost is not None else []
    return ", ".join(parts) or _ABSENT


def _assumptions(plan: JobPlan) -> str:
    assumed = plan.assumptions
    devices = "; ".join(dict.fromkeys(workers.device.description for workers in plan.workers))
    speed = _SPEED_ASSUMPTIONS if any(workers.step for workers in plan.workers) else ""
    return (
        f"1 GB is 10^9 bytes. Device: {devices}. {speed}Assumptions: each worker is preempted every "
        f"{_duration(assumed.mean_seconds_to_preemption)} on average (--preemption-every), checkpoints are written at "
        f"{_gb(assumed.storage_bytes_per_second)}/s (--storage-bandwidth)."
    )


def _lengths(plan: JobPlan) -> str:
    setup = plan.setup
    return f"{setup.sequence_length} + {setup.target_length}" if setup.target_length else str(setup.sequence_length)


def _gb(size_bytes: int) -> str:
    return f"{size_bytes / GB:.2f} GB"


def _share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %"


def _percent(fraction: float | None) -> str:
    return _ABSENT if fraction is None else f"{100 * fraction:.1f} %"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
