"""Nodes that are unfit for training, and workers that are slower than the others."""

from typing import Literal

from spotune.custom_resource.status import StatusSection, Timestamp

NodeCheck = Literal["auto", "always", "never"]
"""Not `off`: YAML 1.1, which `kubectl` reads, takes that for a boolean."""
OnStraggler = Literal["report", "replace"]


class UnfitNodeStatus(StatusSection):
    """A node that is left out."""

    node: str
    """Name of the node."""
    reason: str
    """What is wrong with it."""
    since: Timestamp
    """Time from which it was left out (RFC 3339)."""
    boot: str = ""
    """Its boot ID at that time. Once the node has another one, it may be used again."""


class StragglerStatus(StatusSection):
    """A worker process that is slower than the others."""

    rank: int
    """Its rank."""
    node: str
    """Name of its node."""
    ratio: float
    """Its time of a step, without waits for other ranks, divided by the median of all ranks."""
    since: Timestamp
    """Time from which it was slow (RFC 3339)."""
