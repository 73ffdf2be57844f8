"""Kill a committing process before each of its system calls, and print what is left as a line of JSON.

The library made of `kill_at.c` must be preloaded.

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
from tests.trainer.support.checkpoints import fragments_of_rank, make_manifest, make_state

RANKS = 2


def commit_all(directory: JobDirectory, step: int) -> None:
    """Commit like a worker group of two ranks, in one process."""
    name, state = CheckpointName(step, 1), make_state(step)
    for rank in reversed(range(RANKS)):
        write_fragments(directory.checkpoints / str(name), rank, fragments_of_rank(state, RANKS, rank))
    commit(directory, name, RANKS, lambda entries: make_manifest(name, entries))
    prune(directory, 1, keep=1)


def remaining_state(directory: JobDirectory) -> dict[str, Any]:
    """The step that a job would resume from, and whether the state there equals the trained one."""
    choice = choose_checkpoint(directory)
    assert choice.checkpoint is not None
    verify(choice.checkpoint)
    step, state = choice.checkpoint.name.step, make_state(choice.checkpoint.name.step)
    read = read_parameters(choice.checkpoint)
    equal = all(bool((tensor.flatten() == state[f"{name}/fp32"]).all()) for name, tensor in read.items())
    return {"step": step, "equal": equal, "skipped": len(choice.skipped)}


def main(folder: Path) -> None:
    """Kill the second commit before its first system call, then its second, and so on, until it survives."""
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
        sys.stdout.write(json.dumps({"at": at, "killed": killed, **remaining_state(directory)}) + "\n")
        sys.stdout.flush()  # otherwise the next child would inherit the buffered line


if __name__ == "__main__":
    main(Path(sys.argv[1]))
