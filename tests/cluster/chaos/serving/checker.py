"""The checker of the service: judges every request, and every second of the service's status. Pure.

The promise:
- no request fails. A request that is refused before its first text may be sent again; one that has text comes to its
  end;
- every answer has the text of an undisturbed one, character by character;
- the status is Ready only while requests are answered, and not Ready only while they are not;
- what a stranger writes into the status is replaced.

A status may be 30 s old, and longer while the operator does not run or sees nothing.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.cluster.chaos.seconds import wrong_for_too_long
from tests.cluster.chaos.service_faults import REPLICAS_OF_A_STRANGER
from tests.cluster.chaos.serving.stream_client import Answer
from tests.cluster.faults.status_invariants import Times
from tests.cluster.status_history import ObservedJob

SILENT_SECONDS = 10.0
"""Without any text for longer, the service does not answer: streams wait for a replica."""


@dataclass(frozen=True)
class ServiceEvidence:
    """Everything that the checker needs about the service during one run.

    Attributes:
        problem: why it did not come to its end; empty if it did.
        answers: all requests.
        undisturbed: the text of each prompt without a fault.
        statuses: all observed statuses, oldest first.
        operator_downtime: the times in which the operator did not run, or could not see anything.
    """

    problem: str
    answers: Sequence[Answer]
    undisturbed: Sequence[str]
    statuses: Sequence[ObservedJob]
    operator_downtime: Times

    @property
    def failed(self) -> list[Answer]:
        """Requests that ended with an error, or without their end."""
        return [answer for answer in self.answers if answer.error]

    @property
    def other_text(self) -> list[Answer]:
        """Answers whose text differs from the undisturbed one."""
        return [each for each in self.answers if not each.error and each.text != self.undisturbed[each.number]]


def service_findings(evidence: ServiceEvidence) -> list[str]:
    """Return a message per violation of the promise; empty if the service passed."""
    checks = (_end, _failed, _other_text, _ready, _stranger)
    return [finding for check in checks for finding in check(evidence)]


def _end(evidence: ServiceEvidence) -> Iterator[str]:
    if evidence.problem:
        yield evidence.problem
    if not any(not answer.error for answer in evidence.answers):
        yield "no request was answered"


def _failed(evidence: ServiceEvidence) -> Iterator[str]:
    if failed := evidence.failed:
        first = failed[0]
        about = f"prompt {first.number}, begun {first.begun:.1f}, ended {first.ended:.1f}: {first.error}"
        yield f"{len(failed)} of {len(evidence.answers)} requests failed, the first one with {about}"


def _other_text(evidence: ServiceEvidence) -> Iterator[str]:
    if wrong := evidence.other_text:
        found, right = wrong[0].text, evidence.undisturbed[wrong[0].number]
        pairs = enumerate(zip(found, right, strict=False))
        at = next((at for at, (one, other) in pairs if one != other), min(len(found), len(right)))
        part = f"{found[at : at + 40]!r} in place of {right[at : at + 40]!r}"
        yield f"{len(wrong)} answers have another text; prompt {wrong[0].number} from character {at} on: {part}"


def _ready(evidence: ServiceEvidence) -> Iterator[str]:
    """Compares the status of every second in which clients asked with whether text arrived."""
    heard = sorted({second for answer in evidence.answers for second in answer.heard})
    begin = min((answer.begun for answer in evidence.answers), default=0.0)
    end = max((answer.ended for answer in evidence.answers), default=0.0)

    def claims_answers(second: float, status: ObservedJob) -> bool:
        return begin <= second <= end and status.holds("Ready") and _silence(heard, second) > SILENT_SECONDS

    def denies_answers(second: float, status: ObservedJob) -> bool:
        return begin <= second <= end and not status.holds("Ready") and _silence(heard, second) <= SILENT_SECONDS

    reported = [each for each in evidence.statuses if each.status.get("conditions")]
    downtime = evidence.operator_downtime
    yield from wrong_for_too_long(reported, claims_answers, downtime, "said Ready, but no text arrived")
    yield from wrong_for_too_long(reported, denies_answers, downtime, "did not say Ready, but requests were answered")


def _silence(heard: Sequence[int], second: float) -> float:
    """Seconds between the last text before a second and the first one after it."""
    after = bisect_left(heard, second)
    if after == len(heard) or heard[after] == second:
        return 0.0
    return heard[after] - heard[after - 1] if after else 0.0


def _stranger(evidence: ServiceEvidence) -> Iterator[str]:
    yield from wrong_for_too_long(
        evidence.statuses,
        lambda _second, status: status.status.get("readyReplicas") == REPLICAS_OF_A_STRANGER,
        evidence.operator_downtime,
        "kept what a stranger wrote",
    )
