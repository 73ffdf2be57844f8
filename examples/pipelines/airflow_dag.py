"""Train a model as a task of Airflow: the DAG `finetune` with one task that waits for a FinetuneJob."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

from airflow.decorators import dag, task

JOB_FILE = Path(__file__).with_name("finetunejob.yaml")
"""The FinetuneJob, beside the DAG."""


def finetune(file: str, namespace: str, hours: float) -> str:
    """Apply the FinetuneJob of a file, wait until it is trained, and return where the model is.

    A retry of the task finds the same job and waits on. If the model cannot be trained, further retries are useless,
    so the task fails for good.

    Args:
        file: YAML file of the job.
        namespace: Namespace of the job.
        hours: Time limit of the task. The job goes on after it.
    """
    from airflow.exceptions import AirflowFailException

    from spotune.errors import JobError
    from spotune_client import Client

    def show(found: Any) -> None:
        """Write progress into the log of the task."""
        print(found.phase, found.status.step, flush=True)

    with Client(namespace) as client:
        try:
            name = client.jobs.apply(file, force=True).name
            return client.jobs.wait(name, timeout=hours * 3600, progress=show).status.output
        except JobError as error:
            raise AirflowFailException(str(error)) from error


@dag(schedule=None, start_date=datetime(2026, 1, 1), catchup=False)  # type: ignore[untyped-decorator]
def finetune_dag() -> None:
    """Train the model of `finetunejob.yaml`."""
    task(finetune, retries=3)(str(JOB_FILE), "team", 24.0)


finetune_dag()
