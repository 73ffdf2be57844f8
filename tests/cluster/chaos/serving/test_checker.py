"""The checker of the service accepts a correct run, and reports every kind of violation that is planted in one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from spotune_testcluster.errors import ClusterError
from tests.cluster.chaos.service_faults import REPLICAS_OF_A_STRANGER
from tests.cluster.chaos.serving.checker import ServiceEvidence, service_findings
from tests.cluster.chaos.serving.stream_client import Answer
from tests.cluster.chaos.serving.streams import texts_by_number
from tests.cluster.status_history import ObservedJob

TEXTS = ["1 2 3 4", "5 6 7 8"]
BEGAN, LOST, BACK, DONE = 1000, 1100, 1200, 1300
"""Both replicas are lost between two of the times, and requests wait for them."""


def answer(begun: int, ended: int, **values: Any) -> Answer:
    """The answer to a request during which text arrived in every second but those without replicas."""
    number = begun % len(TEXTS)
    heard = [second for second in range(begun, ended) if not LOST <= second < BACK]
    given: dict[str, Any] = {"number": number, "begun": begun, "ended": ended, "text": TEXTS[number], "heard": heard}
    return Answer(**{**given, **values})


def answers() -> list[Answer]:
    """One after the other; one waits for the replicas, another one is refused at first."""
    whole = [answer(begun, begun + 3) for begun in (*range(BEGAN, LOST - 3, 3), *range(BACK + 1, DONE, 3))]
    return [*whole, answer(LOST - 1, BACK + 1), answer(LOST + 50, BACK + 3, refused=9)]


def status(at: float, ready: str, replicas: int = 2) -> ObservedJob:
    conditions = [{"type": "Ready", "status": ready}]
    return ObservedJob(at, {"status": {"conditions": conditions, "readyReplicas": replicas}})


def run() -> ServiceEvidence:
    """The status is 20 s old when it says the loss, and 10 s when it says the end of it."""
    statuses = [
        status(BEGAN - 50, "True"),
        status(LOST + 20, "False", 0),
        status(BACK + 10, "True"),
        status(DONE, "True"),
    ]
    return ServiceEvidence("", answers(), TEXTS, statuses, ())


def with_answers(*more: Answer) -> ServiceEvidence:
    return replace(run(), answers=[*answers(), *more])


def test_correct_run_has_no_findings() -> None:
    assert service_findings(run()) == []


@pytest.mark.parametrize(
    ("evidence", "message"),
    [
        (replace(run(), problem="the clients have not ended"), "the clients have not ended"),
        (replace(run(), answers=[], statuses=[]), "no request was answered"),
        (with_answers(answer(BEGAN, BEGAN + 3, error="peer closed")), "1 of 69 requests failed, the first one with"),
        (with_answers(answer(BEGAN, BEGAN + 3, text="1 2 2 3 4")), "another text; prompt 0 from character 4"),
        (with_answers(answer(BEGAN, BEGAN + 3, text="1 2 3")), "another text; prompt 0 from character 5"),
        (with_answers(answer(BEGAN, BEGAN + 3, text=TEXTS[1])), "another text; prompt 0 from character 0"),
        (
            replace(run(), statuses=[status(BEGAN, "True"), status(LOST + 50, "False"), *run().statuses[2:]]),
            "said Ready, but no text arrived for 51 s from 1100 on",
        ),
        (replace(run(), statuses=[status(BEGAN, "True"), status(DONE, "True")]), "said Ready, but no text arrived"),
        (
            replace(run(), statuses=[*run().statuses[:2], status(BACK + 60, "True"), status(DONE, "True")]),
            "did not say Ready, but requests were answered",
        ),
        (
            replace(
                run(),
                statuses=[*run().statuses[:3], status(DONE - 60, "True", REPLICAS_OF_A_STRANGER), status(DONE, "True")],
            ),
            "kept what a stranger wrote",
        ),
    ],
)
def test_violation_is_found(evidence: ServiceEvidence, message: str) -> None:
    found = service_findings(evidence)
    assert any(message in finding for finding in found), found


def test_operator_that_does_not_run_is_excused() -> None:
    late = replace(run(), statuses=[status(BEGAN, "True"), status(LOST + 50, "False"), *run().statuses[2:]])
    assert service_findings(replace(late, operator_downtime=[(LOST - 10.0, LOST + 30.0)])) == []


def test_status_of_a_stranger_may_be_seen_for_a_short_time() -> None:
    patched = [*run().statuses[:3], status(DONE - 60, "True", REPLICAS_OF_A_STRANGER), status(DONE - 50, "True")]
    assert service_findings(replace(run(), statuses=[*patched, status(DONE, "True")])) == []


def test_undisturbed_answers_must_agree() -> None:
    whole = [answer(0, 3), answer(1, 4), answer(2, 5)]
    assert texts_by_number(whole) == TEXTS
    with pytest.raises(ClusterError, match="prompt 0 differ"):
        texts_by_number([*whole, answer(4, 7, text="1 2")])
    with pytest.raises(ClusterError, match="peer closed"):
        texts_by_number([*whole, answer(4, 7, error="peer closed")])
