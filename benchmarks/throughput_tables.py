"""The throughput tables of docs/benchmarks.md, from the results of benchmarks/throughput.py and hf_trainer.py.

`python -m benchmarks.throughput_page` writes each of them between two comments with its name.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import mean
from typing import Any

from tests.trainer.support.planned_runs import RESULTS, MeasuredRun

Case = Mapping[str, Any]


@dataclass(frozen=True)
class Measurement:
    """Cases of one result file.

    Attributes:
        output: name of the file, without its extension.
        cases: indices of the cases; of several, the mean is shown.
    """

    output: str
    cases: tuple[int, ...] = (0,)

    @property
    def case(self) -> Case:
        """The first case, with its settings."""
        return self._all()[0]

    @property
    def world_size(self) -> int:
        """Number of GPUs."""
        return int(_read(self.output)["machine"]["worldSize"])

    def mean(self, name: str) -> float:
        """Mean of a metric over the cases."""
        return float(mean(case[name] for case in self._all()))

    @property
    def samples_per_second(self) -> float:
        """Samples per second of all GPUs."""
        return float(self.case["batch"]) / self.mean("stepSeconds")

    def _all(self) -> list[Case]:
        content = _read(self.output)
        cases = content["cases"] if "cases" in content else _of_hugging_face(content)
        return [cases[number] for number in self.cases]


@cache
def _read(output: str) -> Case:
    content: Case = json.loads((RESULTS / f"{output}.json").read_text())
    return content


def _of_hugging_face(content: Case) -> list[Case]:
    """Cases of benchmarks/hf_trainer.py. Its file has shared settings once; nothing is compiled or sharded."""
    shared = {"microBatch": content["micro_batch"], "batch": content["batch"], "zeroStage": "", "compile": False}
    return [{**shared, **run} for run in content["runs"]]


@dataclass(frozen=True)
class Row:
    """One line of a table.

    Attributes:
        label: what was run, as text.
        found: the measurement.
        memory: whether the measured memory belongs to this run alone.
    """

    label: str
    found: Measurement
    memory: bool = True


Column = Callable[[Row], str]


def significant(figure: float) -> str:
    """A number with three significant digits."""
    return f"{figure:,.{max(0, 2 - math.floor(math.log10(figure)))}f}"


def tokens(row: Row) -> str:
    """Tokens per second of one GPU."""
    return f"{row.found.mean('tokensPerSecond') / row.found.world_size:,.0f}"


def mfu(row: Row) -> str:
    """MFU in percent."""
    return f"{100 * row.found.mean('mfu'):.1f} %"


def memory(row: Row) -> str:
    """Peak memory allocated by PyTorch."""
    return f"{row.found.mean('peakAllocatedBytes') / 1e9:.1f} GB" if row.memory else ""


def planned(row: Row) -> str:
    """The memory that `spotune plan` currently predicts."""
    return f"{MeasuredRun(row.found.world_size, dict(row.found.case)).planned_bytes / 1e9:.1f} GB" if row.memory else ""


def zero(row: Row) -> str:
    """ZeRO stage."""
    return str(row.found.case["zeroStage"])


def micro_batch(row: Row) -> str:
    """Micro-batch size."""
    return str(row.found.case["microBatch"])


def samples(row: Row) -> str:
    """Samples per second of all GPUs."""
    return significant(row.found.samples_per_second)


_NUMBERS = {
    "throughput_1_more": 1, "throughput_1_8B_8bit_products": 2, "throughput_2_8B_spare_memory": 3, "hf_trainer": 4,
    "throughput_1_documents": 5, "throughput_1_8B_8bit": 7, "throughput_1_beside_hf": 8, "stage_3_in_place": 9,
    "throughput_2": 10, "throughput_1_deterministic": 11, "throughput_1_8B_deterministic": 12,
}  # fmt: skip
"""Number by which the page cites each result file."""


def _link(row: Row) -> str:
    return f"[{_NUMBERS[row.found.output]}](../benchmarks/results/{row.found.output}.json)"


def _model(row: Row) -> str:
    return row.label


_LLAMAS: Mapping[str, Column] = {
    "model": _model,
    "micro-batch, batch": lambda row: f"{row.found.case['microBatch']}, {row.found.case['batch']}",
    "ZeRO": zero,
    "compiled": lambda row: "yes" if row.found.case["compile"] else "no",
    "tokens/s": tokens,
    "MFU": mfu,
    "memory": memory,
    "output": _link,
}
_DOCUMENTS: Mapping[str, Column] = {
    "rows of 2,048 tokens": _model,
    "tokens/s": tokens,
    "MFU": mfu,
    "memory": memory,
}
_OF_JOBS: Mapping[str, Column] = {
    "ZeRO": zero,
    "micro-batch": micro_batch,
    "samples/s": samples,
    "MFU": mfu,
    "memory per GPU": memory,
    "planned": planned,
}
_JOBS: Mapping[str, Column] = {"job": _model, **_OF_JOBS}
_ZERO_3: Mapping[str, Column] = {"": _model, "MFU": mfu}


@dataclass(frozen=True)
class Table:
    """A table: its rows and columns."""

    columns: Mapping[str, Column]
    rows: Sequence[Row]

    def lines(self) -> Iterator[str]:
        """The lines of the table in Markdown."""
        yield f"| {' | '.join(self.columns)} |"
        yield "|---" * len(self.columns) + "|"
        for row in self.rows:
            yield f"| {' | '.join(column(row) for column in self.columns.values())} |"


_HOST = "the same, weights and optimizer in host memory"
TABLES: Mapping[str, Table] = {
    "llamas": Table(
        _LLAMAS,
        (
            Row("1.1B, one GPU", Measurement("throughput_1_more")),
            Row("1.1B, one GPU", Measurement("throughput_1_documents")),
            Row("1.1B, one GPU", Measurement("throughput_1_deterministic")),
            Row(
                "the same, [the same bits every time](how-to/speed.md#the-same-bits), mean of two",
                Measurement("throughput_1_deterministic", (2, 3)),
            ),
            Row("1.1B, two GPUs", Measurement("throughput_2")),
            Row("1.1B, two GPUs", Measurement("stage_3_in_place", (2,)), memory=False),
            Row("8B, rows of 4,096, two GPUs", Measurement("throughput_2_8B_spare_memory")),
            Row("the same", Measurement("throughput_2_8B_spare_memory", (1,))),
            Row("the same, nothing kept gathered or whole", Measurement("throughput_2_8B_spare_memory", (2,))),
            Row("8B, rows of 4,096, one GPU, 8-bit AdamW", Measurement("throughput_1_8B_8bit_products")),
            Row("the same, in steps of 16 rows, on another GPU", Measurement("throughput_1_8B_deterministic")),
            Row("and with the same bits every time", Measurement("throughput_1_8B_deterministic", (1,))),
            Row("8 billion in steps of 64 rows, before", Measurement("throughput_1_8B_8bit", (1,))),
            Row("the same, activations computed again", Measurement("throughput_1_8B_8bit", (2,))),
            Row("Hugging Face's Trainer, 1.1B, one GPU", Measurement("hf_trainer")),
            Row("the same with Liger kernels", Measurement("hf_trainer", (1,))),
            Row("ours, on the same GPU after them", Measurement("throughput_1_beside_hf")),
        ),
    ),
    "documents": Table(
        _DOCUMENTS,
        (
            Row("one document each", Measurement("throughput_1_documents")),
            Row("eight documents each", Measurement("throughput_1_documents", (1,))),
            Row(
                "eight documents each, by a mask (`execution.attention: sdpa`)",
                Measurement("throughput_1_documents", (2,)),
            ),
        ),
    ),
    "examples": Table(
        _JOBS,
        (
            Row("mistral-1b1-pretrain, packed, compiled", Measurement("throughput_2_examples")),
            Row("mistral-3b-pretrain, packed, compiled", Measurement("throughput_2_examples", (1,))),
            Row("llama2-7b-zero2", Measurement("throughput_2_examples", (2,))),
            Row("t5-small-wikisql in float32", Measurement("throughput_2_examples", (3,))),
            Row("the same", Measurement("throughput_2_examples", (4,))),
            Row(_HOST, Measurement("throughput_2_examples", (5,))),
            Row("t5-large-wikisql in float32", Measurement("throughput_2_examples", (6,))),
            Row("t5-large-wikisql-zero1", Measurement("throughput_2_examples", (7,))),
        ),
    ),
    "examples-with-padding": Table(
        _JOBS,
        (
            Row("t5-3b-wikisql", Measurement("examples_2_padded")),
            Row("bloomz-1b1-imdb, float16, 8-bit AdamW, recomputing", Measurement("examples_2_unpadded")),
            Row("t5-small-wikisql in float32", Measurement("examples_2_padded", (1,)), memory=False),
            Row("the same", Measurement("examples_2_padded", (2,)), memory=False),
            Row(_HOST, Measurement("examples_2_padded", (3,)), memory=False),
            Row("t5-large-wikisql in float32", Measurement("examples_2_padded", (4,)), memory=False),
            Row("t5-large-wikisql-zero1", Measurement("examples_2_padded", (5,)), memory=False),
            Row("t5-large-wikisql-zero3-offload", Measurement("examples_2_unpadded", (7,)), memory=False),
        ),
    ),
    "examples-on-one": Table(
        {"job": _model, "GPUs": lambda row: str(row.found.world_size), **_OF_JOBS},
        (
            Row("t5-small-wikisql in float32", Measurement("throughput_1_examples")),
            Row("the same", Measurement("throughput_1_examples", (1,))),
            Row(_HOST, Measurement("throughput_1_examples", (4,))),
            Row("t5-large-wikisql in float32", Measurement("throughput_1_examples", (2,))),
            Row("t5-large-wikisql-zero1", Measurement("throughput_1_examples", (3,))),
            Row("t5-large-wikisql-zero3-offload", Measurement("throughput_1_examples", (6,))),
            Row("t5-3b-wikisql", Measurement("throughput_1_examples", (5,))),
            Row("t5-11b-wikisql", Measurement("throughput_2_large_examples")),
            Row("bloomz-1b1-imdb", Measurement("throughput_1_examples", (7,))),
            Row("llama3-8b-lora", Measurement("throughput_1_examples", (8,))),
            Row("llama2-7b-data-parallel, float32", Measurement("throughput_2_large_examples", (1,))),
        ),
    ),
    "zero-3": Table(
        _ZERO_3,
        tuple(
            Row(label, Measurement("stage_3_8B_layers", (number,)))
            for number, label in enumerate(
                (
                    "ZeRO-1",
                    "ZeRO-3, as DeepSpeed has it",
                    "without waiting for the device in a step",
                    "and fetching 220 million parameters ahead",
                    "and 440 million, two layers, with 2 billion gathered at most",
                )
            )
        ),
    ),
}
"""The tables, by the name in the page's comments."""
