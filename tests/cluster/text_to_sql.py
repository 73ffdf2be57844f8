"""The text-to-SQL example for a cluster: its corpus, and its job with storage and pods at test size."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from tests import ROOT
from tests.cluster.finetune_jobs import SMALL, Workplace

EXAMPLE = ROOT / "examples" / "text-to-sql"
JOB_FILE = EXAMPLE / "finetunejob.yaml"
ON_VOLUME = "/data/data"
"""Relative sources of the job file are relative to the root of the volume."""


def write_corpus(folder: Path, training_rows: int) -> Path:
    """Write the example's data with that number of training questions, by the commands of its README."""
    corpus = folder / "data"
    generate = [str(EXAMPLE / "generate.py"), "--output", str(corpus), "--training-rows", str(training_rows)]
    subprocess.run([sys.executable, *generate], check=True, capture_output=True)
    (folder / "job.yaml").write_text(JOB_FILE.read_text())
    for split in ("train", "eval"):
        shard = ["shard", str(corpus / f"{split}.jsonl"), "--job", str(folder / "job.yaml")]
        command = [str(Path(sys.executable).with_name("spotune")), *shard]
        subprocess.run([*command, "--directory", str(corpus / "shards" / split)], check=True, capture_output=True)
    return corpus


def manifest(workplace: Workplace, *, every_steps: int, samples: int = 0) -> dict[str, Any]:
    """The example's FinetuneJob, with an evaluation interval and number of samples (0: all).

    Its own volume is deleted with it, so that a second try of a test finds no data and no trained model there.
    """
    job: dict[str, Any] = yaml.safe_load(JOB_FILE.read_text())
    cluster = workplace.cluster
    job["metadata"]["namespace"] = workplace.kubectl.namespace
    spec = job["spec"]
    spec["training"]["evaluation"] |= {"everySteps": every_steps, "samples": samples}
    spec["storage"] = {"size": "1Gi", "storageClassName": cluster.storage_class, "retain": False}
    spec["cluster"] = {"image": cluster.image} | ({} if cluster.machine else {"provider": "none"})
    spec["head"] = {"resources": SMALL}
    spec["workers"] |= {"resources": SMALL}
    spec["cleanup"] = {"after": "5s"}
    return job
