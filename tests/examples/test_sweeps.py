"""Every FinetuneSweep in examples/ is valid and in the table, and the function of its trials trains."""

from __future__ import annotations

from pathlib import Path

import pytest

from spotune.job import FinetuneJob
from spotune.job_file.load import load_sweep, replace_fields
from spotune.job_file.trials import trial_job
from spotune_operator.sweeps.search import suggest
from spotune_trainer import files
from spotune_trainer.job_directory.layout import JobDirectory
from tests.examples.jobs import EXAMPLES, SWEEP_FILES
from tests.trainer.training_functions.ranks import run_generation


@pytest.mark.parametrize("file", SWEEP_FILES, ids=lambda file: file.parent.name)
def test_every_sweep_is_in_the_table(file: Path) -> None:
    assert f"[{load_sweep(file).metadata.name}]({file.relative_to(EXAMPLES)})" in (EXAMPLES / "README.md").read_text()


@pytest.mark.slow
def test_a_trial_trains_and_reports_the_objective(tmp_path: Path) -> None:
    (file,) = SWEEP_FILES
    sweep = load_sweep(file)
    content, problems = trial_job(sweep, 3, suggest(sweep.spec, 3, []))
    assert problems == []
    changes = {"spec.training.code": str(EXAMPLES / "own-function"), "spec.training.config.epochs": 3}
    job = replace_fields(FinetuneJob.model_validate(content), changes)
    directory = JobDirectory(tmp_path / "run")
    task, _ = run_generation(directory, job, world_size=1)
    progress = files.read_json(task.logs.progress)
    assert progress is not None
    assert progress["step"] == 3
    assert isinstance(progress[sweep.spec.objective.metric], float)
    assert (directory.export / "state.pt").exists()
