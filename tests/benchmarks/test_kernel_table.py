"""The table of a step's kernels, from a small trace as torch.profiler writes it."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.kernel_table import PEAK_FLOPS, kernels, markdown, summarize


def operator(number: int, name: str, shapes: list[list[int]], kinds: list[str]) -> dict[str, Any]:
    arguments = {"External id": number, "Input Dims": shapes, "Input type": kinds}
    return {"cat": "cpu_op", "name": name, "ts": number, "dur": 1, "tid": 1, "args": arguments}


def launch(number: int, time: float, thread: int = 1) -> dict[str, Any]:
    name, arguments = "cudaLaunchKernel", {"correlation": number}
    return {"cat": "cuda_runtime", "name": name, "ts": time, "dur": 1, "tid": thread, "args": arguments}


def kernel(number: int, name: str, begin: float, microseconds: float) -> dict[str, Any]:
    arguments = {"External id": number, "correlation": number}
    return {"cat": "kernel", "name": name, "ts": begin, "dur": microseconds, "tid": 7, "args": arguments}


BF16 = "c10::BFloat16"
TRACE = [
    operator(1, "aten::mm", [[1000, 200], [200, 500]], [BF16, BF16]),
    operator(2, "aten::addmm", [[200, 500], [200, 1000], [1000, 500], [], []], [BF16, BF16, BF16, "", ""]),
    operator(3, "triton_red_fused_add_mean_rsqrt_0", [[1200, 1000], [1200, 1000]], [BF16, BF16]),
    operator(4, "aten::mm", [[10, 20], [20, 30]], [BF16, BF16]),
    {"cat": "user_annotation", "name": "loss", "ts": 40.0, "dur": 10.0, "tid": 1, "args": {}},
    {"cat": "user_annotation", "name": "optimizer", "ts": 60.0, "dur": 5.0, "tid": 1, "args": {}},
    *(launch(number, time) for number, time in ((1, 10.0), (2, 20.0), (3, 30.0), (4, 45.0), (5, 62.0))),
    launch(6, 62.0, thread=2),
    kernel(1, "nvjet_tst_128x256", 100.0, 10.0),
    kernel(2, "nvjet_tst_128x256", 110.0, 20.0),
    kernel(3, "triton_red_fused_add_mean_rsqrt_0", 130.0, 1.0),
    kernel(4, "cutlass_80", 151.0, 4.0),
    kernel(5, "elementwise_kernel", 155.0, 40.0),
    kernel(6, "pytorch_flash::flash_bwd_dq_dk_dv", 155.0, 5.0),
]


def rows() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in summarize(kernels(TRACE))["rows"]}


def test_each_kernel_belongs_to_what_it_is_for() -> None:
    assert {name: (row["count"], row["microseconds"]) for name, row in rows().items()} == {
        "optimizer": (1, 40.0),
        "matrix product 200x1000 by 1000x500": (1, 20.0),
        "the GPU is idle": (0, 20.0),
        "matrix product 1000x200 by 200x500": (1, 10.0),
        "attention, backward": (1, 5.0),
        "loss: matrix product 10x20 by 20x30": (1, 4.0),
        "norms, fused with what is around them": (1, 1.0),
    }
    assert summarize(kernels(TRACE))["microseconds"] == 95.0


def test_products_are_compared_with_the_peak_and_others_with_the_bandwidth() -> None:
    found = rows()
    product = found["matrix product 1000x200 by 200x500"]
    assert product["flops"] == 2 * 1000 * 200 * 500
    assert product["ofPeakFlops"] == pytest.approx(2e8 / 10e-6 / PEAK_FLOPS, abs=1e-3)
    assert found["matrix product 200x1000 by 1000x500"]["flops"] == 2 * 200 * 1000 * 500
    norm = found["norms, fused with what is around them"]
    assert norm["bytes"] == 2 * 1200 * 1000 * 2
    assert norm["ofPeakBytes"] == 1.0
    assert "ofPeakBytes" not in found["optimizer"], "its tensors are unknown"


def test_the_page_names_the_largest_and_adds_up_the_others() -> None:
    lines = list(markdown(summarize(kernels(TRACE)), rows=2))
    assert lines[2] == "| optimizer | 1 | 0.04 | 42.1% |  |"
    assert lines[3] == "| matrix product 200x1000 by 1000x500 | 1 | 0.02 | 21.1% | 1% of FLOP/s |"
    assert lines[4].startswith("| 5 others | 4 | 0.04 | 42.1%")
