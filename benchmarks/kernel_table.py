"""Where the time of a training step goes on the GPU: a table of kernels from a trace of torch.profiler.

Kernels are grouped by what they are for: matrix products by shape, attention, norms, loss, optimizer, copies. Each
group has its share of the step, and how near it is to the roofline: matrix products to the peak of the tensor cores,
other kernels to the memory's bandwidth. The bytes of a kernel are those of its tensors, each counted once. Kernels that
read a tensor twice or use a part of it move more or fewer.

    python -m benchmarks.kernel_table benchmarks/results/step_profile.json    # prints the tables of a page
"""

from __future__ import annotations

import argparse
import json
import math
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

PEAK_FLOPS = 989.4e12
"""Dense bfloat16 of an H100 or H200, floating-point operations per second."""
PEAK_BYTES = 4.8e12
"""Memory bandwidth of an H200, bytes per second."""
MARKED = ("loss", "optimizer")
"""Names of `record_function` that give the kernels launched within them their group."""

_PRODUCTS = {"aten::mm": 0, "aten::bmm": 0, "aten::_scaled_mm": 0, "aten::addmm": 1, "aten::baddbmm": 1}
"""Operators of matrix products, with the position of the first factor among the arguments."""
_BYTES = {"float": 4, "double": 8, "c10::BFloat16": 2, "c10::Half": 2, "int": 4, "long int": 8, "bool": 1}
_BYTES |= {"unsigned char": 1, "signed char": 1, "c10::Float8_e4m3fn": 1, "c10::Float8_e5m2": 1}
_GROUPS = (
    (r"flash.*(bwd|backward)|fmha.*(bwd|backward)|sdpa.*(bprop|bwd|backward)", "attention, backward"),
    (r"flash|fmha|sdpa", "attention, forward"),
    (r"adam|multi_tensor_apply", "optimizer"),
    (r"nccl", "communication"),
    (r"rsqrt", "norms, fused with what is around them"),
    (r"direct_copy|CatArray|Memcpy|Memset|FillFunctor", "copies and fills"),
    (r"gemm|cutlass|nvjet|cublas", "matrix products of other operations"),
    (r"^triton", "other fused kernels"),
)


@dataclass(frozen=True)
class Kernel:
    """One execution on the GPU.

    Attributes:
        name: of the kernel.
        group: what it is for.
        begin: in microseconds.
        microseconds: how long it took.
        flops: floating-point operations; 0 if it is no matrix product.
        bytes: of its tensors; 0 if unknown.
    """

    name: str
    group: str
    begin: float
    microseconds: float
    flops: float
    bytes: float


def kernels(events: Iterable[Mapping[str, Any]]) -> list[Kernel]:
    """The kernels and copies of a Chrome trace (`traceEvents`) in the order of time."""
    events = list(events)
    operators = {_number(event): event for event in events if event.get("cat") == "cpu_op"}
    launches = {_correlation(event): event for event in events if str(event.get("cat")).startswith("cuda_")}
    marks = _Marks(events)
    of_operators: dict[Any, list[Kernel]] = {}
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            operator = operators.get(_number(event), {})
            mark = marks.around(launches.get(_correlation(event)))
            of_operators.setdefault(_number(event), []).append(_kernel(event, operator, mark))
    found = [kernel for kernels in of_operators.values() for kernel in _counted_once(kernels)]
    return sorted(found, key=lambda kernel: kernel.begin)


def _counted_once(kernels: Sequence[Kernel]) -> Iterator[Kernel]:
    """The kernels of one operator: the longest one has its floating-point operations, the others have none."""
    longest = max(kernels, key=lambda kernel: kernel.microseconds)
    yield from (kernel if kernel is longest else replace(kernel, flops=0.0) for kernel in kernels)


def summarize(found: Sequence[Kernel]) -> dict[str, Any]:
    """The table as JSON values: for each group its count, time, share, and distance from the roofline."""
    begin, end = found[0].begin, max(kernel.begin + kernel.microseconds for kernel in found)
    total = end - begin
    groups: dict[str, list[Kernel]] = {}
    for kernel in found:
        groups.setdefault(kernel.group, []).append(kernel)
    rows = [_row(name, members, total) for name, members in groups.items()]
    idle = total - _busy(found)
    rows.append(
        {"name": "the GPU is idle", "count": 0, "microseconds": round(idle, 1), "share": round(idle / total, 4)}
    )
    rows.sort(key=lambda row: -row["microseconds"])
    return {"microseconds": round(total, 1), "kernels": len(found), "rows": rows}


def markdown(case: Mapping[str, Any], rows: int = 20) -> Iterator[str]:
    """The table of one case of `step_profile.py` for a page, without the smallest groups."""
    shown, rest = case["rows"][:rows], case["rows"][rows:]
    yield "| what | kernels | ms | share | of the roofline |"
    yield "|---|---|---|---|---|"
    for row in shown:
        roofline = row.get("ofPeakFlops"), row.get("ofPeakBytes")
        limits = (f"{part:.0%} of {name}" for part, name in zip(roofline, ("FLOP/s", "bytes/s"), strict=True) if part)
        time = f"{row['microseconds'] / 1000:,.2f} | {row['share']:.1%}"
        yield f"| {row['name']} | {row['count'] or ''} | {time} | {', '.join(limits)} |"
    if rest:
        others = sum(row["microseconds"] for row in rest)
        share, count = sum(row["share"] for row in rest), sum(row["count"] for row in rest)
        yield f"| {len(rest)} others | {count} | {others / 1000:,.2f} | {share:.1%} | |"


class _Marks:
    """Intervals of the host's threads that have the name of a group."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        self._of: dict[Any, list[tuple[float, float, str]]] = {}
        for event in events:
            if event.get("cat") == "user_annotation" and event.get("name") in MARKED:
                interval = float(event["ts"]), float(event["ts"]) + float(event["dur"]), str(event["name"])
                self._of.setdefault(event.get("tid"), []).append(interval)
        for intervals in self._of.values():
            intervals.sort()

    def around(self, launch: Mapping[str, Any] | None) -> str:
        """The mark in which a kernel was launched; empty if there is none."""
        if launch is None:
            return ""
        intervals, time = self._of.get(launch.get("tid"), []), float(launch["ts"])
        index = bisect_right(intervals, (time, math.inf, "")) - 1
        return intervals[index][2] if index >= 0 and time <= intervals[index][1] else ""


def _kernel(event: Mapping[str, Any], operator: Mapping[str, Any], mark: str) -> Kernel:
    name, arguments = str(event["name"]), operator.get("args", {})
    shapes = arguments.get("Input Dims", [])
    flops, moved = 0.0, float(event.get("args", {}).get("bytes", 0)) * 2
    position = _PRODUCTS.get(str(operator.get("name")))
    if position is not None:
        left, right = shapes[position : position + 2]
        flops = 2.0 * math.prod(left) * right[-1]
        group = f"matrix product {'x'.join(map(str, left))} by {'x'.join(map(str, right))}"
        group = f"{mark}: {group}" if mark else group
    else:
        group = mark or next((group for sign, group in _GROUPS if re.search(sign, name, re.IGNORECASE)), name[:60])
        types = arguments.get("Input type", [])
        sizes = zip(shapes, types, strict=False)
        tensors = ((shape, kind) for shape, kind in sizes if _is_tensor(shape))
        moved = moved or float(sum(math.prod(shape) * _BYTES.get(kind, 0) for shape, kind in tensors))
    return Kernel(name, group, float(event["ts"]), float(event["dur"]), flops, moved)


def _is_tensor(shape: Sequence[Any]) -> bool:
    """Whether an argument is one tensor. The shape of a list of tensors is a list of shapes, and has no type."""
    return bool(shape) and not isinstance(shape[0], list)


def _row(name: str, members: Sequence[Kernel], total: float) -> dict[str, Any]:
    time = sum(kernel.microseconds for kernel in members)
    row: dict[str, Any] = {"name": name, "count": len(members), "microseconds": round(time, 1)}
    row["share"] = round(time / total, 4)
    flops, moved = sum(kernel.flops for kernel in members), sum(kernel.bytes for kernel in members)
    if flops:
        row |= {"flops": flops, "ofPeakFlops": round(flops / (time * 1e-6) / PEAK_FLOPS, 3)}
    known = sum(kernel.microseconds for kernel in members if kernel.bytes)
    if not flops and moved and known > 0.9 * time:
        row |= {"bytes": moved, "ofPeakBytes": round(moved / (known * 1e-6) / PEAK_BYTES, 3)}
    return row


def _busy(found: Sequence[Kernel]) -> float:
    """Microseconds in which at least one kernel runs."""
    busy, until = 0.0, -math.inf
    for kernel in found:
        end = kernel.begin + kernel.microseconds
        busy += max(0.0, end - max(until, kernel.begin))
        until = max(until, end)
    return busy


def _number(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("External id")


def _correlation(event: Mapping[str, Any]) -> Any:
    return event.get("args", {}).get("correlation")


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=Path, help="output of step_profile.py")
    for case in json.loads(parser.parse_args().result.read_text(encoding="utf-8"))["cases"]:
        title = f"**{case['size']}, micro-batch {case['microBatch']}, batch {case['batch']}**"
        print("\n".join((title, "", *markdown(case), "")))


if __name__ == "__main__":
    main()
