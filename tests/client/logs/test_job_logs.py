"""Filtering of repeated log lines, and the choice of the head pod to read from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spotune_client.cluster.volume_pod import PodFailedError
from spotune_client.logs.job_logs import NewLines, followed_lines, serving_head
from tests.client.support.streaming_server import Stream, streaming_cluster
from tests.operator.support.objects import ago, condition, finetune_job, head_pod, pinned

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


def test_followed_lines_come_once_over_a_silent_connection(tmp_path: Path) -> None:
    head = "HTTP/1.1 200 OK\r\n\r\n"
    streams = iter(
        [Stream(f"{head}job: a\njob: b\njob: ha", end="silence"), Stream(f"{head}job: a\njob: b\njob: half\n")]
    )
    job: dict[str, Any] = finetune_job()

    def answer(path: str, _: dict[str, str]) -> Stream | str:
        if path.endswith("/portforward"):
            return next(streams)
        return json.dumps({"items": [head_pod()], "metadata": {}} if path.endswith("/pods") else job)

    with streaming_cluster(answer, tmp_path) as cluster:
        following = followed_lines(cluster, "t5-sql", None, lambda _: None, pause=lambda _: None)
        assert [next(following) for _ in range(3)] == ["job: a", "job: b", "job: half"]


def ended_job_without_a_head(pod: dict[str, Any], log: Callable[[], Stream]) -> Callable[..., Stream | str]:
    """The API server of a job whose lines a temporary pod reads; the pod has this status."""
    job = finetune_job(condition("Complete", "True", "Trained"), pinned=pinned()[1])

    def answer(path: str, _: dict[str, str]) -> Stream | str:
        if path.endswith("/log"):
            return log()
        name = path.rpartition("/pods")[2]
        return json.dumps(job if "finetunejobs" in path else {"status": pod} if name else {"items": []})

    return answer


def test_lines_of_an_ended_job_are_complete_if_the_connection_breaks(tmp_path: Path) -> None:
    lines = [f"2026-01-02T03:04:0{second}Z job: {second}\n" for second in (1, 2, 3)]
    streams = iter([Stream(lines[0], end="cut"), Stream("".join(lines))])
    running: dict[str, Any] = {"containerStatuses": [{"state": {"running": {}}}]}
    with streaming_cluster(ended_job_without_a_head(running, lambda: next(streams)), tmp_path) as cluster:
        following = followed_lines(cluster, "t5-sql", None, lambda _: None, pause=lambda _: None)
        assert list(following) == ["job: 1", "job: 2", "job: 3"]


def test_lines_of_an_ended_job_that_cannot_be_read_are_an_error(tmp_path: Path) -> None:
    failed = {"phase": "Failed", "reason": "Evicted"}
    with streaming_cluster(ended_job_without_a_head(failed, Stream), tmp_path) as cluster:
        following = followed_lines(cluster, "t5-sql", None, lambda _: None, pause=lambda _: None)
        with pytest.raises(PodFailedError, match="terminated with Evicted: it printed nothing"):
            list(following)
