"""Additional nodes of a run's local Ray, which join while it runs and can be killed.

Usage, by `join` alone, in the environment of the head:
    python -m tests.proof.nodes ADDRESS SLOTS GPUS
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from spotune_trainer.supervisor.ray_head.local import RunningRay
from spotune_trainer.supervisor.ray_head.processes import ProcessFamily, boot_id, find_process
from tests import ROOT

NODE = "SPOTUNE_PROOF_NODE"
"""Variable in all processes of an additional node: its name."""
_JOIN_SECONDS = 150.0
_POLL_SECONDS = 0.1
_OBJECT_STORE_BYTES = 80 * 1024 * 1024


class JoinError(Exception):
    """A node could not join; the message is what it logged."""


@dataclass(frozen=True)
class Node:
    """A node that joined.

    Attributes:
        name: in the environment of its processes.
        slots: workers that it has room for.
        family: all of its processes.
    """

    name: str
    slots: int
    family: ProcessFamily

    def kill(self) -> None:
        """End all of it at once."""
        self.family.kill()


def join(ray: RunningRay, slots: int, number: int, gpus: Sequence[int] = ()) -> Node:
    """Start a node beside the head, and wait until it has joined.

    Args:
        ray: the head.
        slots: workers that it has room for.
        number: of the node, different from those of all others of this head.
        gpus: GPUs of this machine that belong to it.

    Raises:
        JoinError: Ray could not be started, or did not answer in time.
    """
    head = Path(f"/proc/{ray.parts['raylet'].pid}/environ").read_bytes().decode()
    environment = dict(entry.split("=", 1) for entry in head.split("\0") if "=" in entry)
    name = f"{ray.temporary.name}-{number}"
    visible = {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in gpus)} if gpus else {}
    starter = subprocess.Popen(
        [sys.executable, "-m", __name__, ray.address, str(slots), str(len(gpus))],
        cwd=ROOT,
        env={**environment, **visible, NODE: name},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    family = ProcessFamily(find_process(starter.pid), boot_id(), f"{NODE}={name}")
    output, _ = starter.communicate(timeout=240)
    if starter.returncode != 0:
        family.kill()
        raise JoinError(output)
    return Node(name, slots, family)


def start(address: str, slots: int, gpus: int) -> str:
    """What `ray start --address` does, which refuses to where the head says that it is for one machine.

    Returns:
        Ray's id of the node.
    """
    from ray._private import services
    from ray._private.node import Node as RayNode
    from ray._private.parameter import RayParams

    parameters = RayParams(
        gcs_address=address,
        node_ip_address="127.0.0.1",
        num_cpus=slots,
        num_gpus=gpus,
        min_worker_port=0,
        max_worker_port=0,
        node_manager_port=0,
        object_store_memory=_OBJECT_STORE_BYTES,
        include_log_monitor="",  # of all that is false the one that its type allows
    )
    parameters.dashboard_agent_listen_port = None
    services.get_node = partial(_patiently, services.get_node)
    node = RayNode(parameters, head=False, shutdown_at_exit=False, spawn_reaper=False)
    return str(node.node_id)


def _patiently(get_node: Callable[[str, str], Any], address: str, node: str) -> Any:
    """What Ray knows of a node once it has joined. Ray itself waits for half a minute, which a busy machine exceeds."""
    until = time.monotonic() + _JOIN_SECONDS
    while True:
        try:
            return get_node(address, node)
        except RuntimeError:
            if time.monotonic() > until:
                raise
        time.sleep(_POLL_SECONDS)


if __name__ == "__main__":
    start(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
