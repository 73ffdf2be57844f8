"""The copies of another node's files that a node keeps: those of the last complete commit, one segment for each file.

One copy is enough. It is replaced only after the next commit has become complete, and from then on no worker group
starts from the older one.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from spotune.plan.devices import free_memory_bytes
from spotune_trainer.checkpoint.memory.segment import LABEL_BYTES, Label, Segment
from spotune_trainer.checkpoint.memory.spare_memory import shortage

logger = logging.getLogger("spotune.worker")


class RefusedError(Exception):
    """A copy is not kept; the message says why."""


class PeerCopies:
    """The segments of a node that hold other nodes' files. Thread-safe.

    A segment that is being filled belongs to the thread that fills it, so a new generation never waits for it.

    Args:
        free_bytes: returns the free memory of the node.
    """

    def __init__(self, free_bytes: Callable[[], int] = free_memory_bytes) -> None:
        self._free_bytes = free_bytes
        self._lock = threading.Lock()
        self._by_file: dict[str, Segment] = {}
        self._generation: int | None = None

    def begin(self, generation: int, restore: str | None) -> tuple[Segment, ...]:
        """From now on, only copies that this generation commits are kept. Frees those that it cannot start from.

        Args:
            generation: number of the worker group.
            restore: name of the checkpoint that it starts from.

        Returns:
            The segments that hold files of that checkpoint.
        """
        with self._lock:
            self._generation = generation
            for file, segment in list(self._by_file.items()):
                label = segment.label
                if label is None or label.checkpoint != restore:
                    del self._by_file[file]
                    segment.free()
            return tuple(self._by_file.values())

    def find(self, label: Label) -> Segment | None:
        """The segment that holds this file."""
        with self._lock:
            segment = self._by_file.get(label.file)
        return segment if segment is not None and segment.label == label else None

    def keep(self, generation: int, label: Label, files: Collection[str], receive: Callable[[Segment], None]) -> None:
        """Keep a file of a complete commit, in place of what was kept of earlier commits.

        Args:
            generation: that committed it.
            label: of the file.
            files: all files of that commit which this node is to keep; it frees the others.
            receive: fills a segment of the file's size. What it raises is raised here, and the copy is not kept.

        Raises:
            RefusedError: the generation is not the current one, or memory is short.
        """
        segment = self._take(generation, label, files)
        kept = False
        try:
            segment.label = None
            segment.resize(label.size)
            receive(segment)
            kept = self._put(generation, label, segment)
        except OSError as error:
            raise RefusedError(f"{label.size / 1e9:.1f} GB cannot be allocated: {error}") from error
        finally:
            if not kept:
                segment.free()
        if not kept:
            raise RefusedError(f"generation {generation} has ended")

    def free(self) -> None:
        """Free all copies. Further ones are refused until the next generation begins."""
        with self._lock:
            self._generation = None
            for segment in self._by_file.values():
                segment.free()
            self._by_file.clear()

    def _take(self, generation: int, label: Label, files: Collection[str]) -> Segment:
        """A segment to fill: the one with the earlier version of the file, or a new one."""
        with self._lock:
            if generation != self._generation:
                raise RefusedError(f"generation {generation} is not the current one, {self._generation}")
            for file in [file for file in self._by_file if file not in files]:
                self._by_file.pop(file).free()
            segment = self._by_file.pop(label.file, None) or Segment.create()
        reason = shortage(LABEL_BYTES + label.size - segment.allocated_bytes, self._free_bytes)
        if reason is not None:
            segment.free()
            self._free_other_than(label.checkpoint)
            raise RefusedError(f"a copy of {label.file} {reason}")
        return segment

    def _free_other_than(self, checkpoint: str) -> None:
        """Free what is kept of older commits: no worker group starts from them any more."""
        with self._lock:
            for file, segment in list(self._by_file.items()):
                if segment.label is None or segment.label.checkpoint != checkpoint:
                    self._by_file.pop(file).free()

    def _put(self, generation: int, label: Label, segment: Segment) -> bool:
        with self._lock:
            if generation != self._generation:
                return False
            segment.label = label
            replaced = self._by_file.pop(label.file, None)
            if replaced is not None:
                replaced.free()
            self._by_file[label.file] = segment
            return True
