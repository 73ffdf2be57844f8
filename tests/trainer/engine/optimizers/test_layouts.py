"""The optimizers at every ZeRO stage and world size: the library's steps, and an exact resume from any layout."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import schedulefree
import torch
from torch import Tensor

from spotune_trainer.checkpoint.fragment import EMA, MASTER, SCHEDULE_FREE_BASE
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.checkpoint.reader import CheckpointReader
from spotune_trainer.engine import zero_state
from spotune_trainer.engine.build import gradient_norm_before_update, set_learning_rate
from spotune_trainer.engine.ema import update_ema
from spotune_trainer.engine.optimizers.build import build_optimizer
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.groups import run_group
from tests.trainer.support.layouts import (
    DTYPES,
    VOCABULARY,
    Layout,
    build_model,
    leave_process_group,
    opened,
    process_group,
    release,
    restore,
    save,
    weights_of,
    wrap,
)
from tests.trainer.support.tiny import make_job

pytestmark = pytest.mark.slow

TRAINING: Mapping[str, dict[str, Any]] = {
    "schedule_free_adamw": {"optimizer": "schedule_free_adamw", "scheduler": "constant", "weightDecay": 0.1},
    "muon": {"optimizer": "muon", "weightDecay": 0.1, "maxGradNorm": 0.0},
    "adafactor": {"optimizer": "adafactor", "weightDecay": 0.1},
    "ema": {"emaDecay": 0.8},
}
"""Muon rounds its input to bf16. Clipping depends on the layout in its last digits, so Muon is compared without it."""
LIBRARY = ("schedule_free_adamw", "muon", "adafactor")
HIGHEST_STAGE = {"muon": 2, "adafactor": 2}
NAME = CheckpointName(2, 1)
STEPS = 10


def tokens(step: int, rank: int = 0) -> Tensor:
    """The tokens [batch, sequence] of a step."""
    return torch.randint(1, VOCABULARY, (2, 6), generator=torch.Generator().manual_seed(10 * step + rank))


def take_step(engine: Any, batch: Tensor, rate: float = 0.01, ema_decay: float = 0.0, weight: float = 1.0) -> None:
    """An optimizer step as the training loop takes it, on the loss times `weight`."""
    set_learning_rate(engine, rate)
    batch = batch.to(engine.device)
    engine.backward(engine(input_ids=batch, labels=batch).loss * weight)
    gradient_norm_before_update(engine)
    engine.step()
    if ema_decay:
        update_ema(engine, ema_decay)


def rate_of(step: int) -> float:
    """A short warm-up from zero."""
    return 0.01 * min(step / 3, 1)


def plain_weights(name: str) -> dict[str, Tensor]:
    """The weights to evaluate after `STEPS` steps of the library's optimizers in a plain PyTorch loop."""
    model = build_model(torch.float32, ())
    training = make_job("/model", training=TRAINING[name]).spec.training
    groups = build_optimizer(model, training, compiled=False).param_groups
    given = [{key: each[key] for key in ("params", "weight_decay")} for each in groups]
    optimizers: list[Any]
    if name == "schedule_free_adamw":
        optimizers = [schedulefree.AdamWScheduleFree(given)]
        optimizers[0].train()
    elif name == "muon":
        muon = torch.optim.Muon(given[:1], momentum=0.95, adjust_lr_fn="match_rms_adamw")
        optimizers = [muon, torch.optim.AdamW(given[1:])]
    else:
        optimizers = [torch.optim.Adafactor(given)]
    for step in range(STEPS):
        batch = tokens(step)
        model(input_ids=batch, labels=batch).loss.backward()
        if training.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(model.parameters(), training.max_grad_norm)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate_of(step)
            optimizer.step()
            optimizer.zero_grad()
    if name == "schedule_free_adamw":
        optimizers[0].eval()
    return {key: parameter.detach().flatten() for key, parameter in model.named_parameters()}


def distance_from_the_library(_rank: int, world_size: int, name: str, stages: Sequence[int], offload: Any) -> float:
    """The largest difference of a weight to evaluate, by any stage, from that of the library in a plain loop."""
    expected, worst = plain_weights(name), 0.0
    for stage in stages:
        layout = Layout(stage, world_size, "float32", offload)
        engine = wrap(build_model(torch.float32, ()), layout, **TRAINING[name])
        for step in range(STEPS):
            take_step(engine, tokens(step), rate_of(step))
        with zero_state.evaluation_weights(engine):
            found = weights_of(engine)
        worst = max(worst, *(float((found[each] - expected[each]).abs().max()) for each in expected))
        release(engine)
    return worst


@pytest.mark.parametrize("name", LIBRARY)
@pytest.mark.parametrize("world_size", [2, *(pytest.param(size, marks=pytest.mark.long) for size in (1, 3))])
def test_all_layouts_train_to_the_weights_of_the_library(name: str, world_size: int) -> None:
    stages = range(HIGHEST_STAGE.get(name, 3) + 1)
    assert max(run_group(world_size, distance_from_the_library, name, list(stages), "none")) < 1e-5


@pytest.mark.long
@pytest.mark.parametrize(
    ("stage", "offload"), [pytest.param(2, "optimizer", marks=pytest.mark.long), (3, "parameters")]
)
def test_schedule_free_takes_the_same_steps_in_host_memory(stage: int, offload: str) -> None:
    assert max(run_group(2, distance_from_the_library, "schedule_free_adamw", [stage], offload)) < 1e-5


@dataclass
class Found:
    """What a rank observed: layouts that did not resume exactly, and (wrote, read) pairs with differing states."""

    disturbed: list[Layout] = field(default_factory=list)
    pairs: list[tuple[Layout, Layout]] = field(default_factory=list)
    differing: list[tuple[Layout, Layout, str]] = field(default_factory=list)
    states: set[str] = field(default_factory=set)


def digest(engine: Any) -> str:
    """SHA-256 of this rank's states and of the model's weights, as trained and as evaluated."""
    found = hashlib.sha256()
    for fragment in zero_state.fragments_to_save(engine):
        for state in fragment.states.values():
            for piece in state.split(1000):
                found.update(piece.detach().cpu().numpy().tobytes())
    weights = [weights_of(engine)]
    with zero_state.evaluation_weights(engine):
        weights.append(weights_of(engine))
    weights.append(weights_of(engine))
    assert all(torch.equal(weights[0][name], weights[2][name]) for name in weights[0]), "an evaluation changes nothing"
    for weight in [*weights[0].values(), *weights[1].values()]:
        found.update(weight.float().cpu().numpy().tobytes())
    return found.hexdigest()


def matrix(rank: int, ranks: int, name: str, layouts: Sequence[Layout], root: Path) -> Found:
    """Run on each rank: every layout trains, commits and resumes; then every layout restores all commits."""
    leave_process_group()
    found = Found()
    for phase in ("train", "read"):
        for world_size in range(ranks, 0, -1):
            mine = [layout for layout in layouts if layout.world_size == world_size]
            if rank < world_size and mine:
                with process_group(rank, world_size, root / f"{phase}-{world_size}"):
                    for layout in mine:
                        if phase == "train":
                            found.disturbed += [] if resumes_exactly(name, layout, root) else [layout]
                        else:
                            read_all(name, layout, layouts, root, found)
    return found


def directory(root: Path, layout: Layout) -> JobDirectory:
    return JobDirectory(root / str(layout).replace(" ", "-"))


def new_engine(name: str, layout: Layout) -> Any:
    return wrap(build_model(DTYPES[layout.dtype], ()), layout, **TRAINING[name])


def resumes_exactly(name: str, layout: Layout, root: Path) -> bool:
    """Whether an engine resumed from a commit ends bit for bit as one that trained on."""
    digests, decay = [], TRAINING[name].get("emaDecay", 0.0)
    for is_second in (False, True):
        engine = new_engine(name, layout)
        if is_second:
            restore(engine, opened(directory(root, layout), NAME))
        else:
            for step in range(NAME.step):
                take_step(engine, tokens(step, engine.global_rank), ema_decay=decay)
            save(engine, directory(root, layout), NAME)
        for step in range(NAME.step, NAME.step + 3):
            take_step(engine, tokens(step, engine.global_rank), ema_decay=decay)
        digests.append(digest(engine))
        release(engine)
    return digests[0] == digests[1]


def read_all(name: str, layout: Layout, others: Sequence[Layout], root: Path, found: Found) -> None:
    """Restore the checkpoints of all layouts, one after the other, and compare all states with the files."""
    engine = new_engine(name, layout)
    for other in others:
        checkpoint = opened(directory(root, other), NAME)
        restore(engine, checkpoint)
        assert zero_state.optimizer_scalars(engine) == checkpoint.manifest.optimizer_scalars
        reader = CheckpointReader(checkpoint)
        found.pairs.append((other, layout))
        for fragment in zero_state.fragments_to_save(engine):
            for state, elements in fragment.states.items():
                found.states.add(state)
                wanted = torch.empty(elements.numel())
                reader.read(fragment.parameter, state, fragment.offset, wanted)
                if not torch.equal(torch.cat(list(elements.split(1000))).detach().cpu(), wanted):
                    found.differing.append((other, layout, f"{fragment.parameter}/{state}"))
    release(engine)


def every_layout(name: str, dtype: str, ranks: int) -> list[Layout]:
    """All stages that an optimizer and a precision allow, at world sizes 1 to `ranks`."""
    stages = range(0 if dtype == "float32" else 1, HIGHEST_STAGE.get(name, 3) + 1)
    return [Layout(stage, world_size, dtype) for stage in stages for world_size in range(1, ranks + 1)]


def some_layouts(name: str, dtype: str) -> list[Layout]:
    """Three of them: whole parameters on one rank, and two in which the border of partitions cuts parameters."""
    lowest, highest = (0 if dtype == "float32" else 1), HIGHEST_STAGE.get(name, 3)
    return [Layout(lowest, 1, dtype), Layout(1, 2, dtype), Layout(highest, 3, dtype)]


def in_host_memory() -> list[Layout]:
    """Layouts whose optimizer, or parameters too, are in host memory, and one without."""
    offloads: list[tuple[int, int, Any]] = [(1, 1, "optimizer"), (2, 2, "optimizer"), (3, 2, "optimizer")]
    layouts = [Layout(stage, world_size, "bfloat16", offload) for stage, world_size, offload in offloads]
    return [*layouts, Layout(3, 2, "float32", "parameters"), Layout(3, 1, "float32")]


def cases() -> Iterator[Any]:
    for name in TRAINING:
        dtype = "float32" if name == "adafactor" else "bfloat16"
        if name in LIBRARY:
            yield pytest.param(name, some_layouts(name, dtype), id=f"{name}-{dtype}")
        for each in DTYPES:
            layouts = every_layout(name, each, 3)
            yield pytest.param(name, layouts, id=f"{name}-{each}-all", marks=pytest.mark.long)
        if HIGHEST_STAGE.get(name, 3) == 3:
            yield pytest.param(name, in_host_memory(), id=f"{name}-offload", marks=pytest.mark.long)


STATES = {
    "schedule_free_adamw": {MASTER, SCHEDULE_FREE_BASE, "exp_avg_sq"},
    "muon": {MASTER, "momentum_buffer", "exp_avg", "exp_avg_sq"},
    "adafactor": {MASTER, "row_var", "col_var", "variance"},
    "ema": {MASTER, "exp_avg", "exp_avg_sq", EMA},
}


@pytest.mark.parametrize(("name", "layouts"), list(cases()))
def test_every_layout_resumes_exactly_and_restores_the_others_bit_for_bit(
    name: str, layouts: list[Layout], tmp_path: Path
) -> None:
    ranks = max(layout.world_size for layout in layouts)
    of_ranks = run_group(ranks, matrix, name, layouts, tmp_path, timeout=250)
    assert [found.disturbed for found in of_ranks] == [[]] * ranks
    assert [found.differing for found in of_ranks] == [[]] * ranks
    assert {pair for found in of_ranks for pair in found.pairs} == {(a, b) for a in layouts for b in layouts}
    assert {state for found in of_ranks for state in found.states} == STATES[name]


def averages(_rank: int, world_size: int, stage: int, dtype: str) -> float:
    """The largest difference of an average from the formula in fp64, after steps of which one is skipped."""
    decay, taken, worst = 0.5, 0, 0.0
    engine = wrap(build_model(DTYPES[dtype], ()), Layout(stage, world_size, dtype), emaDecay=decay)
    pieces = [fragment.states for fragment in zero_state.fragments_to_load(engine)]
    expected = [piece[MASTER].double() for piece in pieces]
    for step in range(6):
        is_skipped = step == 2
        take_step(engine, tokens(step), ema_decay=decay, weight=math.nan if is_skipped else 1.0)
        taken += not is_skipped
        kept = 1.0 if is_skipped else min(decay, (1 + taken) / (10 + taken))
        expected = [kept * was + (1 - kept) * now[MASTER].double() for was, now in zip(expected, pieces, strict=True)]
        for piece, wanted in zip(pieces, expected, strict=True):
            worst = max(worst, float((piece[EMA].double() - wanted).abs().max()))
    return worst


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "float32"), pytest.param(2, "float32", marks=pytest.mark.long), (3, "bfloat16")]
)
def test_the_average_follows_its_formula_and_ignores_skipped_steps(stage: int, dtype: str) -> None:
    assert max(run_group(2, averages, stage, dtype)) < 1e-6
