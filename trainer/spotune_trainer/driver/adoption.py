"""Finds the worker group that an earlier driver has left running, so that the next driver can go on with it.

Ranks do not need the driver: they talk to one another, and their agents outlive Ray. So if a head or a driver is lost,
its group trains on. The next driver adopts it if every rank is found before something else happens to the group. If
they have trained to the end meanwhile, their agents still have the results, and nothing is left to be trained.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from spotune.job import WorkersSpec
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import latest_generation
from spotune_trainer.driver.status_publisher import StatusPublisher
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.notice import is_stop_requested, raise_if_stopped
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.worker_group.result import FoundGroup, GroupResult, Stopped, WorkerGroupRunner, Yielded

logger = logging.getLogger("spotune.driver")

ADOPTION_SECONDS = 60.0
"""How long a driver looks for the ranks. A raylet joins a new head within 20 s; the ranks train meanwhile."""
_POLL_SECONDS = 0.5


class Adoption:
    """The search for the group of an earlier driver.

    Args:
        directory: of the job.
        ledger: of the job.
        agents: of the cluster.
        status: shows what the group does, from the moment that it is known to make progress.
    """

    def __init__(
        self, directory: JobDirectory, ledger: Ledger, agents: WorkerGroupRunner, status: StatusPublisher
    ) -> None:
        self._directory = directory
        self._ledger = ledger
        self._agents = agents
        self._status = status
        self._is_shown = False
        self._generation = self._left_generation()
        if self._generation is not None:
            status.update(adopting=True)  # before the first status of this driver

    def find(
        self, workers: WorkersSpec, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> FoundGroup | None:
        """The group of the newest generation, once all of its ranks are found; None if it has ended or cannot go on.

        Args:
            workers: of the job.
            clock: seconds, monotonic.
            sleep: waits for a number of seconds.

        Raises:
            StoppedError: a notice asks the run to stop.
        """
        group = self._search(self._generation, workers, clock, sleep) if self._generation is not None else None
        self._status.update(restarts=self._ledger.restarts())  # not before it is known what the last loss meant
        return group

    def result(self, group: FoundGroup) -> GroupResult:
        """Wait for the end of the group that was found."""
        result = self._agents.adopt_group(group)
        if isinstance(result, Stopped) and not is_stop_requested(self._directory):
            return Yielded()  # the request was withdrawn, and another group goes on
        return result

    def _search(
        self, generation: int, workers: WorkersSpec, clock: Callable[[], float], sleep: Callable[[float], None]
    ) -> FoundGroup | None:
        heartbeat, started = self._heartbeat(generation), clock()
        while True:
            slots = self._agents.ensure(workers.gpus > 0)
            group = self._agents.find_group(generation)
            if group is not None and group.is_complete:
                self._adopt(group)
                return group
            reason = _hopeless(group, slots.ready >= max(slots.nodes, workers.world_size), clock() - started)
            if reason is not None:
                logger.info(
                    "the workers of generation %d, which an earlier driver started, cannot go on: %s. Other workers "
                    "start from the last commit",
                    generation,
                    reason,
                )
                break
            if not self._is_shown and self._heartbeat(generation) != heartbeat:
                self._show(generation)
            elif not self._is_shown:
                message = f"looking for the workers of generation {generation}, which may still train"
                self._status.update(Phase.WAITING_FOR_WORKERS, message=message)
            raise_if_stopped(self._directory)
            sleep(_POLL_SECONDS)
        if self._is_shown:
            self._status.finish_generation(Phase.WAITING_FOR_WORKERS)
        self._status.update(Phase.WAITING_FOR_WORKERS, message=None, adopting=None)
        self._agents.kill_ranks()
        return None

    def _left_generation(self) -> int | None:
        """The newest generation, if its end was not recorded and it is one of this ledger."""
        generation = latest_generation(self._directory)
        started = {event["generation"] for event in self._ledger.records("generation-started")}
        ended = {event["generation"] for event in self._ledger.records("generation-ended")}
        return generation if generation in started - ended else None

    def _adopt(self, group: FoundGroup) -> None:
        generation = group.task.generation
        self._ledger.append("adopted", generation=generation, worldSize=group.world_size)
        if not self._is_shown:
            self._show(generation)
        self._status.update(message=None, adopting=None)
        logger.info("generation %d is adopted: its %d workers have trained on", generation, group.world_size)

    def _show(self, generation: int) -> None:
        self._is_shown = True
        started = next(e for e in self._ledger.records("generation-started") if e["generation"] == generation)
        self._status.adopt_generation(started)

    def _heartbeat(self, generation: int) -> int | None:
        progress = files.read_json(self._directory.generation_logs(generation).progress)
        return None if progress is None else int(progress["heartbeat"])


def _hopeless(group: FoundGroup | None, all_are_ready: bool, waited: float) -> str | None:
    """Why a group that is not complete cannot be adopted; None while it may become complete."""
    if group is not None and group.has_failed:
        return "one of them has failed"
    if all_are_ready:
        return "not all of them are there any more, although workers on all nodes have answered"
    if waited >= ADOPTION_SECONDS:
        return f"not all of them were found within {ADOPTION_SECONDS:.0f} s"
    return None
