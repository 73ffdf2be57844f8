"""Filtering of repeated log lines, and the choice of the head pod to read from."""

from spotune_client.logs.job_logs import NewLines, serving_head
from tests.operator.support.objects import ago, head_pod

FIRST = ["job: a", "driver-1: a", "gen-1/worker-0: a", "gen-1/worker-0: a"]


def test_repeated_lines_are_filtered_out() -> None:
    new_lines = NewLines()
    assert list(new_lines.filter(FIRST)) == FIRST
    assert list(new_lines.filter(FIRST)) == []
    assert new_lines.count == 4


def test_new_lines_are_determined_per_log() -> None:
    new_lines = NewLines()
    list(new_lines.filter(FIRST))
    later = ["job: a", "gen-1/worker-0: a", "gen-1/worker-0: a", "driver-1: a", "driver-1: a", "driver-2: a", "job: b"]
    assert list(new_lines.filter(later)) == ["driver-1: a", "driver-2: a", "job: b"]


def test_reading_continues_after_an_incomplete_response() -> None:
    new_lines = NewLines()
    assert list(new_lines.filter(FIRST[:2])) == FIRST[:2]
    assert list(new_lines.filter(FIRST[:1])) == []
    assert list(new_lines.filter(FIRST)) == FIRST[2:]


def test_lines_without_a_log_name_form_their_own_log() -> None:
    new_lines = NewLines()
    assert list(new_lines.filter(["", "text"])) == ["", "text"]
    assert list(new_lines.filter(["", "text", "text"])) == ["text"]


def test_serving_head_has_a_running_supervisor_and_is_not_being_deleted() -> None:
    assert serving_head([head_pod()]) == head_pod()
    going = head_pod()
    going["metadata"]["deletionTimestamp"] = ago(1)
    waiting = head_pod(containerStatuses=[{"name": "supervisor", "state": {"waiting": {}}}])
    ray_alone = head_pod(containerStatuses=[{"name": "ray-head", "state": {"running": {}}}])
    assert serving_head([going, waiting, ray_alone, head_pod("2")]) == head_pod("2")
    assert serving_head([going, waiting, ray_alone]) is None
    assert serving_head([]) is None
