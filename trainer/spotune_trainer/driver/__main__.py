"""The process of a driver: connects to Ray, has the nodes made ready, and runs the driver.

Usage:
    python -m spotune_trainer.driver --directory DIR --attempt 3

Runs on the head as a Ray job, submitted by the supervisor. Exit codes: 0 trained, 10 infrastructure (or told to stop),
20 the user's model, data or configuration, 30 superseded by a later generation.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from spotune.errors import SpotuneError, StoppedError
from spotune_trainer.driver.early_start import run_in_early_driver, wait_for_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.process_marker import EARLY_DRIVER_SOCKET

if TYPE_CHECKING:
    from spotune_trainer.driver.driver import Driver

logger = logging.getLogger("spotune.driver")


def main(arguments: list[str] | None = None) -> int:
    """Entry point of the Ray job."""
    from spotune_trainer.observability.logs.line_format import LineFormatter

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--directory", type=Path, required=True, help="the job's folder on the volume")
    parser.add_argument("--attempt", type=int, required=True, help="number of this attempt")
    options = parser.parse_args(arguments)
    directory = JobDirectory(options.directory.absolute())
    directory.logs.mkdir(parents=True, exist_ok=True)
    log = directory.driver_log(options.attempt)
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout), logging.FileHandler(log)]
    for handler in handlers:
        handler.setFormatter(LineFormatter())
    logging.basicConfig(level=logging.INFO, handlers=handlers)
    try:
        return run_driver(directory, options.attempt)
    except Exception:  # a fault of our own: Ray's log of it is gone with the head, ours is not
        logger.exception("the driver crashed")
        raise


def run_driver(directory: JobDirectory, attempt: int) -> int:
    """One attempt, from connecting to Ray to its exit code."""
    import ray

    from spotune_trainer.job_directory.job import job_of
    from spotune_trainer.worker_group.agent_pool import AgentPool

    job = job_of(directory)
    assert job is not None, "the supervisor has written it"
    started = time.monotonic()
    ray.init(address="auto", log_to_driver=False)
    agents = AgentPool(directory.root)
    agents.ensure(job.spec.workers.gpus > 0)
    seconds = time.monotonic() - started

    # Imports of seconds, while those of the ranks go on on their nodes.
    from spotune_trainer.driver.driver import Driver, DriverDependencies

    driver = Driver(directory, job, attempt, DriverDependencies(agents))
    driver.status.record_startup("connect", seconds)
    return run_attempt(driver)


def run_attempt(driver: Driver) -> int:
    """Run a driver. Returns the exit code of its process."""
    try:
        driver.run()
    except SpotuneError as error:
        logger.log(logging.INFO if isinstance(error, StoppedError) else logging.ERROR, "%s", error)
        return error.exit_code
    return 0


def start_early() -> NoReturn:
    """Import everything, wait for the Ray job that connects, and be its driver."""
    wait_for_job(Path(os.environ[EARLY_DRIVER_SOCKET]), _import_everything, main)


def _import_everything() -> None:
    import spotune_trainer.driver.driver
    import spotune_trainer.worker_group.agent_pool  # noqa: F401 - also imports Ray


if __name__ == "__main__":
    ended = run_in_early_driver(sys.argv[1:])
    code = main() if ended is None else ended
    logging.shutdown()
    sys.stdout.flush()
    # Everything is on the volume; an orderly end of Ray's client would take seconds that nobody needs.
    os._exit(code)
