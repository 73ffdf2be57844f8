"""Which log lines are new when all are told again, and which head is asked for them."""

from spotune_operator.cli.logs import Unread, serving_head
from tests.operator.support.objects import ago, head_pod

FIRST = ["job: a", "driver-1: a", "gen-1/worker-0: a", "gen-1/worker-0: a"]


def test_lines_told_again_are_not_read_again() -> None:
    unread = Unread()
    assert list(unread.of(FIRST)) == FIRST
    assert list(unread.of(FIRST)) == []
    assert unread.count == 4


def test_lines_are_new_by_their_place_in_their_own_log_whatever_their_order() -> None:
    unread = Unread()
    list(unread.of(FIRST))
    later = ["job: a", "gen-1/worker-0: a", "gen-1/worker-0: a", "driver-1: a", "driver-1: a", "driver-2: a", "job: b"]
    assert list(unread.of(later)) == ["driver-1: a", "driver-2: a", "job: b"]


def test_telling_that_breaks_off_is_gone_on_with() -> None:
    unread = Unread()
    assert list(unread.of(FIRST[:2])) == FIRST[:2]
    assert list(unread.of(FIRST[:1])) == []
    assert list(unread.of(FIRST)) == FIRST[2:]


def test_log_without_a_name_is_a_log_too() -> None:
    unread = Unread()
    assert list(unread.of(["", "text"])) == ["", "text"]
    assert list(unread.of(["", "text", "text"])) == ["text"]


def test_head_is_asked_while_its_supervisor_runs_and_it_is_to_stay() -> None:
    assert serving_head([head_pod()]) == head_pod()
    going = head_pod()
    going["metadata"]["deletionTimestamp"] = ago(1)
    waiting = head_pod(containerStatuses=[{"name": "supervisor", "state": {"waiting": {}}}])
    ray_alone = head_pod(containerStatuses=[{"name": "ray-head", "state": {"running": {}}}])
    assert serving_head([going, waiting, ray_alone, head_pod("2")]) == head_pod("2")
    assert serving_head([going, waiting, ray_alone]) is None
    assert serving_head([]) is None
