"""The output of `spotune status` for jobs with the operator's status."""

import io
import re
from typing import Any

import pytest
from rich.console import Console, RenderableType

from spotune_client.cluster.conditions import notable_conditions
from spotune_operator.cli.status import panel, table, time_left
from tests.operator.support.objects import NOW, ago, condition, finetune_job, training_job


def rendered(renderable: RenderableType) -> list[str]:
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(renderable)
    return [line.rstrip() for line in console.export_text().splitlines()]


def shown(job: dict[str, Any]) -> dict[str, str]:
    """The rows of the panel by their label."""
    rows = (line.partition("  ") for line in rendered(panel(job, NOW)))
    return {label.strip(): content.strip() for label, _, content in rows}


def test_table_has_a_row_per_job() -> None:
    lines = rendered(table([training_job(), finetune_job(name="new")], NOW, with_namespace=False, with_bar=False))
    assert [re.split(" {2,}", line) for line in lines] == [
        ["NAME", "PHASE", "PROGRESS", "LOSS", "ETA", "WORKERS", "RESTARTS", "CHECKPOINT", "AGE"],
        ["t5-sql", "Training", "1240/4800 (26%)", "1.2346", "2 h 05 min", "4/4", "3", "step 1200", "1 h 00 min"],
        ["new", "New", "-", "-", "-", "-", "0", "-", "1 h 00 min"],
    ]


def test_a_job_that_has_ended_has_no_workers() -> None:
    completed = finetune_job(condition("Complete", "True", "Trained"), phase="Complete", workers="0/4")
    line = rendered(table([completed], NOW, with_namespace=False, with_bar=False))[1]
    assert "0/4" not in line


def test_table_of_all_namespaces_names_them() -> None:
    header, row = rendered(table([training_job()], NOW, with_namespace=True, with_bar=True))
    assert header.startswith("NAMESPACE  NAME")
    assert row.startswith("team       t5-sql")
    assert "━" in row


def test_problems_are_listed_below_the_table() -> None:
    stalled = finetune_job(condition("Stalled", "True", "ErrImagePull", "no such image"), name="stuck")
    lines = rendered(table([training_job(), stalled], NOW, with_namespace=False, with_bar=False))
    assert lines[-1] == "stuck: Stalled: ErrImagePull: no such image"
    assert len(lines) == 4


def test_a_problem_that_refers_to_another_condition_is_listed_with_its_cause() -> None:
    stalled = finetune_job(
        condition("Stalled", "True", "PreflightFailed", "preflight check model failed; see condition PreflightPassed"),
        condition("PreflightPassed", "False", "Failed", "/models/t5 does not exist"),
        condition("NotProgressing", "True", "Stuck", "no progress for 30 min; see condition PreflightPassed"),
        name="stuck",
    )
    lines = rendered(table([stalled], NOW, with_namespace=False, with_bar=False))
    assert len(lines) == 3
    assert lines[-1] == "stuck: Stalled: PreflightFailed: preflight check model failed; /models/t5 does not exist"


NO_NODES = "0/3 nodes are available: 3 Insufficient cpu"


@pytest.mark.parametrize(
    ("conditions", "line"),
    [
        (
            [("ClusterReady", "False", "ErrImagePull", "no image"), ("Stalled", "True", "ErrImagePull", "no image")],
            "Stalled: ErrImagePull: no image",
        ),
        ([("ClusterReady", "False", "Unschedulable", NO_NODES)], f"not ClusterReady: Unschedulable: {NO_NODES}"),
        (
            [("ClusterReady", "True", "Running", f"3 of 4 workers run; {NO_NODES}")],
            f"ClusterReady: Running: 3 of 4 workers run; {NO_NODES}",
        ),
        (
            [("ClusterReady", "False", "Queued", "the job waits for quota in queue team")],
            "not ClusterReady: Queued: the job waits for quota in queue team",
        ),
        (
            [
                ("ClusterReady", "False", "Unschedulable", NO_NODES),
                ("NotProgressing", "True", "Unschedulable", f"no progress since noon: {NO_NODES}"),
            ],
            f"NotProgressing: Unschedulable: no progress since noon: {NO_NODES}",
        ),
        (
            [("Stalled", "True", "Failed", "no column sql"), ("Failed", "True", "JobError", "no column sql")],
            "Failed: JobError: no column sql",
        ),
        ([("ClusterReady", "False", "HeadPending", "the head pod is starting")], ""),
        ([("ClusterReady", "True", "Running", "3 of 4 workers run, waiting for 1 more")], ""),
        ([("ClusterReady", "True", "Running", "4 of 4 workers run")], ""),
        ([("Complete", "True", "Trained"), ("ClusterReady", "False", "Unschedulable", NO_NODES)], ""),
    ],
    ids=lambda value: value[0][2] if isinstance(value, list) else "",
)
def test_each_job_that_is_stalled_or_lacks_pods_has_one_line(conditions: list[tuple[str, ...]], line: str) -> None:
    job = finetune_job(*(condition(*each) for each in conditions), name="job")
    rows = rendered(table([job, training_job()], NOW, with_namespace=False, with_bar=False))
    assert rows[3:] == ([f"job: {line}"] if line else [])


def test_panel_shows_all_details_of_a_job() -> None:
    rows = shown(training_job())
    assert rows["t5-sql"] == "Training"
    assert rows["progress"].endswith("step 1240/4800")
    assert rows[""] == "epoch 0.78, loss 1.2346, 12,346 tokens/s, MFU 41%, 2 h 05 min left"
    assert rows["evaluation"] == "loss 1.5000, exact match 25.0%"
    assert rows["workers"] == "4/4"
    assert rows["checkpoint"] == "step 1200, 1 min 05 s ago"
    assert rows["restarts"] == "3 (workerLost 2, hang 1)"
    assert rows["steps lost"] == "37"
    assert rows["goodput"] == "93%"
    assert rows["GPU time"] == "1 d 01 h on spot, 10 min 00 s on demand"
    assert rows["generation"] == "3, from step 900"


def test_panel_of_a_new_job_has_no_empty_rows() -> None:
    job = finetune_job()
    del job["status"]
    rows = shown(job)
    assert rows == {
        "t5-sql": "New",
        "progress": "step 0",
        "checkpoint": "none yet",
        "restarts": "0",
        "age": "1 h 00 min",
    }


def test_panel_of_a_completed_job_shows_the_models_location() -> None:
    where = "pvc://spotune-t5-sql/team/t5-sql-0123abcd/export"
    done = condition("Complete", "True", "Trained", "the model is trained and exported")
    rows = shown(finetune_job(done, condition("Training", "False", "NotRunning"), phase="Complete", output=where))
    assert rows["model"] == where
    assert rows["Complete"] == "Trained: the model is trained and exported (1 min 00 s)"
    assert "not Training" not in rows


def test_a_job_being_deleted_has_the_phase_deleting() -> None:
    job = training_job()
    job["metadata"]["deletionTimestamp"] = ago(1)
    assert shown(job)["t5-sql"] == "Deleting"


@pytest.mark.parametrize(
    ("conditions", "names"),
    [
        ([("Ready", "False"), ("Reconciling", "True"), ("Training", "False")], ["Training"]),
        ([("Complete", "False"), ("Failed", "False"), ("Suspended", "False"), ("Stalled", "False")], []),
        ([("Suspended", "Unknown"), ("ClusterReady", "False")], ["Suspended", "ClusterReady"]),
        ([("Suspended", "True"), ("ClusterReady", "False"), ("Training", "False")], ["Suspended"]),
        ([("StorageReady", "Unknown"), ("CheckpointHealthy", "Unknown")], ["StorageReady"]),
        ([("CheckpointHealthy", "False"), ("NotProgressing", "True")], ["CheckpointHealthy", "NotProgressing"]),
        ([("SomethingNew", "False")], ["SomethingNew"]),
    ],
)
def test_only_notable_conditions_are_shown(conditions: list[tuple[str, str]], names: list[str]) -> None:
    job = finetune_job(*(condition(*found, message=found[0]) for found in conditions))
    assert [found["type"] for found in notable_conditions(job)] == names


def test_conditions_with_equal_messages_are_shown_once() -> None:
    words = "the data has no column sql"
    job = finetune_job(condition("Stalled", "True", "Failed", words), condition("Failed", "True", "JobError", words))
    assert [found["type"] for found in notable_conditions(job)] == ["Failed"]


def test_cluster_ready_is_shown_with_fewer_workers_than_desired() -> None:
    ready = condition("ClusterReady", "True", "Running", "3 of 4 workers run; 0/3 nodes are available")
    assert [found["message"] for found in notable_conditions(training_job(ready, workers="3/4"))] == [ready["message"]]
    assert notable_conditions(training_job(ready, workers="4/4")) == []


def test_an_expected_end_in_the_past_is_zero_seconds_away() -> None:
    assert time_left({"eta": ago(30)}, NOW) == "0 s"
    assert time_left({}, NOW) == ""


def test_pools_and_money_are_shown() -> None:
    job = training_job()
    job["status"]["pools"] = [
        {
            "name": "cheap",
            "running": 0,
            "pending": 1,
            "price": "0.50 USD",
            "refusals": 2,
            "refusedAt": ago(90),
            "retryAt": ago(-150),
        },
        {"name": "dear", "running": 2},
    ]
    job["status"]["cost"] = {"spent": 1.234, "saved": 2.5, "currency": "USD", "source": "list", "date": "2026-11-01"}
    lines = "\n".join(rendered(panel(job, NOW)))
    assert "1.23 USD spent, 2.50 USD saved against on demand (list, 2026-11-01)" in lines
    assert "cheap: 0 running, 1 pending, 0.50 USD per node and hour, refused 2 times, last 1 min 30 s ago" in lines
    assert "tried again in 2 min 30 s" in lines
    assert "dear: 2 running" in lines
    job["status"]["cost"] = {"unpricedNodeSeconds": 5, "unknown": "no price for node n"}
    assert shown(job)["cost"] == "no price for node n"
