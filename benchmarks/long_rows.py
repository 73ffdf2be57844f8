r"""Measures training on rows of 4,096 to 131,072 tokens on one GPU, and the attention kernels alone.

Trains Llamas of 1.1 and 8 billion parameters with random weights, in the layout that the plan chooses. MFU counts the
model's operations only: nothing that is computed again, and only scores that causal attention within documents needs.
Attention is also timed alone, at the shape of one layer: its operations over the bf16 peak, and its part of the step.
Results are written after each case, and add to those that the output already has.

    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/long_rows.py --output benchmarks/results/long_rows.json
    PYTHONPATH=. torchrun --nproc-per-node 1 benchmarks/long_rows.py --toy   # on processors, to try it
"""

from __future__ import annotations

import argparse
import gc
import json
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic.alias_generators import to_camel
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.throughput import Case, MeasuredWorker, measure
from spotune_trainer.data.batches import Batch
from spotune_trainer.job_directory.notice import Flags
from spotune_trainer.models import packed_attention
from spotune_trainer.models.flops import peak_flops
from spotune_trainer.models.mfu_meter import MfuMeter
from tests.trainer.support.measured import LLAMAS, machine, publish, torchrun_group

_FULL: dict[str, Any] = {}
_FULL_8BIT: dict[str, Any] = {"training": {"optimizer": "adamw8bit"}}
_LORA: dict[str, Any] = {"adapter": {"lora": {"r": 16, "alpha": 32, "dropout": 0.0}}}


@dataclass(frozen=True)
class LongCase:
    """A case and about how long it takes.

    Attributes:
        case: as for benchmarks/throughput.py.
        seconds: with compilation, on one H200; the case is not started if there is less time.
    """

    case: Case
    seconds: float


def long_case(size: str, length: int, rows: int, sections: dict[str, Any], seconds: float, **more: Any) -> LongCase:
    """A Llama's case: its size, tokens of a row, rows of a step, sections of the job, seconds, and fields of `Case`."""
    values = {"zero_stage": 1, "compile": True, "warm_up": 2, "steps": 3, **more}
    return LongCase(Case(size, length, batch=rows, sections=sections, **values), seconds)


CASES = {
    "8B LoRA, 128k": long_case("8B", 131072, 1, _LORA, 330, warm_up=1, steps=2),
    "8B LoRA, 4k": long_case("8B", 4096, 16, _LORA, 100, micro_batch=2),
    "8B, 32k": long_case("8B", 32768, 2, _FULL_8BIT, 150),
    "8B, 4k": long_case("8B", 4096, 16, _FULL_8BIT, 120, micro_batch=2),
    "8B LoRA, 32k": long_case("8B", 32768, 2, _LORA, 130),
    "1.1B, 128k": long_case("1.1B", 131072, 1, _FULL, 160, warm_up=1, steps=2),
    "1.1B, 32k": long_case("1.1B", 32768, 2, _FULL, 80),
    "1.1B, 4k": long_case("1.1B", 4096, 32, _FULL, 70, micro_batch=8),
    "1.1B, 128k of 32 documents": long_case("1.1B", 131072, 1, _FULL, 80, documents=32),
    "8B LoRA, 128k of 32 documents": long_case("8B", 131072, 1, _LORA, 150, documents=32),
    "8B, 32k, offloaded": long_case("8B", 32768, 2, {**_FULL_8BIT, "execution": {"offloadActivations": True}}, 150),
}
"""The most important first. A row of 131,072 tokens takes a minute at 8B, so there are few steps."""
TOYS = {
    "toy, 1k": long_case("tiny", 1024, 2, _FULL, 60, warm_up=1, steps=1),
    "toy LoRA, 1k, offloaded": long_case(
        "small",
        1024,
        2,
        {**_LORA, "execution": {"offloadActivations": True, "gradientCheckpointing": True}},
        60,
        compile=False,
        warm_up=1,
        steps=1,
    ),
    "toy, 1k of 4 documents": long_case("tiny", 1024, 1, _FULL, 60, compile=False, documents=4, warm_up=1, steps=1),
}
LENGTHS = (4096, 32768, 131072)
_BACKENDS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_BACKWARD_RATIO = 2.5
"""Products of attention's backward pass over those of its forward pass: five to two (Dao 2023, section 2.2)."""


class DocumentMeter(MfuMeter):
    """Counts only scores that causal attention within documents needs."""

    def flops(self, batch: Batch) -> float:
        """Floating-point operations of the forward and backward pass of one batch."""
        return self._shape.causal_flops(batch.document_lengths().tolist())


class LongRowsWorker(MeasuredWorker):
    """Stops right after the measured steps, and measures MFU by documents."""

    def set_up(self) -> None:
        """Set up as any worker does, with another meter."""
        super().set_up()
        meter = self.context.mfu_meter
        self.loop.mfu_meter = DocumentMeter(meter._shape, meter._peak_flops)

    def propose_flags(self, step: int) -> Flags:
        """Reset the peak of memory after the warm-up; stop after the last measured step."""
        if step == self.case.warm_up and torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()
        return Flags(stop=step >= self.last_step)


def attention_seconds(heads: int, groups: int, head_size: int, length: int, kernel: str, repeats: int = 2) -> float:
    """Seconds of forward and backward pass of causal attention over one document; the first pass is not counted.

    Args:
        heads: of queries.
        groups: of keys and values.
        head_size: elements of a head.
        length: tokens.
        kernel: flash or cudnn of SDPA, or varlen, as packed rows use it; eager on processors.
        repeats: measured passes.
    """
    device = "cuda" if torch.cuda.is_available() else "cpu"
    query, key, value = (
        torch.randn(1, count, length, head_size, device=device, dtype=torch.bfloat16, requires_grad=True)
        for count in (heads, groups, groups)
    )

    def attend() -> Tensor:
        if kernel == "varlen":
            starts = torch.tensor([0, length], dtype=torch.int32, device=device)
            queries, keys, values = (each[0].transpose(0, 1) for each in (query, key, value))
            return packed_attention.flash_attention(queries, keys, values, starts, length, None, (-1, 0))
        with sdpa_kernel(_BACKENDS[kernel]) if kernel in _BACKENDS else nullcontext():
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    return _seconds(lambda: torch.autograd.backward(attend().sum()), repeats)


def _seconds(run: Callable[[], None], repeats: int) -> float:
    run()
    _wait_for_device()
    started = time.perf_counter()
    for _ in range(repeats):
        run()
    _wait_for_device()
    return (time.perf_counter() - started) / repeats


def _wait_for_device() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def measure_attention(size: str, length: int) -> list[dict[str, Any]]:
    """Speed of each kernel at the shape of a layer of a model."""
    config = LLAMAS[size]
    heads = config["num_attention_heads"]
    groups, head_size = config.get("num_key_value_heads", heads), config["hidden_size"] // heads
    flops = (1 + _BACKWARD_RATIO) * 2 * length**2 * heads * head_size  # half of all scores
    peak = peak_flops(torch.cuda.get_device_name(), "bfloat16") if torch.cuda.is_available() else None
    found = []
    for kernel in (*_BACKENDS, "varlen") if torch.cuda.is_available() else ("eager",):
        shape = {"size": size, "length": length, "heads": heads, "groups": groups, "headSize": head_size}
        try:
            seconds = attention_seconds(heads, groups, head_size, length, kernel)
            speed = {"seconds": round(seconds, 6), "partOfPeak": round(flops / seconds / peak, 4) if peak else None}
        except (RuntimeError, TypeError) as error:  # a kernel that this version of PyTorch or the device does not have
            speed = {"error": str(error).splitlines()[0]}
        found.append({**shape, "kernel": kernel, **speed})
        _free_memory()
    return found


def _free_memory() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def run(name: str, case: Case, worker_type: type[MeasuredWorker] = LongRowsWorker) -> dict[str, Any]:
    """Train a case; what went wrong is part of the result."""
    asked = {"name": name, **{to_camel(field): value for field, value in asdict(case).items()}}
    try:
        return {**asked, **measure(case, 0, 1, None, worker_type)}
    except torch.OutOfMemoryError:
        traceback.print_exc()
        return {**asked, "outOfMemory": True}
    except Exception:  # noqa: BLE001, the next case is independent of this one
        traceback.print_exc()
        return {**asked, "error": traceback.format_exc().splitlines()[-1]}
    finally:
        _free_memory()


def main() -> None:
    """Measure kernels, then cases, as long as there is time."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file; cases that it already has are measured again if named")
    parser.add_argument("--cases", nargs="*", default=None, help=f"names of cases: {'; '.join(CASES)}")
    parser.add_argument("--seconds", type=float, default=480, help="start no case that would take longer than this")
    parser.add_argument("--flash", action="store_true", help="do not use cuDNN's attention for rows of one document")
    parser.add_argument(
        "--execution", type=json.loads, default={}, help="values of the job's section execution, as JSON"
    )
    parser.add_argument("--no-kernels", action="store_true", help="do not measure the kernels")
    parser.add_argument("--toy", action="store_true", help="tiny models, also on processors")
    options = parser.parse_args()
    started = time.monotonic()
    if options.flash:
        packed_attention.CUDNN_FROM_TOKENS = 1 << 62
    found = previous_results(options.output)
    known = TOYS if options.toy else CASES
    names = options.cases or [name for name in known if name not in found["cases"]]
    with torchrun_group() as (_, world_size):
        if world_size != 1:
            raise SystemExit("long rows are measured on one GPU: --nproc-per-node 1")
        found["machine"] = machine()
        if not options.no_kernels and not found["kernels"]:
            shapes = [("tiny", 256)] if options.toy else [(s, n) for s in ("8B", "1.1B") for n in LENGTHS]
            found["kernels"] = [speed for shape in shapes for speed in measure_attention(*shape)]
            publish(found, options.output)
        for name in names:
            if time.monotonic() - started + known[name].seconds > options.seconds:
                print(f"no time left for {name}", flush=True)
                continue
            case = _with_execution(known[name].case, options.execution)
            label = (
                name
                + (", flash attention" if options.flash else "")
                + (f", {json.dumps(options.execution)}" if options.execution else "")
            )
            found["cases"][label] = run(label, case)
            publish(found, options.output)


def _with_execution(case: Case, execution: Mapping[str, Any]) -> Case:
    sections = {**case.sections, "execution": {**case.sections.get("execution", {}), **execution}}
    return replace(case, sections=sections)


def previous_results(output: Path | None) -> dict[str, Any]:
    """What an output has by now, to which cases are added."""
    if output is None or not output.exists():
        return {"machine": {}, "kernels": [], "cases": {}}
    content: dict[str, Any] = json.loads(output.read_text())
    return content


if __name__ == "__main__":
    main()
