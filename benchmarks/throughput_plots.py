"""The plots of docs/benchmarks.md: each a function that returns an SVG, deterministic for the same measurements."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks.plotting import svg
from benchmarks.throughput_tables import Measurement
from tests.trainer.support.planned_runs import runs_with_memory

_OURS, _OURS_TOO, _TWO, _OTHERS = "#1f5fa8", "#8fb8de", "#d1732c", "#9a9a9a"

_LLAMAS: Mapping[str, Sequence[tuple[str, Measurement]]] = {
    "1.1 billion parameters, rows of 2,048 tokens": (
        ("Hugging Face's Trainer", Measurement("hf_trainer")),
        ("the same with Liger kernels", Measurement("hf_trainer", (1,))),
        ("spotune on the same GPU, steps of 64 rows", Measurement("throughput_1_beside_hf")),
        ("steps of 256 rows", Measurement("throughput_1_deterministic")),
        ("the same bits every time", Measurement("throughput_1_deterministic", (2, 3))),
        ("two GPUs, ZeRO-1", Measurement("throughput_2")),
        ("two GPUs, ZeRO-3", Measurement("stage_3_in_place", (2,))),
    ),
    "8 billion parameters, rows of 4,096 tokens": (
        ("one GPU, 8-bit AdamW", Measurement("throughput_1_8B_8bit_products")),
        ("the same bits every time", Measurement("throughput_1_8B_deterministic", (1,))),
        ("two GPUs, ZeRO-1", Measurement("throughput_2_8B_spare_memory")),
        ("two GPUs, ZeRO-3", Measurement("throughput_2_8B_spare_memory", (1,))),
        ("ZeRO-3 without memory to spare", Measurement("throughput_2_8B_spare_memory", (2,))),
    ),
}
_T5_LAYOUTS = ("no ZeRO", "ZeRO-1", "ZeRO-3,\noffload")
_T5: Mapping[str, Mapping[str, Sequence[Measurement]]] = {
    "t5-small": {
        "one GPU": [Measurement("throughput_1_examples", (number,)) for number in (0, 1, 4)],
        "two GPUs": [Measurement("examples_2_padded", (number,)) for number in (1, 2, 3)],
    },
    "t5-large": {
        "one GPU": [Measurement("throughput_1_examples", (number,)) for number in (2, 3, 6)],
        "two GPUs": [
            *(Measurement("examples_2_padded", (number,)) for number in (4, 5)),
            Measurement("examples_2_unpadded", (7,)),
        ],
    },
}


def llamas() -> str:
    """Throughput as fractions of an H200's peak."""

    def draw(figure: Figure) -> None:
        heights = [len(bars) for bars in _LLAMAS.values()]
        panels: Any = figure.subplots(len(_LLAMAS), 1, sharex=True, height_ratios=heights)
        for axes, (title, bars) in zip(panels, _LLAMAS.items(), strict=True):
            labels = [label for label, _ in bars]
            values = [100 * found.mean("mfu") for _, found in bars]
            colours = [_OTHERS if found.output == "hf_trainer" else _OURS for _, found in bars]
            drawn = axes.barh(labels, values, color=colours)
            axes.bar_label(drawn, fmt="%.1f %%", padding=3)
            axes.invert_yaxis()
            axes.set_title(title, loc="left", fontsize=9)
            axes.set_xlim(0, 80)
        panels[-1].set_xlabel("MFU, % of 989.4 TFLOP/s")

    return svg(draw, (7.0, 4.2))


def planned_memory() -> str:
    """Planned against measured memory."""

    def draw(figure: Figure) -> None:
        runs = runs_with_memory()
        axes = figure.subplots()
        ends = np.array([5.0, 160.0])
        axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#e6e6e6", linewidth=0, label="within 10 %")
        for world_size, name, colour in ((1, "one GPU", _OURS), (2, "two GPUs", _TWO)):
            of_it = [run for run in runs if run.world_size == world_size]
            measured, planned = [run.measured_bytes / 1e9 for run in of_it], [run.planned_bytes / 1e9 for run in of_it]
            axes.scatter(measured, planned, s=14, color=colour, label=name)
        axes.set(xscale="log", yscale="log", xlim=ends, ylim=ends)
        axes.set(xlabel="measured, GB per GPU", ylabel="planned, GB per GPU")
        ticks = [5, 10, 20, 50, 100]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [str(tick) for tick in ticks])
            axis.set_ticks([], minor=True)
        axes.legend(frameon=False)

    return svg(draw, (4.6, 4.2))


def t5_layouts() -> str:
    """Samples per second of two model sizes in three layouts."""

    def draw(figure: Figure) -> None:
        panels: Any = figure.subplots(1, len(_T5))
        for axes, (size, groups) in zip(panels, _T5.items(), strict=True):
            _grouped(axes, groups)
            axes.set_title(size, loc="left", fontsize=9)
        panels[0].set_ylabel("samples/s")
        panels[0].legend(frameon=False)

    return svg(draw, (7.0, 3.0))


def _grouped(axes: Axes, groups: Mapping[str, Sequence[Measurement]]) -> None:
    """Bars grouped by layout."""
    places = np.arange(len(_T5_LAYOUTS))
    for number, (label, measured) in enumerate(groups.items()):
        values = [found.samples_per_second for found in measured]
        drawn = axes.bar(places + 0.4 * number - 0.2, values, 0.38, label=label, color=(_OURS_TOO, _OURS)[number])
        axes.bar_label(drawn, fmt="%.3g", padding=2)
    axes.set_xticks(places, _T5_LAYOUTS)


PLOTS: Mapping[str, Callable[[], str]] = {"llamas": llamas, "planned-memory": planned_memory, "t5-layouts": t5_layouts}
"""The plots, by file name in docs/images."""
