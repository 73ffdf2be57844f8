r"""Measures other ways to compute the largest kernels of a training step: the products of a layer, and its attention.

The alternatives of one task take turns, each for half a second without a pause, so that all of them run at the GPU's
power limit, as they do in a step. What a task does now is its first alternative:

* two products of one input (gate and up projections): one after the other, or as one with the weights side by side;
* cuBLASLt instead of cuBLAS for single products, and for one of them Triton kernels by the compiler's autotuning;
* attention by cuDNN, flash, or the compiler (FlexAttention), with heads of keys and values repeated or shared.

    python -m benchmarks.kernel_alternatives --output benchmarks/results/kernel_alternatives.json
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.machine import describe_machine
from tests.trainer.support.measured import publish

Task = Mapping[str, Callable[[], Any]]
"""Alternatives that compute the same, by name."""


@dataclass(frozen=True)
class Layer:
    """Shapes of one layer and its micro-batch.

    Attributes:
        rows: of the micro-batch.
        length: tokens per row.
        heads: of queries.
        shared_heads: of keys and values.
        width: of a head.
        wide: width between gate and down projection.
    """

    rows: int
    length: int
    heads: int
    shared_heads: int
    width: int
    wide: int

    @property
    def tokens(self) -> int:
        """Tokens of the micro-batch."""
        return self.rows * self.length

    @property
    def hidden(self) -> int:
        """Width of the model."""
        return self.heads * self.width


LAYERS = {"1.1B": Layer(16, 2048, 32, 4, 64, 5632), "8B": Layer(2, 4096, 32, 8, 128, 14336)}


def random(*shape: int, scale: float = 1.0) -> Tensor:
    """Normally distributed numbers in bfloat16: the power that a product takes depends on its numbers."""
    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16) * scale


def two_products(layer: Layer) -> dict[str, Task]:
    """Gate and up projections of one input: forward, gradient of the input, gradients of the weights."""
    rows, both = random(layer.tokens, layer.hidden), random(2 * layer.wide, layer.hidden, scale=layer.hidden**-0.5)
    gate, up = (part.clone() for part in both.chunk(2))
    output_gradient = random(layer.tokens, 2 * layer.wide)
    of_gate, of_up = (part.contiguous() for part in output_gradient.chunk(2, dim=1))
    sums = torch.zeros_like(both)
    sum_of_gate, sum_of_up = (part.clone() for part in sums.chunk(2))

    def forward_apart() -> None:
        _ = rows @ gate.T
        _ = rows @ up.T

    def backward_apart() -> None:
        total = of_gate @ gate
        torch.addmm(total, of_up, up, out=total)

    def weights_apart() -> None:
        torch.addmm(sum_of_gate, of_gate.T, rows, out=sum_of_gate)
        torch.addmm(sum_of_up, of_up.T, rows, out=sum_of_up)

    return {
        "gate and up, forward": {"two products": forward_apart, "one product": lambda: rows @ both.T},
        "gate and up, gradient of the input": {
            "two products, the second adds": backward_apart,
            "one product": lambda: output_gradient @ both,
        },
        "gate and up, gradients of the weights": {
            "two products": weights_apart,
            "one product": lambda: torch.addmm(sums, output_gradient.T, rows, out=sums),
        },
    }


def single_products(layer: Layer) -> dict[str, Task]:
    """The down projection and its gradients by other libraries."""
    wide, down = random(layer.tokens, layer.wide), random(layer.hidden, layer.wide, scale=layer.wide**-0.5)
    output_gradient = random(layer.tokens, layer.hidden)
    products = {
        "down, forward": (wide, down.T),
        "down, gradient of the input": (output_gradient, down),
        "down, gradient of the weights": (output_gradient.T, wide),
    }
    tasks = {name: by_library(*factors) for name, factors in products.items()}
    return {**tasks, "down, forward": {**tasks["down, forward"], **by_triton(wide, down.T)}}


def by_library(left: Tensor, right: Tensor) -> Task:
    """One product by cuBLAS and cuBLASLt."""

    def of_library(name: str) -> Tensor:
        torch.backends.cuda.preferred_blas_library(name)
        return left @ right

    return {"cuBLAS": partial(of_library, "cublas"), "cuBLASLt": partial(of_library, "cublaslt")}


def by_triton(left: Tensor, right: Tensor) -> Task:
    """One product by the Triton kernels that the compiler finds fastest."""
    found: dict[str, Callable[[], Any]] = {}
    settings: dict[str, Any] = {"max_autotune": True, "max_autotune_gemm_backends": "TRITON"}
    for name, changed in {"Triton": {}, "Triton, persistent": {"triton.enable_persistent_tma_matmul": True}}.items():
        torch._dynamo.reset()
        product = torch.compile(torch.matmul, dynamic=False, options={**settings, **changed})
        product(left, right)
        found[name] = partial(product, left, right)
    return found


def attention(layer: Layer) -> dict[str, Task]:
    """Causal attention, forward and backward."""
    shape = layer.rows, layer.length, layer.heads, layer.width
    shared = layer.rows, layer.length, layer.shared_heads, layer.width
    query = random(*shape).transpose(1, 2).requires_grad_()
    key, value = (random(*shared).transpose(1, 2).requires_grad_() for _ in range(2))
    gradient = random(*shape).transpose(1, 2)
    repeats = layer.heads // layer.shared_heads

    def by_backend(backend: SDPBackend, *, repeated: bool) -> Tensor:
        keys, values = (each.repeat_interleave(repeats, 1) if repeated else each for each in (key, value))
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(query, keys, values, is_causal=True, enable_gqa=not repeated)

    mask = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, layer.length, layer.length, device="cuda")
    torch._dynamo.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    ways: dict[str, Callable[[], Tensor]] = {
        "cuDNN, shared heads": partial(by_backend, SDPBackend.CUDNN_ATTENTION, repeated=False),
        "cuDNN, repeated heads": partial(by_backend, SDPBackend.CUDNN_ATTENTION, repeated=True),
        "flash, shared heads": partial(by_backend, SDPBackend.FLASH_ATTENTION, repeated=False),
        "FlexAttention": lambda: compiled(query, key, value, block_mask=mask, enable_gqa=True),
    }
    return {
        "attention, forward and backward": {
            name: partial(lambda way: way().backward(gradient), way) for name, way in ways.items()
        }
    }


def measure(task: Task, seconds: float, rounds: int) -> dict[str, float]:
    """Median milliseconds of one execution of each alternative, over rounds in which they take turns."""
    counts = {name: max(5, int(seconds * 1000 / _milliseconds(run, 10))) for name, run in task.items()}
    found: dict[str, list[float]] = {name: [] for name in task}
    for _ in range(rounds):
        for name, run in task.items():
            found[name].append(_milliseconds(run, counts[name]))
    return {name: round(statistics.median(each), 4) for name, each in found.items()}


def _milliseconds(run: Callable[[], Any], count: int) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    for _ in range(3):
        run()
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / count


def main() -> None:
    """Measure all tasks of both models."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=0.5, help="of each alternative in each round")
    parser.add_argument("--rounds", type=int, default=3, help="rounds in which the alternatives take turns")
    parser.add_argument("--output", type=Path, help="also write the JSON to this file")
    options = parser.parse_args()
    machine = {**describe_machine("torch"), "device": torch.cuda.get_device_name()}
    result: dict[str, Any] = {"machine": machine, "seconds": options.seconds, "rounds": options.rounds, "layers": {}}
    for size, layer in LAYERS.items():
        tasks: dict[str, Any] = {}
        result["layers"][size] = {"shape": asdict(layer), "milliseconds": tasks}
        for make in (two_products, single_products, attention):
            for name, task in make(layer).items():
                tasks[name] = measure(task, options.seconds, options.rounds)
                publish(result, options.output)
            torch.backends.cuda.preferred_blas_library("cublas")
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
