"""The plan of a first start: layers are compiled only where torch.compile works."""

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


def test_plan_compiles_packed_rows_on_gpus_and_gives_the_reason(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planning, "missing_compiler", lambda *, on_gpus: None)
    plan = planned(runs)
    assert plan.compile
    assert plan.reason.endswith("layers compiled")


def test_plan_does_not_compile_without_a_compiler(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    plan = planned(runs)
    assert not plan.compile
    assert plan.requested["compile"] == "auto"


def test_requested_compilation_without_a_compiler_is_a_job_error(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(JobError, match=r"execution\.compile: torch\.compile needs a compiler \(gcc\)"):
        planned(runs, compile=True)
