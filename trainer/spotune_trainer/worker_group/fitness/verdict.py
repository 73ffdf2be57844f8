"""Which nodes are unfit, from what was measured on all of them. Pure.

A node is unfit by itself if its memory, its arithmetic or its driver is at fault, and by comparison if

- one of its GPUs computes less than `LEAST_SPEED` of the median of its type, over all that this job has checked, or
- the fastest connection to or from it has less than `LEAST_BANDWIDTH` of the median of the nodes.

A comparison needs three of a kind: of two, nobody can say which one is at fault. A node with a slow link has only slow
connections, while each of the others has a fast one to somebody else; so the fastest one counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from statistics import median
from typing import Final, Self

from spotune_trainer.worker_group.fitness.measurements import DeviceMeasurement, NodeRecord

LEAST_SPEED: Final = 0.8
"""GPUs of one type differ by some 5 % among one another; a rank at 0.8 takes 1.25 of the others' time."""
LEAST_BANDWIDTH: Final = 0.5
"""Connections are measured for a fraction of a second, while nodes also load models."""
_LEAST_NUMBER: Final = 3


def unfit_nodes(records: Sequence[NodeRecord]) -> dict[str, str]:
    """The reason for each node that is unfit, by its key.

    Args:
        records: all that is known, also of nodes that are gone: they tell how fast their type of GPU is.
    """
    speeds = {name: _Compared.of(values) for name, values in _speeds(records).items()}
    fastest = _fastest_links(records)
    of_links = _Compared.of(list(fastest.values()))
    found = {}
    for record in records:
        problems = [*record.measured.problems]
        for device in record.measured.devices:
            problems += [f"{_title(device)}: {problem}" for problem in device.problems]
            problems += _slow(device, speeds.get(device.name))
        problems += _badly_connected(fastest.get(record.key), of_links)
        if problems:
            found[record.key] = "; ".join(problems)
    return found


@dataclass(frozen=True)
class _Compared:
    """What all of a kind are compared with: a thousand nodes have one median, which is computed once."""

    number: int
    median: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self | None:
        """The median of these; None if they are too few to say which one is at fault."""
        return cls(len(values), median(values)) if len(values) >= _LEAST_NUMBER else None


def _title(device: DeviceMeasurement) -> str:
    return f"GPU {device.index} ({device.name})" if device.kind == "cuda" else "the processor"


def _speeds(records: Sequence[NodeRecord]) -> dict[str, list[float]]:
    """TFLOP/s of each GPU, by type. Processors are shared with other pods, so their speed says nothing."""
    speeds: dict[str, list[float]] = {}
    for record in records:
        for device in record.measured.devices:
            if device.kind == "cuda" and device.tflops > 0:
                speeds.setdefault(device.name, []).append(device.tflops)
    return speeds


def _slow(device: DeviceMeasurement, speeds: _Compared | None) -> list[str]:
    if speeds is None or device.tflops <= 0:
        return []
    share = device.tflops / speeds.median
    if share >= LEAST_SPEED:
        return []
    of_median = f"{share:.0%} of the median of {speeds.number} GPUs of this type"
    return [f"{_title(device)}: it computes {device.tflops:.1f} TFLOP/s, {of_median}"]


def _fastest_links(records: Sequence[NodeRecord]) -> dict[str, float]:
    """The fastest connection of each node, in bytes per second, by its key."""
    fastest: dict[str, float] = {}
    for record in records:
        for peer, rate in record.links.items():
            for key in (record.key, peer):
                fastest[key] = max(rate, fastest.get(key, 0.0))
    return fastest


def _badly_connected(rate: float | None, rates: _Compared | None) -> list[str]:
    if rate is None or rates is None or rate >= LEAST_BANDWIDTH * rates.median:
        return []
    of_all = f"the median of {rates.number} nodes is {rates.median / 1e6:,.0f} MB/s"
    return [f"its network carries {rate / 1e6:,.0f} MB/s; {of_all}"]


def of_interest(records: Mapping[str, NodeRecord], present: Set[str]) -> list[NodeRecord]:
    """The records of the nodes that are there, and those of others without their links: nodes of another time."""
    return [
        record if key in present else NodeRecord(record.node, record.boot, record.measured)
        for key, record in records.items()
    ]
