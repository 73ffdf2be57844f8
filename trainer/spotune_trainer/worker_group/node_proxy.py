"""The Ray actor of a node: the driver's way to the node's agent, which lives longer than any actor.

Ray places the actor, and reports its end or that of the node. The actor attaches to the agent, or starts it if the
node has none, and passes calls on. Must be cheap to import: until it is, the agent does not start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import ray.util

from spotune_trainer import files
from spotune_trainer.bucket.link import link_node
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.worker_group.agent_link import EXIT, AgentGoneError, agents_folder, attach
from spotune_trainer.worker_group.relay import NewContent, Notices, exchange


class NodeProxy:
    """Passes calls on to the agent of its node. Ray calls each method in a thread of its own (see `AgentPool`).

    Args:
        directory: of the job.
        gpus: whether the ranks train on GPUs.
        driver: id of the driver.
        secret: by which agents and ranks of one driver know each other.
        bucket: URL of the bucket that keeps the job; empty: a volume keeps it.
        functions: whether the job has a training function of the user.
    """

    def __init__(
        self, directory: str, gpus: bool, driver: str, secret: bytes, bucket: str = "", functions: bool = False
    ) -> None:
        self._directory = JobDirectory(Path(directory))
        self._has_own_directory = bool(bucket) and link_node(self._directory, bucket)
        address = ray.util.get_node_ip_address()
        self._agent = attach(agents_folder(directory), driver, secret, address, gpus=gpus, functions=functions)

    def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of the agent."""
        try:
            return self._agent.call(method, *args, **kwargs)
        except AgentGoneError:
            _exit()

    def exchange(self, generation: int, notices: Notices, known: Mapping[str, int]) -> tuple[NewContent, ...]:
        """As `relay.exchange`; nothing if the node shares the driver's directory."""
        return exchange(self._directory, generation, notices, known) if self._has_own_directory else ()

    def exit_agent(self) -> None:
        """End the agent with all that it runs."""
        self.call(EXIT)

    def block_forever(self) -> None:
        """Never returns. A caller that waits for it gets an error as soon as the agent, Ray or the node is dead."""
        self._agent.wait_for_exit()
        _exit()


def calls_function(directory: JobDirectory) -> bool:
    """On the head: whether the job has a training function of the user. A node need not have the job's file.

    Reads plain JSON: the job's model takes long to import.
    """
    job = files.read_json(directory.job) or {}
    return bool(job.get("spec", {}).get("training", {}).get("function"))


def _exit() -> NoReturn:
    """End the actor, which is of no use without its agent: the driver gets an error for all of its calls."""
    os._exit(1)
