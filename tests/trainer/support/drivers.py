"""Drivers of tiny jobs on a simulated cluster, and what they write."""

from __future__ import annotations

from typing import Any

from spotune_trainer import files
from spotune_trainer.driver.driver import Driver
from spotune_trainer.job_directory.layout import JobDirectory
from tests.trainer.support.runs import Runs
from tests.trainer.support.simulated_cluster import SimulatedCluster


def make_driver(
    runs: Runs,
    directory: JobDirectory,
    cluster: SimulatedCluster,
    count: int = 2,
    minimum: int | str = 1,
    reproducible: str = "none",
    **retry: Any,
) -> Driver:
    """A driver of a tiny job on a simulated cluster."""
    job = runs.job(
        workers={"count": count, "min": minimum, "gpus": 0},
        execution={"microBatchSize": 4, "zeroStage": 1, "reproducible": reproducible},
        retry=retry,
    )
    return Driver(directory, job, 1, cluster.dependencies())


def events(driver: Driver, *names: str) -> list[dict[str, Any]]:
    """The events of these names in the ledger of a driver's job."""
    return driver.ledger.records(*names)


def status(directory: JobDirectory) -> dict[str, Any]:
    """`status.json`."""
    value = files.read_json(directory.status)
    assert isinstance(value, dict)
    return value
