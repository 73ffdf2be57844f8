"""Which events belong to a job, and how repeated events are merged."""

from typing import Any

import pytest

from spotune_operator.cli.events import EventSummary, plain_lines, summarize_events, table
from tests.operator.cli.test_status import rendered
from tests.operator.support.objects import NOW, UID, ago, finetune_job

LONG = "a-name-of-forty-characters-for-a-job-abc"


def event(kind: str = "FinetuneJob", name: str = "t5-sql", **fields: Any) -> dict[str, Any]:
    """A core/v1 Event as kubelets and controllers write it."""
    involved = {"kind": kind, "name": name, "namespace": "team", "uid": UID}
    times = {"firstTimestamp": ago(60), "lastTimestamp": ago(60), "eventTime": None, "count": 1}
    summarized = {"type": "Normal", "reason": "Ready", "message": "steps are made", "source": {"component": "spotune"}}
    metadata = {"name": f"{name}.1", "namespace": "team", "creationTimestamp": ago(60)}
    return {"metadata": metadata, "involvedObject": involved, **times, **summarized, **fields}


def summarized(*events: dict[str, Any], job: str = "t5-sql", pods: tuple[str, ...] = ()) -> list[EventSummary]:
    return summarize_events(events, finetune_job(name=job), pods)


def test_events_are_sorted_by_time() -> None:
    later, earlier = event(message="b", lastTimestamp=ago(5)), event(message="a", lastTimestamp=ago(50))
    assert [summaries.message for summaries in summarized(later, earlier)] == ["a", "b"]


@pytest.mark.parametrize(
    ("kind", "name", "belongs"),
    [
        ("RayCluster", "spotune-t5-sql", True),
        ("PersistentVolumeClaim", "spotune-t5-sql", True),
        ("Pod", "spotune-t5-sql-head-x7k2p", True),
        ("Pod", "spotune-t5-sql-workers-worker-x7k2p", True),
        ("Pod", "spotune-t5-sql-on-demand-worker-x7k2p", True),
        ("Pod", "named-otherwise", True),
        ("Pod", "spotune-t5-sql-2-head-x7k2p", False),
        ("Pod", "spotune-t5-sql-head-head-x7k2p", False),
        ("Pod", "spotune-t5-head-x7k2p", False),
        ("RayCluster", "t5-sql", False),
        ("Node", "n1", False),
    ],
)
def test_children_and_pods_belong_to_the_job_and_those_of_other_jobs_do_not(
    kind: str, name: str, belongs: bool
) -> None:
    assert bool(summarized(event(kind, name), pods=("named-otherwise",))) is belongs


def test_pod_names_truncated_by_kuberay_are_recognised() -> None:
    assert len(LONG) == 40
    worker = f"spotune-{LONG}-workers"[:50] + "-worker-x7k2p"
    assert summarized(event("Pod", worker), job=LONG)


def test_events_of_an_earlier_job_of_the_same_name_are_left_out() -> None:
    earlier = {"uid": "another", "kind": "FinetuneJob", "name": "t5-sql"}
    assert summarized(event(involvedObject=earlier)) == []
    assert (
        summarized(event("Pod", "spotune-t5-sql-head-x7k2p", firstTimestamp=ago(9000), lastTimestamp=ago(7200))) == []
    )


def test_repeated_events_are_merged() -> None:
    pod = ("Pod", "spotune-t5-sql-head-x7k2p")
    first = event(*pod, reason="BackOff", firstTimestamp=ago(600), lastTimestamp=ago(300), count=7)
    again = event(*pod, reason="BackOff", firstTimestamp=ago(200), lastTimestamp=ago(100), count=2)
    other = event(*pod, reason="BackOff", message="another")
    summaries = summarized(first, again, other)
    assert [(summary.count, summary.message) for summary in summaries] == [(9, "steps are made"), (1, "another")]
    assert (summaries[0].first, summaries[0].last) == (NOW - 600, NOW - 100)
    assert next(plain_lines(summaries)).endswith("BackOff: steps are made (9 times in 8 min 20 s)")


def test_events_with_a_series_are_counted() -> None:
    series = {"count": 12, "lastObservedTime": "2026-01-02T03:03:55.123456Z"}
    newer = event("Pod", "spotune-t5-sql-head-x7k2p", firstTimestamp=None, lastTimestamp=None, count=None)
    newer |= {"eventTime": "2026-01-02T03:03:00.654321Z", "series": series, "reason": "FailedScheduling"}
    [summaries] = summarized(newer)
    assert (summaries.count, round(summaries.last - summaries.first)) == (12, 54)


def test_lines_and_table_show_time_type_object_and_message() -> None:
    summaries = summarized(
        event("Pod", "spotune-t5-sql-head-x7k2p", type="Warning", reason="Failed", message="no\nsuch image"),
        event(firstTimestamp=ago(3000), lastTimestamp=ago(3000)),
    )
    printed = list(plain_lines(summaries))
    assert printed[0].endswith("  Normal  FinetuneJob t5-sql  Ready: steps are made")
    assert printed[1].endswith("  Warning  Pod spotune-t5-sql-head-x7k2p  Failed: no such image")
    rows = rendered(table(summaries))
    assert any("2026" in row for row in rows)
    assert rows[-1].endswith("Failed: no such image")


def test_json_has_rfc3339_times() -> None:
    [summaries] = summarized(event())
    assert summaries.as_json() == {
        "firstTime": ago(60),
        "lastTime": ago(60),
        "count": 1,
        "type": "Normal",
        "object": "FinetuneJob t5-sql",
        "reason": "Ready",
        "message": "steps are made",
    }
