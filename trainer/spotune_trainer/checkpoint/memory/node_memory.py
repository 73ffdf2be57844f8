"""The shared memory of one node: its agent owns the segments, each rank gets its share of them.

A rank writes its snapshots of commits to two segments in turn. So the last complete commit stays in memory while the
next one is written. Where memory is short, it has one segment, and nothing is in memory while a commit is written.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from spotune.plan.devices import free_memory_bytes
from spotune_trainer.checkpoint.memory.digests import SegmentDigests
from spotune_trainer.checkpoint.memory.peer_reader import PeerReader
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment
from spotune_trainer.checkpoint.memory.spare_memory import shortage

logger = logging.getLogger("spotune.worker")


@dataclass
class RankMemory:
    """What one rank may use of its node's segments.

    Attributes:
        own: the two segments that it writes to in turn.
        node: all segments of the node that hold a file of the checkpoint to start from, for reading.
        surplus: segments that nothing on the node replaces; this rank frees them once its own commits replace them.
        copies: number of snapshots that it may keep, 1 or 2.
        ranks: number of ranks on the node, which share its free memory.
        peers: access to the memory of other nodes; None without.
        free_bytes: returns the free memory of the node.
    """

    own: tuple[Segment, Segment]
    node: tuple[Segment, ...]
    surplus: tuple[Segment, ...]
    copies: int
    ranks: int
    peers: PeerReader | None = None
    free_bytes: Callable[[], int] = free_memory_bytes
    _digests: SegmentDigests | None = field(default=None, init=False)
    _newest: Segment | None = field(default=None, init=False)
    _has_committed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self._newest = next((segment for segment in self.own if segment.label is not None), None)

    @property
    def digests(self) -> SegmentDigests:
        """Checksums of the segments; made in the process of the rank, since threads cannot be sent there."""
        self._digests = self._digests or SegmentDigests()
        return self._digests

    def begin_to_verify(self, checkpoint: str) -> None:
        """Start to compute the checksum of this rank's own file of a checkpoint, which it probably restores from."""
        for segment in self.own:
            label = segment.label
            if label is not None and label.checkpoint == checkpoint:
                self.digests.begin(segment)

    def holding(self, files: Iterable[Label]) -> dict[str, Segment]:
        """The segments with the labels of these files, by the name of the file. Their content is not verified."""
        files = set(files)
        labelled = ((segment.label, segment) for segment in self.node)
        return {label.file: segment for label, segment in labelled if label in files and label is not None}

    def prepare(self, content_bytes: int) -> Segment | None:
        """Allocate the segment of the next commit; None if this would destroy what it holds, or is not possible."""
        segment = self._next_segment(content_bytes)
        if segment.label is not None and segment.content_bytes != content_bytes:
            return None
        try:
            segment.resize(content_bytes)
        except OSError:
            return None  # `begin` tries again
        return segment

    def begin(self, content_bytes: int) -> Segment:
        """The segment for a commit that begins now. What it held is lost.

        Raises:
            OSError: there is not enough memory.
        """
        segment = self._next_segment(content_bytes)
        segment.label = None
        if self.copies == 1 or self._has_committed:
            for each in self.surplus:
                each.free()
        if self.copies == 1:
            self._other_than(segment).free()
        try:
            segment.resize(content_bytes)
        except OSError as error:
            if self.copies == 1 or self._newest is None:
                raise
            self._keep_one(str(error))
            return self.begin(content_bytes)
        return segment

    def complete(self, segment: Segment, label: Label) -> None:
        """The segment's content is complete, and its file is written."""
        segment.label = label
        self._newest = segment
        self._has_committed = True

    def give_up(self) -> None:
        """Free all that this rank would replace: it keeps its snapshots elsewhere."""
        for segment in (*self.own, *self.surplus):
            segment.free()

    def _next_segment(self, content_bytes: int) -> Segment:
        if self._newest is None:
            return self.own[0]
        other = self._other_than(self._newest)
        if self.copies == 2:
            needed = (LABEL_BYTES + content_bytes - other.allocated_bytes) * self.ranks
            reason = shortage(needed, self.free_bytes)
            if reason is None:
                return other
            self._keep_one(f"a second one of each of {self.ranks} ranks {reason}")
        return self._newest

    def _keep_one(self, reason: str) -> None:
        self.copies = 1
        logger.warning(
            "one snapshot of a commit is kept in memory instead of two: %s. A worker group that starts after a loss "
            "during a commit reads the volume",
            reason,
        )

    def _other_than(self, segment: Segment) -> Segment:
        return self.own[1] if segment is self.own[0] else self.own[0]


class NodeMemory:
    """The segments of one node. Not thread-safe: the ranks of one group end before those of the next start.

    Attributes:
        ranks: number of ranks on the node.
    """

    def __init__(self) -> None:
        self._by_rank: list[tuple[Segment, Segment]] = []
        self.ranks = 0

    def share(
        self,
        ranks: int,
        copies: int,
        restore: str | None,
        others: Sequence[Segment] = (),
        *,
        others_are_replaced: bool = False,
    ) -> list[RankMemory | None]:
        """Distribute the segments over the ranks of the next group, which overwrites those that it cannot start from.

        Args:
            ranks: number of ranks on this node.
            copies: number of snapshots that each of them may keep; 0 frees everything.
            restore: name of the checkpoint that the group starts from.
            others: segments with copies of other nodes' files of that checkpoint.
            others_are_replaced: another node sends its commits in their place; otherwise the ranks free them.

        Returns:
            The memory of each rank by its local rank; None without shared memory.
        """
        self.ranks = ranks
        for segment in self._segments():
            label = segment.label
            if copies == 0:
                segment.free()
            elif label is None or label.checkpoint != restore:
                segment.label = None  # its memory stays: to free gigabytes takes a second, and to allocate them again
        if copies == 0:
            return [None] * ranks
        try:
            while len(self._by_rank) < ranks:
                self._by_rank.append((Segment.create(), Segment.create()))
        except OSError as error:
            logger.warning("snapshots of commits are not kept in shared memory: %s", error)
            return [None] * ranks
        held = tuple(segment for segment in self._segments() if segment.label is not None)
        gone = [segment for pair in self._by_rank[ranks:] for segment in pair]
        for segment in gone:
            if segment.label is None:
                segment.free()
        surplus = gone if others_are_replaced else [*gone, *others]
        return [
            RankMemory(
                own=self._by_rank[rank],
                node=(*held, *others),
                surplus=tuple(surplus[rank::ranks]),
                copies=copies,
                ranks=ranks,
            )
            for rank in range(ranks)
        ]

    def labelled(self) -> list[tuple[Label, Segment]]:
        """The segments that hold a whole file, and which one. May be called from any thread."""
        labels = ((segment.label, segment) for segment in self._segments())
        return [(label, segment) for label, segment in labels if label is not None]

    def free(self) -> None:
        """Give all memory back."""
        for segment in self._segments():
            segment.free()

    def _segments(self) -> list[Segment]:
        return [segment for pair in tuple(self._by_rank) for segment in pair]
