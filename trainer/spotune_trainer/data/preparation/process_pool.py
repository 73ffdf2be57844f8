"""Parts written by several processes, which end with the process that started them."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING

from spotune.errors import InfrastructureError
from spotune_trainer.data.preparation.inputs import Part
from spotune_trainer.data.preparation.parts import PartOptions, PartSummary, write_part

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def write_parts(
    parts: Sequence[Part], folder: Path, options: PartOptions, tokenizer: PreTrainedTokenizerBase, processes: int
) -> Iterator[PartSummary]:
    """Write every part to ``folder/part-NNNNN`` and yield what became of it, in the order of the parts.

    Args:
        parts: The cut input.
        folder: Of this input with these options only; parts that are complete in it are not written again.
        options: How.
        tokenizer: Turns text into tokens.
        processes: How many parts are written at once; 0: one per core.

    Raises:
        JobError: A part is wrong; always that of the first wrong part.
        InfrastructureError: A process was killed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    folders = [folder / f"part-{number:05d}" for number in range(len(parts))]
    count = min(processes or len(os.sched_getaffinity(0)), len(parts))
    if count <= 1:
        for path, part in zip(folders, parts, strict=True):
            yield write_part(path, part, options, tokenizer)
        return
    # Forked from a server that has imported what is needed, once: importing takes seconds, and a fork of this process
    # would not survive the locks of its threads, those of the tokenizer among them.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([write_part.__module__])
    try:
        with ProcessPoolExecutor(count, context, _set_up, (options, tokenizer)) as pool:
            yield from pool.map(_write, folders, parts)
    except BrokenProcessPool as error:
        raise InfrastructureError(
            f"a process that tokenises was killed, most likely for lack of memory: use fewer than {count} processes, "
            "and run it again to go on where it was"
        ) from error


class _Process:
    """What a process of the pool keeps from part to part."""

    options: PartOptions
    tokenizer: PreTrainedTokenizerBase


def _set_up(options: PartOptions, tokenizer: PreTrainedTokenizerBase) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the cores are taken by the processes
    _Process.options = options
    _Process.tokenizer = tokenizer


def _write(folder: Path, part: Part) -> PartSummary:
    return write_part(folder, part, _Process.options, _Process.tokenizer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        connection.wait([parent.sentinel])
        os._exit(1)
