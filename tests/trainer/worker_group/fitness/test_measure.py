"""The check of a node's devices, for real on the processor: what it finds, and that it is short."""

from __future__ import annotations

import time

import pytest
import torch

from spotune_trainer.worker_group.fitness.measure import (
    OF_CPU,
    check_device,
    check_memory,
    check_products,
    measure,
    with_states,
)
from spotune_trainer.worker_group.fitness.measurements import DeviceMeasurement
from spotune_trainer.worker_group.fitness.nvidia_smi import GpuState

CPU = torch.device("cpu")


def test_healthy_processor_passes_within_a_fraction_of_a_second() -> None:
    check_device(CPU, 0, "cpu", OF_CPU)  # loads libraries
    started = time.process_time()
    measured = check_device(CPU, 0, "cpu", OF_CPU)
    assert time.process_time() - started < 1.0
    assert measured.problems == ()
    assert measured.tflops > 0
    assert OF_CPU.chunk_bytes <= measured.checked_bytes <= OF_CPU.memory_bytes


@pytest.mark.parametrize(
    ("bit", "words"),
    [pytest.param(1, 1, id="a bit that changed"), pytest.param(1 << 40, 3, id="some words")],
)
def test_memory_that_changes_is_found(bit: int, words: int) -> None:
    def flip(chunks: list[torch.Tensor]) -> None:
        chunks[-1][:words] ^= bit

    _, problems = check_memory(CPU, OF_CPU, flip)
    assert problems == [f"{2 * words} words of its memory do not keep what is written to them"]


def test_chunks_at_the_same_address_are_found() -> None:
    """A wrong address line: what is written to one chunk shows up in another one."""

    def alias(chunks: list[torch.Tensor]) -> None:
        chunks.append(chunks[0])

    _, problems = check_memory(CPU, OF_CPU, alias)
    assert len(problems) == 1


@pytest.mark.parametrize(
    ("row", "problems"),
    [
        (slice(0, 1), ["the same matrix product gives different bits"]),
        (slice(None), ["the same matrix product gives different bits", "a matrix product is wrong"]),
    ],
)
def test_wrong_products_are_found(row: slice, problems: list[str]) -> None:
    def flip(product: torch.Tensor) -> None:
        product[row] += 1

    generator = torch.Generator().manual_seed(OF_CPU.matrix)
    for _ in range(2):
        torch.randint(-2, 3, (OF_CPU.matrix, OF_CPU.matrix), generator=generator)
    rows = torch.randperm(OF_CPU.matrix, generator=generator)[:32].tolist()
    _, found = check_products(CPU, OF_CPU, flip)
    assert found == (problems if 0 not in rows else [*problems[:1], "a matrix product is wrong"])


@pytest.mark.skipif(torch.cuda.is_available(), reason="the node has a GPU")
def test_node_whose_gpus_cannot_be_used_is_unfit() -> None:
    assert measure(gpus=True).problems == ("CUDA finds no GPU that it can use",)


def test_what_the_driver_says_is_added_to_the_gpu() -> None:
    gpu, fault = DeviceMeasurement(1, "cuda", "H100", problems=("a",)), GpuState(1, "H100", ("b",))
    assert with_states([gpu], [GpuState(0, "H100", ("c",)), fault]) == [
        DeviceMeasurement(1, "cuda", "H100", problems=("a", "b"))
    ]
    cpu = DeviceMeasurement(0, "cpu", "cpu")
    assert with_states([cpu], [GpuState(0, "H100", ()), fault]) == [
        cpu,
        DeviceMeasurement(1, "cuda", "H100", problems=("b",)),
    ]
