"""The environment of a command: its worker group, its folders, and the task that `spotune_train` joins.

torchrun takes its options from variables that begin with PET_, so `torchrun train.py` needs none. The variables without
a prefix are for other launchers, and for programs that are the only process of their node.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Final

from spotune_trainer import files
from spotune_trainer.training.task import RankPlacement, WorkerTask

FIELD: Final = "training.command"
TASK: Final = "SPOTUNE_TASK"
"""Variable with the path of the task of the generation."""


def environment_of(task: WorkerTask, place: RankPlacement, base: Mapping[str, str]) -> dict[str, str]:
    """The environment of a node's command. Its files are written, and its folders created.

    Args:
        task: of the generation.
        place: of the node's first rank.
        base: environment of this process.
    """
    directory = task.job_directory
    checkpoints, output = directory.command_checkpoints, directory.command_output(task.generation)
    for folder in (checkpoints, output):
        folder.mkdir(parents=True, exist_ok=True)
    files.write_json(task.logs.command_task(place.node), asdict(task))
    group = {
        "NNODES": str(place.nodes),
        "NODE_RANK": str(place.node),
        "NPROC_PER_NODE": str(place.local_world_size),
        "MASTER_ADDR": place.address,
        "MASTER_PORT": str(place.port),
    }
    return {
        **base,
        **group,
        "RANK": str(place.node),
        "WORLD_SIZE": str(place.nodes),
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
        **{f"PET_{name}": value for name, value in group.items()},
        "SPOTUNE_CONFIG": json.dumps(task.job["spec"]["training"].get("config", {})),
        "SPOTUNE_CHECKPOINT_DIR": str(checkpoints),
        "SPOTUNE_OUTPUT_DIR": str(output),
        TASK: str(task.logs.command_task(place.node)),
        "PATH": search_path(base),
        "PYTHONUNBUFFERED": "1",  # the output is what shows that the program makes progress
    }


def search_path(base: Mapping[str, str]) -> str:
    """Where programs are looked for: beside this Python first, where torchrun is."""
    return os.pathsep.join([str(Path(sys.executable).parent), base.get("PATH", os.defpath)])


def joined_task(base: Mapping[str, str]) -> WorkerTask | None:
    """The task of the command that has started this process; None if no command of a job has."""
    path = base.get(TASK)
    value = files.read_json(Path(path)) if path else None
    return WorkerTask(**value) if value is not None else None


def place_of_process(base: Mapping[str, str]) -> RankPlacement:
    """The place of a process in the group, as its launcher has set it, and the node as the command's environment has.

    Without a launcher, the command is the only process of its node.
    """
    return RankPlacement(
        rank=int(base.get("RANK", "0")),
        local_rank=int(base.get("LOCAL_RANK", "0")),
        local_world_size=int(base.get("LOCAL_WORLD_SIZE", "1")),
        world_size=int(base.get("WORLD_SIZE", "1")),
        address=base.get("MASTER_ADDR", ""),
        port=int(base.get("MASTER_PORT", "0")),
        node=int(base.get("NODE_RANK", "0")),
        nodes=int(base.get("NNODES", "1")),
    )
