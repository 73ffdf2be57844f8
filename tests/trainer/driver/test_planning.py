"""The plan of a first start: compiled layers only where torch.compile can work."""

from __future__ import annotations

from typing import Any

import pytest

from spotune.errors import JobError
from spotune_trainer.driver import planning
from spotune_trainer.driver.planning import plan_run
from spotune_trainer.job_directory.run_plan import RunPlan
from tests.trainer.support.runs import Runs

GB = 10**9
PACKED = {"packing": True, "maxLength": 64}


def planned(runs: Runs, **execution: Any) -> RunPlan:
    """The plan of a job with packed rows on GPUs."""
    job = runs.job("causal", dataset=PACKED, workers={"gpus": 1}, execution=execution)
    return plan_run(job, runs.empty("planned"), None, lambda: 80 * GB)


def test_packed_rows_on_gpus_are_compiled_and_the_plan_says_so(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "why_not", lambda *, on_gpus: None)
    plan = planned(runs)
    assert plan.compile
    assert plan.reason.endswith("layers compiled")


def test_without_a_compiler_they_are_not(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    plan = planned(runs)
    assert not plan.compile
    assert plan.requested["compile"] == "auto"


def test_who_insists_is_told_what_is_missing(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match=r"execution\.compile: torch\.compile needs a compiler \(gcc\)"):
        planned(runs, compile=True)
