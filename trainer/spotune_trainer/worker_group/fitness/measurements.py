"""What is measured on a node, as plain values: they are sent to the driver, and kept in the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self


@dataclass(frozen=True)
class DeviceMeasurement:
    """One GPU, or the processor of a node without.

    Attributes:
        index: on its node.
        kind: of the device.
        name: its type.
        checked_bytes: how much memory held the patterns that were written to it.
        tflops: of a matrix product; 0 if it was not measured.
        problems: what is wrong with it.
    """

    index: int
    kind: Literal["cuda", "cpu"]
    name: str
    checked_bytes: int = 0
    tflops: float = 0.0
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class NodeMeasurement:
    """A node.

    Attributes:
        devices: its GPUs; without any, its processor.
        problems: what is wrong with the node as a whole.
        seconds: how long the check took.
    """

    devices: tuple[DeviceMeasurement, ...] = ()
    problems: tuple[str, ...] = ()
    seconds: float = 0.0


@dataclass(frozen=True)
class NodeRecord:
    """What is known of a node since its last boot.

    Attributes:
        node: its name.
        boot: id that its kernel made when it started.
        measured: on the node itself.
        links: bytes per second that it got from other nodes, by their keys.
    """

    node: str
    boot: str
    measured: NodeMeasurement
    links: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """Of the node and its boot."""
        return key_of(self.node, self.boot)

    def as_json(self) -> dict[str, Any]:
        """As in the ledger."""
        return {
            "node": self.node,
            "boot": self.boot,
            "seconds": round(self.measured.seconds, 3),
            "devices": [{**asdict(device), "tflops": round(device.tflops, 3)} for device in self.measured.devices],
            "problems": list(self.measured.problems),
            "bytesPerSecond": {key: round(rate) for key, rate in self.links.items()},
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """From an event of the ledger."""
        devices = tuple(
            DeviceMeasurement(**{**device, "problems": tuple(device["problems"])}) for device in value["devices"]
        )
        measured = NodeMeasurement(devices, tuple(value["problems"]), value["seconds"])
        return cls(value["node"], value["boot"], measured, dict(value["bytesPerSecond"]))


def key_of(node: str, boot: str) -> str:
    """What identifies a node until it is booted again."""
    return f"{node} {boot}"
