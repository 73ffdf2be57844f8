"""Commits that are killed: run with `kill_at.c` preloaded; what is left after each kill is printed as a line of JSON.

Usage:
    LD_PRELOAD=kill_at.so python -m tests.trainer.support.killed_commits FOLDER
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from spotune_trainer.checkpoint.generations import choose_checkpoint, claim
from spotune_trainer.checkpoint.layout import CheckpointName
from spotune_trainer.checkpoint.reader import read_parameters, verify
from spotune_trainer.checkpoint.writer import commit, prune, write_fragments
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.checkpoints import cut, make_manifest, make_state

RANKS = 2


def commit_all(directory: JobDirectory, step: int) -> None:
    """What a worker group of two ranks does, in one process."""
    name, state = CheckpointName(step, 1), make_state(step)
    for rank in reversed(range(RANKS)):
        write_fragments(directory.checkpoints / str(name), rank, cut(state, RANKS, rank))
    commit(directory, name, RANKS, lambda entries: make_manifest(name, entries))
    prune(directory, 1, keep=1)


def left(directory: JobDirectory) -> dict[str, Any]:
    """Which step a job would go on from, and whether what it reads there is what was trained."""
    choice = choose_checkpoint(directory)
    assert choice.checkpoint is not None
    verify(choice.checkpoint)
    step, state = choice.checkpoint.name.step, make_state(choice.checkpoint.name.step)
    read = read_parameters(choice.checkpoint)
    equal = all(bool((tensor.flatten() == state[f"{name}/fp32"]).all()) for name, tensor in read.items())
    return {"step": step, "equal": equal, "skipped": len(choice.skipped)}


def main(folder: Path) -> None:
    """Kill a second commit before its first call, its second, and so on, until none is left to kill it before."""
    kill_at: Any = ctypes.CDLL(None).kill_at
    at, killed = 0, True
    while killed:
        at += 1
        directory = JobDirectory(folder / str(at))
        claim(directory, None)
        commit_all(directory, 5)
        child = os.fork()
        if child == 0:
            kill_at(ctypes.c_long(at))
            commit_all(directory, 10)
            os._exit(0)
        killed = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0
        sys.stdout.write(json.dumps({"at": at, "killed": killed, **left(directory)}) + "\n")
        sys.stdout.flush()  # or the next child would write it, too


if __name__ == "__main__":
    main(Path(sys.argv[1]))
