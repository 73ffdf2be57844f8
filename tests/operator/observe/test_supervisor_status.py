"""Answers of supervisors that are as they should be, half so, and nothing of the kind."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spotune.job import RestartsStatus
from spotune_operator.observe.supervisor_status import Reading, Said, understood
from tests.operator.support.malformed_responses import answers
from tests.operator.support.scenarios import Life, a_life, a_training_life


def test_an_answer_is_understood_in_full() -> None:
    said = understood(
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
    assert (said.phase, said.step, said.total_steps, said.loss, said.eta_seconds) == ("Training", 30, 100, 1.0, 70.5)
    assert said.last_checkpoint is not None
    assert (said.last_checkpoint.step, said.last_checkpoint.time) == (20, 1.8e9)
    assert (said.restarts.worker_lost, said.restarts.hang, said.restarts.head_lost) == (2, 1, None)
    assert (said.supervisor.job, said.supervisor.state, said.supervisor.preflight.passed) == ("ab12", "running", True)
    assert [check.name for check in said.supervisor.preflight.checks] == ["data"]


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
def test_a_wrong_field_counts_as_not_said_and_the_others_stay(name: str, value: Any) -> None:
    right = {"generation": 4, "evalLoss": 0.5}
    assert understood({**right, name: value}) == understood(right)


def test_a_wrong_check_does_not_hide_the_others() -> None:
    checks = [3, None, {"name": 4, "status": "failed", "message": "no space"}, {"name": "data", "status": "perhaps"}]
    found = understood({"supervisor": {"preflight": {"checks": checks}}}).supervisor.preflight.checks
    assert [(check.name, check.status, check.message) for check in found] == [
        ("", "failed", "no space"),
        ("data", "", ""),
    ]


def test_scores_are_numbers_by_name_and_not_too_many() -> None:
    said = understood({"evalScores": {"exactMatch": 0.5, "bleu": 41, "a b": 1.0, "x" * 101: 1.0, "chrf": "high"}})
    assert said.eval_scores == {"exactMatch": 0.5, "bleu": 41.0}
    many = understood({"evalScores": {f"metric{number}": 0.5 for number in range(60)}})
    assert len(many.eval_scores or {}) == 50


def test_scores_stay_in_the_status_until_others_are_said() -> None:
    life = a_training_life()
    life.trains(step=20, evalScores={"exactMatch": 0.123456789, "bleu": 41})
    life.decide()
    assert life.status.eval_scores == {"exactMatch": 0.12346, "bleu": 41.0}
    life.trains(step=21, evalScores=None)
    life.decide()
    assert life.status.eval_scores == {"exactMatch": 0.12346, "bleu": 41.0}


def test_text_comes_back_from_the_api_server_as_it_was_written() -> None:
    said = understood({"message": "half a pair: \ud800, and " + "x" * 5000})
    assert said.message.encode() == said.message.encode("utf-8", "replace")
    assert len(said.message) == 2000


def test_time_that_passes_alone_is_no_news() -> None:
    before = understood({"step": 3, "etaSeconds": 9.0, "heartbeat": 1, "goodput": 0.93})
    later = {"step": 3, "etaSeconds": 8.0, "heartbeat": 2, "goodput": 0.92, "ageSeconds": 0.3, "silentSeconds": 3}
    assert before.says_the_same(understood(later))
    assert not before.says_the_same(understood({"step": 4, "etaSeconds": 9.0}))


def test_nothing_is_said_before_the_first_answer() -> None:
    assert Reading().said == Said()
    assert Reading().answer is None


def test_restarts_that_are_not_said_do_not_go_back() -> None:
    life = a_training_life()
    life.trains(step=20, restarts={"workerLost": 2, "hang": 1})
    life.decide()
    life.trains(step=21, restarts={"workerLost": "many", "hang": 2})
    life.decide()
    assert life.status.restarts == RestartsStatus(total=4, worker_lost=2, hang=2)


def test_failed_job_stays_failed_while_its_supervisor_has_not_read_the_job_file_yet() -> None:
    life = a_training_life()
    life.supervisor_says("Failed", "failed", why="spec.dataset.prompt: no column 'question'")
    life.decide()
    life.see(
        reading=Reading(understood({"phase": "Starting", "supervisor": {"job": "", "state": "waiting"}}), life.now)
    )
    life.decide()
    assert life.condition("Failed").message == "spec.dataset.prompt: no column 'question'"


@pytest.fixture(scope="module")
def lives() -> list[Life]:
    with_head = a_life()
    with_head.has_children()
    with_head.has_pods()
    return [a_life(), with_head, a_training_life()]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(answers(), st.integers(0, 2))
def test_no_answer_breaks_a_pass_or_spoils_a_status(lives: list[Life], answer: dict[str, Any], stage: int) -> None:
    life = replace(lives[stage])
    life.see(reading=Reading(understood(answer), life.now))
    first = life.decide(after=1)
    text = json.dumps(first.status.model_dump(mode="json", exclude_none=True), allow_nan=False)
    assert type(first.status).model_validate_json(text) == first.status, "it is read back as it was written"
    assert life.decide().status == first.status, "and then there is nothing more to say"
    reasons = [condition.reason for condition in first.status.conditions]
    assert all(reason.isascii() and reason.isalpha() and len(reason) <= 64 for reason in reasons)
