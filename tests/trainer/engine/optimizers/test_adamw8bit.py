"""AdamW with 8-bit moments takes AdamW's steps, and resumes at any ZeRO stage and world size."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig, LlamaForCausalLM

from spotune.job import FinetuneJob
from spotune_trainer.checkpoint.fragment import STATES, FragmentSource
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.checkpoint.reader import CheckpointReader
from spotune_trainer.engine import zero_state
from spotune_trainer.engine.optimizers.adamw8bit import MIN_8BIT_ELEMENTS, AdamW8bit
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.models.quantization.blockwise import BLOCK_ELEMENTS, BlockwiseTensor
from tests.trainer.support.groups import run_group
from tests.trainer.support.layouts import (
    DTYPES,
    Layout,
    leave_process_group,
    opened,
    process_group,
    release,
    restore,
    save,
    train,
    weights_of,
    wrap,
)
from tests.trainer.support.runs import STEPS, Runs, committed_state, losses, train_generation
from tests.trainer.support.runs import Layout as RunLayout

pytestmark = pytest.mark.slow

STAGES = {"float32": (0, 1, 2, 3), "bfloat16": (1, 2, 3)}
MATRICES = [
    ("bfloat16", 2),
    *(pytest.param(found, marks=pytest.mark.long) for found in (("bfloat16", 3), ("float32", 2), ("float32", 3))),
]
"""Data type, and the largest world size."""
NAME = CheckpointName(2, 1)
HALF_A_STEP = {"exp_avg": 0.0106, "exp_avg_sq": 0.0036}
"""Half the largest distance of neighbours in the quantization map, relative to the absmax."""


@dataclass(frozen=True)
class Cell:
    """Result of restoring the checkpoint of another layout on one rank.

    Attributes:
        masters_differ: whether a master is not the writer's, bit for bit.
        moments_differ: whether a moment is not, bit for bit.
        worst: largest difference of a moment from the writer's, relative to the largest of its parameter.
    """

    wrote: Layout
    reads: Layout
    masters_differ: bool
    moments_differ: bool
    worst: dict[str, float]


@dataclass
class Found:
    """The results of one rank.

    Attributes:
        disturbed: layouts at which a resumed run differs from an uninterrupted one.
        cells: one for each pair of layouts that this rank has read.
    """

    disturbed: list[Layout] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)


def layouts(dtype: str, ranks: int) -> list[Layout]:
    """All stages and world sizes, and two with the optimizer in host memory."""
    every = [Layout(stage, world_size, dtype) for stage in STAGES[dtype] for world_size in range(1, ranks + 1)]
    return [*every, Layout(2, 2, dtype, "optimizer"), Layout(3, 2, dtype, "parameters")]


def build(layout: Layout) -> Any:
    """An engine for a Llama with matrices above and below MIN_8BIT_ELEMENTS."""
    sizes: dict[str, Any] = {"hidden_size": 66, "intermediate_size": 97, "head_dim": 6}
    heads: dict[str, Any] = {"num_attention_heads": 11, "num_key_value_heads": 1, "num_hidden_layers": 1}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=101, **sizes, **heads))
    return wrap(model.to(DTYPES[layout.dtype]), layout, optimizer="adamw8bit")


def elements(state: Any) -> Tensor:
    """A state of a fragment as one tensor on the host."""
    return torch.cat([piece.detach().cpu() for piece in state.split(1000)])


def digest(engine: Any) -> str:
    """SHA-256 of this rank's states and of the model's weights."""
    found = hashlib.sha256()
    for fragment in zero_state.fragments_to_save(engine):
        for state in STATES:
            found.update(elements(fragment.states[state]).numpy().tobytes())
    for weight in weights_of(engine).values():
        found.update(weight.float().cpu().numpy().tobytes())
    return found.hexdigest()


def matrix(rank: int, ranks: int, dtype: str, root: Path) -> Found:
    """Run on each rank: every layout trains, commits and resumes; then every layout restores all commits."""
    leave_process_group()
    found = Found()
    for phase in ("train", "read"):
        for world_size in range(ranks, 0, -1):  # from the largest on, as in layout_matrix.Matrix
            if rank < world_size:
                with process_group(rank, world_size, root / f"{phase}-{world_size}"):
                    for layout in layouts(dtype, ranks):
                        if layout.world_size == world_size and phase == "train":
                            found.disturbed += [] if goes_on_alike(layout, root) else [layout]
                        elif layout.world_size == world_size:
                            found.cells += read_all(layout, layouts(dtype, ranks), root)
    return found


def directory(root: Path, layout: Layout) -> JobDirectory:
    return JobDirectory(root / str(layout).replace(" ", "-"))


def goes_on_alike(layout: Layout, root: Path) -> bool:
    """Whether an engine resumed from a commit ends bit for bit as one that trained on."""
    digests = []
    for is_second in (False, True):
        engine = build(layout)
        if is_second:
            restore(engine, opened(directory(root, layout), NAME))
        else:
            train(engine, NAME.step)
            save(engine, directory(root, layout), NAME)
        train(engine, 2)
        digests.append(digest(engine))
        release(engine)
    return digests[0] == digests[1]


def read_all(layout: Layout, others: list[Layout], root: Path) -> Iterator[Cell]:
    """Restore the checkpoints of the others, one after the other."""
    engine = build(layout)
    for other in others:
        checkpoint = opened(directory(root, other), NAME)
        restore(engine, checkpoint)
        reader = CheckpointReader(checkpoint)
        pairs = [
            (state, elements(fragment.states[state]), *expected(reader, fragment, state, engine))
            for fragment in zero_state.fragments_to_save(engine)
            for state in STATES
        ]
        worst = {
            name: max(float((mine - theirs).abs().max()) / largest for at, mine, theirs, largest in pairs if at == name)
            for name in HALF_A_STEP
        }
        masters_differ = any(not torch.equal(mine, theirs) for at, mine, theirs, _ in pairs if at == "fp32")
        moments_differ = any(not torch.equal(mine, theirs) for at, mine, theirs, _ in pairs if at != "fp32")
        yield Cell(other, layout, masters_differ, moments_differ, worst)
    release(engine)


def expected(reader: CheckpointReader, fragment: FragmentSource, state: str, engine: Any) -> tuple[Tensor, float]:
    """A fragment's elements in a checkpoint, and the largest magnitude of its parameter."""
    shape = zero_state.parameter_shapes(engine)[fragment.parameter]
    whole = torch.empty(torch.Size(shape).numel())
    reader.read(fragment.parameter, state, 0, whole)
    start = fragment.offset
    return whole[start : start + fragment.states[state].numel()], float(whole.abs().max())


@pytest.fixture(scope="module", params=MATRICES, ids=str)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Found]:
    """By rank."""
    dtype, ranks = request.param
    of_ranks = run_group(ranks, matrix, dtype, tmp_path_factory.mktemp("adamw8bit"), timeout=250)
    pairs = {(cell.wrote, cell.reads) for found in of_ranks for cell in found.cells}
    assert pairs == {(wrote, reads) for wrote in layouts(dtype, ranks) for reads in layouts(dtype, ranks)}
    return of_ranks


@pytest.fixture
def cells(found: list[Found]) -> list[Cell]:
    return [cell for of_rank in found for cell in of_rank.cells]


def test_resuming_at_the_same_layout_is_bit_for_bit_exact(found: list[Found], cells: list[Cell]) -> None:
    assert [of_rank.disturbed for of_rank in found] == [[]] * len(found)
    same = [cell for cell in cells if cell.wrote == cell.reads]
    assert [cell for cell in same if cell.masters_differ or cell.moments_differ] == []


def test_moments_are_equal_at_every_layout_that_does_not_split_parameters(cells: list[Cell]) -> None:
    whole = [cell for cell in cells if cell.wrote.world_size == cell.reads.world_size == 1]
    assert whole
    assert [cell for cell in whole if cell.masters_differ or cell.moments_differ] == []


def test_at_another_layout_masters_are_equal_and_moments_within_half_a_quantization_step(cells: list[Cell]) -> None:
    assert [cell for cell in cells if cell.masters_differ] == []
    assert [cell for cell in cells if any(cell.worst[name] > most for name, most in HALF_A_STEP.items())] == []
    assert any(cell.moments_differ for cell in cells), "their blocks begin elsewhere"


def stepped(parameters: Sequence[nn.Parameter], optimizer: torch.optim.Optimizer, steps: int) -> None:
    """Some steps with gradients of a positive mean, the same for every optimizer."""
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=random).add_(0.3).to(parameter.device)
        optimizer.step()


def adamw8bit(parameters: Sequence[nn.Parameter], *, compiled: bool = False, **settings: Any) -> AdamW8bit:
    optimizer = AdamW8bit(
        [{"params": list(parameters), "weight_decay": 0.1}],
        {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8} | settings,
        compiled=compiled,
    )
    for parameter in parameters:
        optimizer.moments(parameter, 0, parameter.numel(), parameter.numel())
    return optimizer


def moments_of(optimizer: AdamW8bit) -> list[Tensor]:
    """Copies of all dequantized moments."""
    runs = [run for state in optimizer.state.values() for run in state["slices"].values()]
    states = [(state, run.length) for run in runs for state in run.states.values()]
    return [state.clone() if isinstance(state, Tensor) else state.read(0, length) for state, length in states]


def parameters_of(*sizes: int, device: str = "cpu") -> list[nn.Parameter]:
    random = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(size, generator=random).to(device)) for size in sizes]


def test_steps_are_those_of_adamw_within_the_precision_of_the_moments() -> None:
    begin, mine, theirs = (parameters_of(MIN_8BIT_ELEMENTS, 100) for _ in range(3))
    stepped(mine, adamw8bit(mine), 20)
    stepped(theirs, torch.optim.AdamW(theirs, lr=0.01, weight_decay=0.1), 20)
    for was, found, wanted in zip(begin, mine, theirs, strict=True):
        moved = (wanted - was).detach().norm()
        assert float((found - wanted).detach().norm() / moved) < (0.02 if was.numel() == MIN_8BIT_ELEMENTS else 1e-5)


def test_the_update_is_compiled_once_for_all_sizes_with_equal_results() -> None:
    sizes = (MIN_8BIT_ELEMENTS, 2 * MIN_8BIT_ELEMENTS + 7, 100, 3 * MIN_8BIT_ELEMENTS)
    begin, mine, theirs = (parameters_of(*sizes) for _ in range(3))
    counters.clear()
    stepped(mine, adamw8bit(mine, compiled=True), 5)
    assert counters["stats"]["unique_graphs"] == 1
    stepped(theirs, adamw8bit(theirs), 5)
    for was, found, wanted in zip(begin, mine, theirs, strict=True):
        assert float((found - wanted).detach().norm() / (wanted - was).detach().norm()) < 1e-3


def test_a_small_gradient_among_large_ones_causes_no_large_step() -> None:
    """The second moment is below the lowest number of the map: Adam must not divide by its epsilon alone."""
    [parameter] = parameters_of(MIN_8BIT_ELEMENTS)
    before, optimizer = parameter.detach().clone(), adamw8bit([parameter], lr=0.01)
    for small in (1e-4, 1e-4, 0.0, 0.0):
        parameter.grad = torch.ones(MIN_8BIT_ELEMENTS)
        parameter.grad[1::2] = small
        optimizer.step()
    assert float((parameter.detach() - before * (1 - 0.001) ** 4).abs().max()) < 4 * 0.01 * 1.1


def test_no_block_spans_two_parameters() -> None:
    tensor = nn.Parameter(torch.zeros(2 * MIN_8BIT_ELEMENTS + 10))
    optimizer = AdamW8bit([{"params": [tensor]}], {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8})
    first = optimizer.moments(tensor, 0, MIN_8BIT_ELEMENTS + 10, MIN_8BIT_ELEMENTS + 10).states["exp_avg_sq"]
    second = optimizer.moments(tensor, MIN_8BIT_ELEMENTS + 10, MIN_8BIT_ELEMENTS, MIN_8BIT_ELEMENTS).states[
        "exp_avg_sq"
    ]
    assert isinstance(first, BlockwiseTensor)
    assert isinstance(second, BlockwiseTensor)
    tensor.grad = torch.cat([torch.ones(MIN_8BIT_ELEMENTS + 10), torch.full((MIN_8BIT_ELEMENTS,), 1e-6)])
    optimizer.step()
    assert torch.equal(first.absmax, torch.full((MIN_8BIT_ELEMENTS // BLOCK_ELEMENTS + 1,), first.absmax[0].item()))
    assert float(second.absmax.max()) == pytest.approx(1e-12 * float(first.absmax[0]), rel=1e-3)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_non_finite_gradient_changes_nothing(compiled: bool) -> None:
    parameters = parameters_of(MIN_8BIT_ELEMENTS, 100)
    optimizer = adamw8bit(parameters, compiled=compiled)
    stepped(parameters, optimizer, 1)
    before, moments = [parameter.detach().clone() for parameter in parameters], moments_of(optimizer)
    optimizer.found_inf = torch.ones(())
    for parameter in parameters:
        parameter.grad = torch.full_like(parameter, float("nan"))
    optimizer.step()
    assert all(torch.equal(found, was) for found, was in zip(parameters, before, strict=True))
    assert all(torch.equal(found, was) for found, was in zip(moments_of(optimizer), moments, strict=True))
    assert {int(state["step"]) for state in optimizer.state.values()} == {1}


def job_of(runs: Runs, dtype: str, **sections: Any) -> FinetuneJob:
    return runs.job("causal", dtype, training={"optimizer": "adamw8bit"}, **sections)


@pytest.mark.parametrize(
    ("layout", "dtype"),
    [
        (RunLayout(2, 2), "bfloat16"),
        (RunLayout(2, 3), "float32"),
        *(pytest.param(RunLayout(2, stage), "float32", marks=pytest.mark.long) for stage in range(3)),
    ],
    ids=str,
)
def test_an_interrupted_run_ends_with_the_same_weights(runs: Runs, layout: RunLayout, dtype: str) -> None:
    resumed, undisturbed = runs.with_and_without_loss(job_of(runs, dtype), layout)
    assert losses(resumed) == losses(undisturbed)
    found, wanted = committed_state(resumed, STEPS), committed_state(undisturbed, STEPS)
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    exported = [(run.export / "model.safetensors").read_bytes() for run in (resumed, undisturbed)]
    assert hashlib.sha256(exported[0]).hexdigest() == hashlib.sha256(exported[1]).hexdigest()


@pytest.mark.long
def test_a_run_resumed_at_another_layout_has_nearly_the_same_losses(runs: Runs) -> None:
    job = job_of(runs, "float32")
    undisturbed = runs.empty("adamw8bit")
    train_generation(undisturbed, job, RunLayout(2, 2))
    resumed = runs.interrupted(undisturbed, step=5)
    train_generation(resumed, job, RunLayout(3, 3))
    assert losses(resumed) == pytest.approx(losses(undisturbed), rel=1e-4)


@pytest.mark.long
def test_an_interrupted_adapter_ends_with_the_same_matrices(runs: Runs) -> None:
    """The matrices are large enough for 8-bit moments."""
    job = job_of(runs, "bfloat16", adapter={"lora": {"r": 256, "targetModules": ["q_proj", "v_proj"]}})
    layout = RunLayout(2, 1)
    undisturbed = runs.empty("adamw8bit")
    train_generation(undisturbed, job, layout)
    resumed = runs.interrupted(undisturbed, step=5)
    train_generation(resumed, job, layout)
    found, wanted = committed_state(resumed, STEPS), committed_state(undisturbed, STEPS)
    assert max(tensor.numel() for tensor in wanted.values()) >= MIN_8BIT_ELEMENTS
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
