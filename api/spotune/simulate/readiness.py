"""Which of a job's nodes can train: neither those that have just joined, nor those that were announced to be lost."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from spotune.simulate.lookahead import Lookahead
from spotune.simulate.supply import NodeSupply

_NEVER = float("inf")


@dataclass
class _Node:
    """A node of a worker: when it can train, and whether it was announced to be lost."""

    ready_at: float
    going: bool = False


def with_readiness(moments: Iterator[NodeSupply], notice: float, join: float) -> Iterator[NodeSupply]:
    """Yield the changes of a job's nodes with those that can train; each notice and each such node is a change, too.

    The newest nodes are lost first. Nodes that are there at the beginning can train at once.

    Args:
        moments: Changes of the nodes, in order of time.
        notice: Seconds between the notice of a loss and the loss; 0: no notice.
        join: Seconds from the arrival of a node until it can train.
    """
    nodes = _Nodes(moments, notice, join)
    while (moment := nodes.advance()) is not None:
        yield moment


class _Nodes:
    """The nodes of the workers, the oldest first."""

    def __init__(self, moments: Iterator[NodeSupply], notice: float, join: float) -> None:
        self._moments = Lookahead(moments)
        self._notice = notice
        self._join = join
        self._announced = 0  # of the upcoming changes, those whose losses were announced
        self._nodes: list[_Node] = []
        self._current: NodeSupply | None = None

    def advance(self) -> NodeSupply | None:
        """Move to the next change; None if there is none."""
        change = self._moments.peek(0)
        change_at = change.seconds if change is not None else _NEVER
        if self._current is not None:
            at = min(self._notice_at(change_at), self._ready_at())
            if at < change_at:
                self._announce(at, change_at)
                return self._emit(replace(self._current, seconds=at, lost=0, head_lost=False))
        if change is None:
            return None
        self._moments.take()
        self._announced = max(0, self._announced - 1)
        self._apply(change)
        return self._emit(change)

    def _emit(self, moment: NodeSupply) -> NodeSupply:
        going = sum(node.going for node in self._nodes)
        joining = sum(node.ready_at > moment.seconds and not node.going for node in self._nodes)
        self._current = replace(moment, joining=joining, going=going)
        return self._current

    def _ready_at(self) -> float:
        """When the next node can train."""
        assert self._current is not None
        now = self._current.seconds
        return min((node.ready_at for node in self._nodes if node.ready_at > now), default=_NEVER)

    def _notice_at(self, change_at: float) -> float:
        """When the next loss is announced, if that is before the next change; otherwise any later time."""
        if self._notice == 0:
            return _NEVER
        index = self._announced
        while (moment := self._moments.peek(index)) is not None and moment.seconds - self._notice < change_at:
            if moment.lost:
                return max(0.0, moment.seconds - self._notice)
            index += 1
        return _NEVER

    def _announce(self, now: float, change_at: float) -> None:
        """Announce the losses that are due."""
        while self._notice and self._notice_at(change_at) <= now:
            moment = self._moments.peek(self._announced)
            assert moment is not None, "a notice is for a loss"
            self._announced += 1
            for node in [node for node in self._nodes if not node.going][-moment.lost :] if moment.lost else []:
                node.going = True

    def _apply(self, change: NodeSupply) -> None:
        by_order = sorted(self._nodes, key=lambda node: node.going)
        self._nodes = by_order[: len(by_order) - change.lost]
        ready_at = change.seconds if self._current is None else change.seconds + self._join
        while len(self._nodes) < change.workers:
            self._nodes.append(_Node(ready_at))
        del self._nodes[change.workers :]
