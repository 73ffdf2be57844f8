"""The files of examples/: jobs, sweeps, and services of their models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune.job_file.load import load_job
from spotune.plan.known_models import known_config
from tests import ROOT

EXAMPLES = ROOT / "examples"
JOB_FILES = sorted(file for file in EXAMPLES.glob("*/*.yaml") if "\nkind: FinetuneJob" in file.read_text())
JOBS = {job.metadata.name: job for job in map(load_job, JOB_FILES)}
SWEEP_FILES = sorted(file for file in EXAMPLES.glob("*/*.yaml") if "\nkind: FinetuneSweep" in file.read_text())
SERVICE_FILES = sorted(EXAMPLES.glob("serving/*.yaml"))
PUBLISHED = [
    file for file in JOB_FILES if not (load_job(file).spec.training.has_user_code or file.parent.name == "text-to-sql")
]
"""Jobs that need published models and datasets. The others make their own."""


def config_of(job: FinetuneJob, folder: Path) -> dict[str, Any]:
    """The `config.json` of the model of a job in `folder`: a published one, or the example's own."""
    source = job.spec.model.source
    if not source.startswith("hf://"):
        config: dict[str, Any] = json.loads((folder / source / "config.json").read_text())
        return config
    published = known_config(source)
    assert published is not None, f"{source} is not among the published configurations"
    return dict(published)
