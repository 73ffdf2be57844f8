"""`result.json`: the figures of a finished run."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from spotune.formatting import duration
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.bucket.link import link_of
from spotune_trainer.job_directory.job import training_length
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.goodput_ledger import GoodputMeter

logger = logging.getLogger("spotune.driver")


_MESSAGES = ("stoppedEarly", "exportProblem", "harnessProblem")


def write_result(directory: JobDirectory, ledger: Ledger, job: FinetuneJob, summary: Mapping[str, Any]) -> str | None:
    """Write `result.json`, and record in the ledger that the run has finished.

    Args:
        directory: of the job.
        ledger: of the job.
        job: as it was trained.
        summary: of the last worker group.

    Returns:
        What is to be said of the result: why training stopped early, or what did not work after it.
    """
    goodput = GoodputMeter(directory).metrics(time.time())
    wall_seconds = round(sum(goodput["goodputParts"].values()), 3)
    epochs, max_steps = training_length(job)
    link = link_of(directory)
    result: dict[str, Any] = {
        **dict.fromkeys(("evalLoss", "exactMatch", "executionAccuracy", "best", "stoppedEarly", "exportProblem")),
        **dict.fromkeys(("evalBySource", "samplesBySource", "harnessProblem")),
        "scores": {},
        **summary,
        "epochs": epochs,
        "maxSteps": max_steps,
        "wallSeconds": wall_seconds,
        **goodput,
        "restarts": sum(ledger.restarts().values()),
        "export": f"{link.url}/{directory.export.name}" if link is not None else str(directory.export),
    }
    files.write_json(directory.result, result)
    ledger.append("finished", step=summary["steps"], wallSeconds=wall_seconds, **goodput)
    steps, wall = summary["steps"], duration(wall_seconds)
    logger.info("trained %d steps in %s: %s has the figures of the run", steps, wall, directory.result)
    return "; ".join(result[name] for name in _MESSAGES if result[name]) or None
