"""`spotune simulate --deadline` and `spotune plan --trace`: the odds of a deadline on recorded markets."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command_line import run_spotune

JOB = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: t5}
spec:
  model: {source: "hf://google-t5/t5-small", task: seq2seq}
  dataset: {train: {source: shards}}
  training: {maxSteps: 1000, globalBatchSize: 96}
  workers: {count: 2, min: 2, capacity: spot-then-on-demand}
"""
TIMES = ("--step-seconds", "6", "--on-demand-start", "10m")


@pytest.fixture
def traces(tmp_path: Path) -> list[Path]:
    """Two zones that have nodes for half of the time, in turns of three hours."""
    hours = range(0, 24, 3)
    for name, first in (("a", 2), ("b", 0)):
        lines = [f"{3600 * hour},{first if hour % 6 == 0 else 2 - first}" for hour in hours]
        (tmp_path / f"{name}.csv").write_text("\n".join(("seconds,nodes", *lines, "86400,0")) + "\n")
    return [tmp_path / "a.csv", tmp_path / "b.csv"]


def test_policy_keeps_a_deadline_that_spot_alone_misses(capsys: pytest.CaptureFixture[str], traces: list[Path]) -> None:
    options = ("--workers", "2", "--steps", "1000", *TIMES, "--deadline", "150m", "--output", "json")
    prices = ("--spot-price", "1", "--on-demand-price", "3")
    code, out, err = run_spotune(capsys, "simulate", traces[0], *options, *prices)
    assert (code, err) == (0, "")
    found = json.loads(out)
    assert (found["workSeconds"], found["deadlineSeconds"]) == (6000.0, 9000.0)
    rows = {row["capacity"]: row for row in found["odds"]}
    assert [rows[name]["met"] for name in ("spot-then-on-demand", "on-demand")] == [48, 48]
    assert rows["spot"]["met"] < 30
    assert rows["on-demand"]["meanCost"] == round(2 * 3 * (6000 + 600) / 3600, 4)
    assert rows["spot"]["meanCost"] < rows["spot-then-on-demand"]["meanCost"] < rows["on-demand"]["meanCost"]
    code, out, _ = run_spotune(capsys, "simulate", traces[0], "--market", traces[1], *options, *prices)
    both = json.loads(out)["odds"][0]
    assert code == 0
    assert (both["met"], both["onDemandShare"]) == (48, 0.0)


def test_plan_says_the_odds_of_the_deadline(capsys: pytest.CaptureFixture[str], traces: list[Path]) -> None:
    job = traces[0].parent / "job.yaml"
    job.write_text(f"{JOB}  deadline: 150m\n")
    options = ("--trace", traces[0], "--trace", traces[1], *TIMES)
    code, out, _ = run_spotune(capsys, "plan", job, *options)
    assert code == 0
    assert "1 h 40 min of training in 2 h 30 min (slack 1.50)" in " ".join(out.split())
    code, out, _ = run_spotune(capsys, "plan", job, *options, "--output", "json")
    assert [row["met"] for row in json.loads(out)["deadline"]] == [48, 48, 48]
    job.write_text(f"{JOB}  deadline: 105m\n")
    code, out, _ = run_spotune(capsys, "plan", job, *options)
    assert "Not even on-demand nodes keep this deadline: give more time or workers." in " ".join(out.split())


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("simulate", "a.csv", "--step-seconds", "6", "--deadline", "2h"), "--steps: set the number of steps"),
        (("simulate", "a.csv", "--step-seconds", "6", "--deadline", "0s"), "--deadline 0s: expected a duration longer"),
        (
            ("simulate", "a.csv", *TIMES, "--steps", "9", "--deadline", "2h", "--market", "a.csv"),
            "a: each market needs a trace of another name",
        ),
        (("plan", "job.yaml", "--trace", "a.csv"), "--trace: the job has no spec.deadline, such as 36h"),
    ],
)
def test_what_is_missing_is_named(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    traces: list[Path],
    command: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(traces[0].parent)
    Path("job.yaml").write_text(JOB)
    code, _, err = run_spotune(capsys, *command)
    assert code == 2
    assert message in " ".join(err.split())


def test_plan_uses_the_history_of_a_job(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Four hours on two nodes, of which one was away for an hour: no worse than the wait that the slack allows."""
    (tmp_path / "job.yaml").write_text(f"{JOB}  deadline: 4h\n")
    run = tmp_path / "run"
    run.mkdir()
    (run / "job.json").write_text('{"spec": {"workers": {"count": 2, "gpus": 1, "capacity": "spot"}}}')
    events: list[dict[str, object]] = [
        {"event": "generation-started", "time": 0.0, "generation": 1, "planSeconds": 1.0, "worldSize": 2},
        {"event": "failure", "time": 7200.0, "cause": "preempted"},
        {"event": "generation-ended", "time": 7200.0, "generation": 1, "worldSize": 2, "seconds": 7200.0, "steps": 1199,
         "parts": {"startup": 6.0, "productive": 7194.0}},
        {"event": "waiting", "time": 7210.0, "slots": 1, "wanted": 2},
        {"event": "generation-started", "time": 10800.0, "generation": 2, "planSeconds": 1.0, "worldSize": 2},
        {"event": "committed", "time": 14400.0, "stallSeconds": 0.1, "seconds": 5.0},
    ]  # fmt: skip
    (run / "ledger.jsonl").write_text("\n".join(json.dumps(event) for event in events))
    options = ("--history", run, "--on-demand-start", "10m", "--output", "json")
    code, out, err = run_spotune(capsys, "plan", tmp_path / "job.yaml", *options)
    assert (code, err) == (0, "")
    policy, spot, _ = json.loads(out)["deadline"]
    assert (policy["met"], spot["met"]) == (48, 48), "1 h 40 min of training, and an hour without a node"
    assert 6000 < spot["meanSeconds"] < 6000 + 3600
