"""Converts the raw rows of a job to shards before workers are asked for, and records what became of them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from spotune.job import FinetuneJob, PrepareSpec
from spotune_trainer.data.counts.left_out import count_of_splits
from spotune_trainer.data.counts.tables import left_out_of, summary_of
from spotune_trainer.driver.status_publisher import StatusPublisher
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.status import Phase
from spotune_trainer.observability.logs.event_messages import event_message

if TYPE_CHECKING:
    from spotune_trainer.data.preparation.prepare import PrepareProgress

logger = logging.getLogger("spotune.driver")


def prepare_sources(
    job: FinetuneJob,
    directory: JobDirectory,
    sources: Mapping[str, PrepareSpec],
    ledger: Ledger,
    status: StatusPublisher,
) -> None:
    """Convert raw data to shards, unless they exist already. Sets `dataLeftOut` of the status.

    Args:
        job: the job.
        directory: of the job.
        sources: raw data by the name of the mixture's source; the name is empty without a mixture.
        ledger: gets an event for each source that is converted.
        status: gets the progress.

    Raises:
        JobError: the data or the options are wrong, or more is left out than `dataset.maxSkipped` allows.
        InfrastructureError: the preparation was interrupted; another attempt continues.
    """
    from spotune_trainer.data.preparation.prepare import PrepareOptions, prepare
    from spotune_trainer.models.pretrained import load_tokenizer

    def report(done: PrepareProgress) -> None:
        status.update(message=f"prepared {done.documents:,} rows, {done.parts_done} of {done.parts_total} parts")

    options, tokenizer = PrepareOptions.from_job(job), load_tokenizer(job)
    recorded = {event["source"] for event in ledger.records("prepared")}
    left_out: dict[str, str] = {}
    for name, source in sources.items():
        status.update(Phase.PREPARING, message=f"preparing {source}")
        prepared = prepare([source], directory.prepared(name), options, tokenizer, report)
        if name not in recorded:  # a driver may have ended between the last shard and this event
            _record(ledger, name, prepared.manifest)
        left_out[name] = left_out_of(prepared.manifest)
    found = [f"{name}: {text}" if name else text for name, text in left_out.items() if text]
    status.update(dataLeftOut="; ".join(found) or None)


def _record(ledger: Ledger, source: str, manifest: Mapping[str, Any]) -> None:
    """Record in the ledger and the log what became of the rows of a source."""
    splits = manifest["splits"].values()
    problems = [problem for counts in splits for problem in counts.get("problems", ())]
    left_out = count_of_splits(splits)
    event: dict[str, Any] = {
        "source": source,
        "summary": summary_of(manifest),
        "leftOut": left_out,
        "problems": problems,
    }
    ledger.append("prepared", **event)
    logger.info("%s", event_message({"event": "prepared", **event}))
    for problem in problems:
        logger.warning("left out: %s", problem)
