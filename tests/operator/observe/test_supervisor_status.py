"""Valid, partly valid and invalid responses of supervisors, and their freshness."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotune.job import RestartsStatus
from spotune.job.training.evaluation import MAX_HARNESS_TASKS
from spotune_operator.observe.supervisor_status import Freshness, PollResult, ProgressResponse, parse_progress
from tests.operator.support.malformed_responses import answers
from tests.operator.support.scenarios import Scenario, new_scenario, training_scenario


def test_complete_response_is_parsed() -> None:
    progress = parse_progress(
        {
            "phase": "Training",
            "heartbeat": 77,
            "step": 30,
            "totalSteps": 100,
            "loss": 1,
            "etaSeconds": 70.5,
            "lastCheckpoint": {"step": 20, "time": 1.8e9, "bytes": 12},
            "restarts": {"workerLost": 2, "hang": 1},
            "supervisor": {
                "job": "ab12",
                "state": "running",
                "message": "",
                "preflight": {"passed": True, "checks": [{"name": "data", "status": "passed", "message": "3 shards"}]},
            },
        }
    )
    assert (progress.phase, progress.step, progress.total_steps, progress.loss, progress.eta_seconds) == (
        "Training",
        30,
        100,
        1.0,
        70.5,
    )
    assert progress.last_checkpoint is not None
    assert (progress.last_checkpoint.step, progress.last_checkpoint.time) == (20, 1.8e9)
    assert (progress.restarts.worker_lost, progress.restarts.hang, progress.restarts.head_lost) == (2, 1, None)
    assert (progress.supervisor.job, progress.supervisor.state, progress.supervisor.preflight.passed) == (
        "ab12",
        "running",
        True,
    )
    assert [check.name for check in progress.supervisor.preflight.checks] == ["data"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1),
        ("step", 3.5),
        ("step", "30"),
        ("step", True),
        ("step", 10**30),
        ("totalSteps", None),
        ("loss", math.nan),
        ("loss", math.inf),
        ("loss", 10**400),
        ("loss", [1.0]),
        ("goodput", -0.5),
        ("goodput", 93.0),
        ("evalScores", [0.5]),
        ("evalScores", {"exactMatch": math.nan}),
        ("best", {"step": 20, "metric": "loss", "value": math.nan}),
        ("best", {"step": 20}),
        ("stoppedEarly", True),
        ("phase", 7),
        ("phase", "no reason: of a condition"),
        ("phase", "A" * 65),
        ("message", {"text": "x"}),
        ("etaSeconds", 1e300),
        ("lastCheckpoint", {"step": 20}),
        ("lastCheckpoint", {"step": 20, "time": 1e18}),
        ("lastCheckpoint", {"step": 20, "time": -1}),
        ("lastCheckpoint", "newest"),
        ("restarts", [1, 2]),
        ("restarts", {"workerLost": -2}),
        ("supervisor", "running"),
        ("supervisor", {"state": "dancing"}),
        ("supervisor", {"preflight": {"passed": "yes", "checks": "all"}}),
    ],
)
def test_invalid_field_gets_its_default_and_the_others_stay(name: str, value: Any) -> None:
    right = {"generation": 4, "evalLoss": 0.5}
    assert parse_progress({**right, name: value}) == parse_progress(right)


def test_invalid_check_does_not_hide_the_others() -> None:
    checks = [3, None, {"name": 4, "status": "failed", "message": "no space"}, {"name": "data", "status": "perhaps"}]
    found = parse_progress({"supervisor": {"preflight": {"checks": checks}}}).supervisor.preflight.checks
    assert [(check.name, check.status, check.message) for check in found] == [
        ("", "failed", "no space"),
        ("data", "", ""),
    ]


def test_skipped_check_is_parsed() -> None:
    checks = [{"name": "data", "status": "skipped", "message": "needs the model"}]
    (found,) = parse_progress({"supervisor": {"preflight": {"checks": checks}}}).supervisor.preflight.checks
    assert (found.name, found.status, found.message) == ("data", "skipped", "needs the model")


def test_scores_are_limited_to_numbers_by_name() -> None:
    progress = parse_progress(
        {"evalScores": {"exactMatch": 0.5, "bleu": 41, "a b": 1.0, "x" * 101: 1.0, "chrf": "high"}}
    )
    assert progress.eval_scores == {"exactMatch": 0.5, "bleu": 41.0}
    harness = {"colours/acc": 0.5, "gsm8k/exact_match/strict-match": 0.25, "mmlu_v1.1/acc": 1.0}
    harness |= {"20_newsgroups/acc": 0.75, "humaneval/pass@1/create_test": 0.125}
    assert parse_progress({"evalScores": harness}).eval_scores == harness
    many = parse_progress({"evalScores": {f"metric{number}": 0.5 for number in range(600)}})
    assert len(many.eval_scores or {}) == 512


def test_the_scores_of_as_many_tasks_as_a_job_may_have_are_kept() -> None:
    scores = {
        f"task{number}/{metric}/{answers}": 0.5
        for number in range(MAX_HARNESS_TASKS)
        for metric in ("acc", "exact_match")
        for answers in ("strict-match", "flexible-extract")
    }
    assert parse_progress({"evalScores": {"exactMatch": 0.5} | scores}).eval_scores == {"exactMatch": 0.5} | scores


def test_scores_stay_in_the_status_until_new_ones_arrive() -> None:
    scenario = training_scenario()
    scenario.trains(step=20, evalStep=10, evalScores={"exactMatch": 0.123456789, "bleu": 41})
    scenario.decide()
    assert scenario.status.eval_scores == {"exactMatch": 0.12346, "bleu": 41.0}
    assert scenario.status.eval_step == 10
    scenario.trains(step=21, evalScores=None)
    scenario.decide()
    assert scenario.status.eval_scores == {"exactMatch": 0.12346, "bleu": 41.0}


def test_a_group_that_starts_again_from_the_beginning_resumes_from_step_0() -> None:
    scenario = training_scenario()
    resumed: list[int | None] = []
    for reported in (30, None, 0, None):
        scenario.trains(resumedFromStep=reported)
        scenario.decide()
        resumed.append(scenario.status.resumed_from_step)
    assert resumed == [30, 30, 0, 0]


def test_text_is_limited_and_valid_utf8() -> None:
    progress = parse_progress({"message": "half a pair: \ud800, and " + "x" * 5000})
    assert progress.message.encode() == progress.message.encode("utf-8", "replace")
    assert len(progress.message) == 2000


def test_passage_of_time_alone_is_no_change() -> None:
    before = parse_progress({"step": 3, "etaSeconds": 9.0, "heartbeat": 1, "goodput": 0.93})
    later = {"step": 3, "etaSeconds": 8.0, "heartbeat": 2, "goodput": 0.92, "ageSeconds": 0.3, "silentSeconds": 3}
    assert before.same_progress(parse_progress(later))
    assert before.same_progress(parse_progress(later | {"supervisorSeconds": 70.0}))
    assert not before.same_progress(parse_progress(later | {"supervisorSeconds": 0.2})), "the status is older"
    assert not before.same_progress(parse_progress({"step": 4, "etaSeconds": 9.0}))


def test_progress_is_empty_before_the_first_response() -> None:
    assert PollResult().progress == ProgressResponse()
    assert PollResult().response is None


def test_missing_restart_counts_keep_their_values() -> None:
    scenario = training_scenario()
    scenario.trains(step=20, restarts={"workerLost": 2, "hang": 1})
    scenario.decide()
    scenario.trains(step=21, restarts={"workerLost": "many", "hang": 2})
    scenario.decide()
    assert scenario.status.restarts == RestartsStatus(total=4, worker_lost=2, hang=2)


def test_failed_job_stays_failed_while_its_supervisor_has_not_read_the_job_file_yet() -> None:
    scenario = training_scenario()
    scenario.supervisor_reports("Failed", "failed", why="spec.dataset.prompt: no column 'question'")
    scenario.decide()
    scenario.observe(
        poll=PollResult(
            parse_progress({"phase": "Starting", "supervisor": {"job": "", "state": "waiting"}}), scenario.now
        )
    )
    scenario.decide()
    assert scenario.condition("Failed").message == "spec.dataset.prompt: no column 'question'"


@pytest.fixture(scope="module")
def lives() -> list[Scenario]:
    with_head = new_scenario()
    with_head.has_children()
    with_head.has_pods()
    return [new_scenario(), with_head, training_scenario()]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(answers(), st.integers(0, 2))
def test_no_response_breaks_a_reconcile_or_a_status(lives: list[Scenario], answer: dict[str, Any], stage: int) -> None:
    scenario = replace(lives[stage])
    scenario.observe(poll=PollResult(parse_progress(answer), scenario.now))
    first = scenario.decide(after=1)
    text = json.dumps(first.status.model_dump(mode="json", exclude_none=True), allow_nan=False)
    assert type(first.status).model_validate_json(text) == first.status, "the status round-trips"
    assert scenario.decide().status == first.status, "a second reconcile changes nothing"
    reasons = [condition.reason for condition in first.status.conditions]
    assert all(reason.isascii() and reason.isalpha() and len(reason) <= 64 for reason in reasons)


@pytest.mark.parametrize(
    ("response", "failing_since", "expected"),
    [
        (None, None, Freshness.NO_RESPONSE),
        (None, 90.0, Freshness.NO_RESPONSE),
        (None, 70.0, Freshness.UNREACHABLE),
        ({"phase": "Training", "ageSeconds": 60.0}, 70.0, Freshness.UNREACHABLE),
        ({"phase": "Training", "ageSeconds": 60.0}, 90.0, Freshness.DRIVER_SILENT),
        ({"phase": "Training", "ageSeconds": 60.0, "silentSeconds": 60.0}, None, Freshness.DRIVER_SILENT),
        ({"phase": "Exporting", "ageSeconds": 60.0}, None, Freshness.DRIVER_SILENT),
        ({"phase": "Loading", "ageSeconds": 60.0}, None, Freshness.FRESH),
        (
            {"phase": "Training", "silentSeconds": 16.0, "supervisor": {"state": "waiting"}},
            None,
            Freshness.RANKS_SILENT,
        ),
        ({"phase": "Training", "silentSeconds": 5.0}, None, Freshness.FRESH),
        ({"phase": "Training", "silentSeconds": 5.0, "heartbeatSeconds": 0.2}, None, Freshness.RANKS_SILENT),
        ({"phase": "Training", "silentSeconds": 3.9, "heartbeatSeconds": 0.2}, None, Freshness.FRESH),
        ({"phase": "Training", "silentSeconds": 40.0, "heartbeatSeconds": 20.0}, None, Freshness.FRESH),
        ({"phase": "Training", "silentSeconds": 43.0, "heartbeatSeconds": 20.0}, None, Freshness.RANKS_SILENT),
        ({"phase": "Exporting", "silentSeconds": 60.0}, None, Freshness.FRESH),
        ({"phase": "Training", "supervisor": {"state": "waiting"}}, None, Freshness.REPEATED),
        ({"phase": "Training", "supervisor": {"state": "preflight"}}, None, Freshness.REPEATED),
        ({"phase": "Training", "adopting": True, "supervisor": {"state": "waiting"}}, None, Freshness.FRESH),
        ({"phase": "Starting", "supervisor": {"state": "preflight"}}, None, Freshness.FRESH),
        ({"phase": "Training", "supervisor": {"state": "running"}}, None, Freshness.FRESH),
        ({"phase": "Training", "ageSeconds": 16.0, "supervisorSeconds": 2.0}, None, Freshness.DRIVER_SILENT),
        ({"phase": "Training", "ageSeconds": 0.4, "supervisorSeconds": 2.0}, None, Freshness.FRESH),
        ({"phase": "Loading", "ageSeconds": 16.0, "supervisorSeconds": 2.0}, None, Freshness.FRESH),
        (
            {"phase": "Training", "ageSeconds": 16.0, "supervisorSeconds": 2.0, "supervisor": {"state": "preflight"}},
            None,
            Freshness.REPEATED,
        ),
    ],
)
def test_freshness_follows_the_table(
    response: dict[str, Any] | None, failing_since: float | None, expected: Freshness
) -> None:
    poll = PollResult(parse_progress(response) if response is not None else None, 50.0, failing_since)
    assert poll.freshness(now=100.0, unreachable_seconds=30.0) is expected
