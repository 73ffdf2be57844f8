"""The matrix of layouts: each layout trains and commits, and an engine of every layout restores each checkpoint."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spotune_trainer.checkpoint.fragment import STATES
from spotune_trainer.checkpoint.layout import Checkpoint, CheckpointName
from spotune_trainer.checkpoint.reader import CheckpointReader
from spotune_trainer.engine import zero_state
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.layouts import (
    Layout,
    adopt,
    build,
    committing,
    differences,
    leave_process_group,
    of_first_rank,
    opened,
    process_group,
    release,
    state_of,
    train,
)

STATE_BYTES = 4 * len(STATES)
_TRIES = 5
_IO_COUNTERS = Path("/proc/self/io")
"""I/O counters of the kernel (proc(5)); `rchar` is the first line."""


@dataclass(frozen=True)
class Written:
    """The commit of one layout, as observed on one rank.

    Attributes:
        from_originals: whether its copy was taken from the engine's own tensors, because GPU memory was short.
        seconds: from the start of the commit until this rank had finished it.
        norms: of all masters and of all moments, to show that they are not zero.
    """

    wrote: Layout
    rank: int
    from_originals: bool
    seconds: float
    norms: dict[str, float]


@dataclass(frozen=True)
class Cell:
    """What one rank observed when its engine restored the checkpoint of another layout.

    Attributes:
        differing: names of the states that differ from the writer's in any bit.
        bytes_read: of states, as the kernel counts them; None where it does not.
        bytes_needed: of the states that the rank keeps.
        seconds: to read the checkpoint and to copy it to the engine.
    """

    wrote: Layout
    reads: Layout
    rank: int
    differing: tuple[str, ...]
    bytes_read: int | None
    bytes_needed: int
    seconds: float


def beside_nothing(_: Layout) -> AbstractContextManager[None]:
    """Commit without any load beside it."""
    return nullcontext()


@dataclass
class Matrix:
    """All pairs of layouts, run by one process of a pool that has as many processes as the largest layout has ranks.

    Attributes:
        root: folder of the checkpoints.
        layouts: each of them writes, and reads the checkpoints of all.
        build: builds an engine of a layout.
        shape: [batch, sequence] of the tokens of each training step.
        circumstances: context in which a layout commits.
    """

    root: Path
    layouts: Sequence[Layout]
    build: Callable[[Layout], Any] = build
    shape: tuple[int, int] = (2, 6)
    circumstances: Callable[[Layout], AbstractContextManager[None]] = beside_nothing
    written: list[Written] = field(default_factory=list)
    cells: list[Cell] = field(default_factory=list)
    _expected: dict[Layout, dict[str, Tensor]] = field(default_factory=dict)

    def run(self, rank: int) -> None:
        """Write at every layout, then read at every layout, by as many of the pool's processes as it has ranks."""
        leave_process_group()
        for phase, act in (("write", self._write), ("read", self._read)):
            # From the largest group down: all processes meet between the phases, and DeepSpeed, which numbers the
            # modules that it has seen in a process, finds the same numbers on all ranks whenever it trains.
            for world_size in sorted({layout.world_size for layout in self.layouts}, reverse=True):
                if rank < world_size:
                    with process_group(rank, world_size, self.root / f"{phase}-{world_size}"):
                        for layout in self.layouts:
                            if layout.world_size == world_size:
                                act(layout)

    def _write(self, layout: Layout) -> None:
        """Train, record the state as DeepSpeed reports it, and commit it while the next step changes it."""
        engine, directory, name = self.build(layout), self._home(layout), _name(layout)
        train(engine, layout.steps, self.shape)
        self._expected[layout] = state = state_of(engine)
        with self.circumstances(layout), committing(engine, directory, name) as checkpointer:
            from_originals = checkpointer._snapshot._reads_originals
            train(engine, 1, self.shape, before_update=checkpointer.wait_for_staging)
            commit = checkpointer.wait()
        assert commit is not None
        norms = {each: _norm(state, each) for each in STATES}
        self.written.append(Written(layout, engine.global_rank, from_originals, commit.seconds, norms))
        release(engine)

    def _read(self, layout: Layout) -> None:
        """Restore the checkpoint of every layout, one after the other."""
        engine = self.build(layout)
        for other in self.layouts:
            checkpoint = opened(self._home(other), _name(other))
            started = time.monotonic()
            bytes_read, bytes_needed = _restore(engine, checkpoint)
            seconds = time.monotonic() - started
            expected = self._expected.get(other)
            if other.world_size < layout.world_size:
                expected = of_first_rank(engine, expected)
            assert expected is not None
            differing = tuple(differences(engine, expected))
            self.cells.append(Cell(other, layout, engine.global_rank, differing, bytes_read, bytes_needed, seconds))
        release(engine)

    def _home(self, layout: Layout) -> JobDirectory:
        """Job directory of the checkpoint of a layout."""
        return JobDirectory(self.root / str(layout).replace(" ", "-"))


def _name(layout: Layout) -> CheckpointName:
    return CheckpointName(layout.steps, 1)


def _norm(state: Mapping[str, Tensor], which: str) -> float:
    """Euclidean norm of one of `STATES` over all parameters."""
    squares = [tensor.double().square().sum() for name, tensor in state.items() if name.endswith(f"/{which}")]
    return float(torch.stack(squares).sum().sqrt())


def _restore(engine: Any, checkpoint: Checkpoint) -> tuple[int | None, int]:
    """Restore a checkpoint. Returns the bytes of state that this rank has read, and the bytes that it needed.

    The kernel also counts other reads of this process (coverage, stores of torch that are collected). If they are too
    many, the restore is repeated a few times, and the smallest count is returned.
    """
    needed = zero_state.fragments_to_load(engine)
    elements = sum(torch.Size(shape).numel() for shape in checkpoint.manifest.parameters.values())
    headers = checkpoint.bytes - STATE_BYTES * elements
    bytes_needed = STATE_BYTES * sum(fragment.states["fp32"].numel() for fragment in needed)
    counts = []
    for _ in range(_TRIES):
        before = _read_counters()
        CheckpointReader(checkpoint).restore(needed)
        counts.append(_read_between(before, _read_counters()) - headers)
        if counts[-1] <= bytes_needed:
            break
    adopt(engine, checkpoint)
    return min(counts) if _IO_COUNTERS.exists() else None, bytes_needed


def _read_counters() -> str:
    """The kernel's I/O counters of this process."""
    return _IO_COUNTERS.read_text() if _IO_COUNTERS.exists() else "rchar: 0"


def _read_between(before: str, after: str) -> int:
    """Bytes that were read between two calls of `_read_counters`, without those of the first call itself."""
    first, second = (int(counters.split()[1]) for counters in (before, after))
    return second - first - len(before)
