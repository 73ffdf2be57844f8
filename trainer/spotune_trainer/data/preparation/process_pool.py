"""Writes parts in several processes. The processes exit when their parent does."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

from spotune.errors import InfrastructureError
from spotune_trainer.data.counts.split_counts import PartSummary
from spotune_trainer.data.preparation.inputs import Part, part_name
from spotune_trainer.data.preparation.parts import PartOptions, write_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write_parts(
    parts: Sequence[Part],
    folder: Path,
    options: PartOptions,
    tokenizer: PreTrainedTokenizerBase,
    processes: int,
    *,
    ahead: int | None = None,
) -> Iterator[PartSummary]:
    """Write every part to ``folder/part-NNNNN`` and yield the summaries, in the order of the parts.

    Args:
        parts: The input.
        folder: Staging folder for this input with these options only. Complete parts in it are not written again.
        options: How parts are written.
        tokenizer: The model's tokenizer.
        processes: Number of processes; 0 means one per core.
        ahead: For each process, how many parts may be written, or being written, before their summary is yielded; None
            for no limit.

    Raises:
        JobError: A part has a wrong row. Always the error of the first such part.
        InfrastructureError: A process was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folders = [folder / part_name(number) for number in range(len(parts))]
    count = min(processes or len(os.sched_getaffinity(0)), len(parts))
    if count <= 1:
        for path, part in zip(folders, parts, strict=True):
            yield write_part(path, part, options, tokenizer)
        return
    # A fork server imports the modules once, which takes seconds. Forking this process instead could deadlock on locks
    # that its threads hold, such as the tokenizer's.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([write_part.__module__, "streaming.base.format.mds"])
    try:
        with ProcessPoolExecutor(count, context, _init_worker, (options, tokenizer)) as pool:
            yield from _in_order(pool, folders, parts, len(parts) if ahead is None else count * ahead)
    except BrokenProcessPool as error:
        raise InfrastructureError(
            f"a tokenizing process was killed, most likely for lack of memory: use fewer than {count} processes and "
            "run it again; it continues with the missing parts"
        ) from error


def _in_order(
    pool: ProcessPoolExecutor, folders: Sequence[Path], parts: Sequence[Part], limit: int
) -> Iterator[PartSummary]:
    """The summaries of the parts. At most ``limit`` parts are in the pool or wait to be yielded."""
    waiting: deque[Future[PartSummary]] = deque()
    try:
        for folder, part in zip(folders, parts, strict=True):
            if len(waiting) == limit:
                yield waiting[0].result()
                waiting.popleft()
            waiting.append(pool.submit(_write_in_worker, folder, part))
        while waiting:
            yield waiting[0].result()
            waiting.popleft()
    finally:
        for future in waiting:
            future.cancel()


class _WorkerState:
    """State of a pool process, set once when it starts."""

    options: PartOptions
    tokenizer: PreTrainedTokenizerBase


def _init_worker(options: PartOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the pool's processes use all cores
    _WorkerState.options = options
    _WorkerState.tokenizer = tokenizer


def _write_in_worker(folder: Path, part: Part) -> PartSummary:
    return write_part(folder, part, _WorkerState.options, _WorkerState.tokenizer)


def _exit_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
