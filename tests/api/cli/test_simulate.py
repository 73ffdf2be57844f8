"""`spotune simulate`: its output, the sources of scenarios and timings, and its errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.command_line import run_spotune

JOB = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: t5}
spec:
  model: {source: "hf://google-t5/t5-3b", task: seq2seq}
  dataset: {train: {source: shards}}
  training: {epochs: 3, globalBatchSize: 96}
  workers: {count: 3, min: 2, capacity: spot-then-on-demand, onDemandAfter: 2m, resizeCooldown: 7m}
  head: {capacity: spot}
  checkpoint: {every: 90s}
"""
TRACE = "seconds,nodes\n0,4\n600,2\n900,4\n1800,4\n"


class Simulator:
    """Runs `spotune simulate` on a short trace and captures its output."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.capsys = capsys
        self.trace = folder / "trace.csv"
        self.trace.write_text(TRACE)

    def run(self, *options: str) -> tuple[int, str, str]:
        """Exit code, standard output and standard error."""
        return run_spotune(self.capsys, "simulate", self.trace, *options)

    def json(self, *options: str) -> dict[str, Any]:
        code, out, err = self.run(*options, "--output", "json")
        assert (code, err) == (0, "")
        found: dict[str, Any] = json.loads(out)
        return found

    def refused(self, *options: str) -> str:
        code, out, err = self.run(*options)
        assert (code, out) == (2, "")
        return " ".join(err.split())


@pytest.fixture
def simulator(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Simulator:
    monkeypatch.setenv("COLUMNS", "200")
    return Simulator(tmp_path, capsys)


def test_every_combination_is_a_row(simulator: Simulator) -> None:
    options = ("--workers", "2,4", "--checkpoint-every", "auto,1m,50", "--step-seconds", "2=4,4=2.2", "--min", "2")
    code, out, _ = simulator.run(*options, "--steps", "300", "--spot-price", "0.9")
    assert code == 0
    assert sum("on-demand" in line for line in out.splitlines()) == 6
    for text in ("2-4", "60 s", "50 steps", "auto", "%", "4 s with 2, 2.2 s with 4 workers"):
        assert text in out, text


def test_scenario_and_timings_default_to_those_of_the_job(simulator: Simulator) -> None:
    job = simulator.folder / "job.yaml"
    job.write_text(JOB)
    found = simulator.json("--job", str(job), "--step-seconds", "1.5", "--restore", "7s")
    (scenario,) = found["choices"]
    assert (
        scenario.items()
        >= {
            "workers": 3,
            "min": 2,
            "checkpointEvery": 90.0,
            "head": "spot",
            "capacity": "spot-then-on-demand",
            "onDemandAfterSeconds": 120.0,
            "resizeCooldownSeconds": 420.0,
        }.items()
    )
    assert (found["times"]["step"], found["times"]["restore"]) == ({"3": 1.5}, 7.0)
    assert scenario["wallSeconds"] == pytest.approx(1800)
    assert (scenario["finished"], scenario["cost"]) == (None, None)
    (never,) = simulator.json("--step-seconds", "1.5", "--resize-cooldown", "never")["choices"]
    assert never["resizeCooldownSeconds"] is None


def test_measured_timings_replace_assumed_ones(simulator: Simulator) -> None:
    events: list[dict[str, Any]] = [
        {"event": "attempt-started", "time": 0.0, "attempt": 1},
        {"event": "generation-started", "time": 6.0, "generation": 1, "planSeconds": 1.0, "restoredFrom": None},
        {
            "event": "generation-ended",
            "time": 100.0,
            "generation": 1,
            "worldSize": 2,
            "seconds": 94.0,
            "steps": 40,
            "parts": {"startup": 14.0, "productive": 80.0},
        },
    ]
    lines = [json.dumps(event) for event in events]
    (simulator.folder / "ledger.jsonl").write_text("\n".join([*lines, '{"event": "cut o']))
    times = simulator.json("--measured", str(simulator.folder), "--stall", "500ms")["times"]
    assert (times["step"], times["start_up"], times["attempt"], times["stall"]) == ({"2": 2.0}, 15.0, 5.0, 0.5)


def test_given_start_up_is_that_of_every_group(simulator: Simulator) -> None:
    events: list[dict[str, Any]] = [{"event": "attempt-started", "time": 0.0, "attempt": 1}]
    for generation, startup in ((1, 14.0), (2, 3.0)):
        common = {"time": 6.0, "generation": generation}
        events.append({"event": "generation-started", "planSeconds": 1.0, "restoredFrom": None, **common})
        parts = {"startup": startup, "productive": 80.0}
        events.append({"event": "generation-ended", "worldSize": 2, "steps": 40, "parts": parts, **common})
    (simulator.folder / "ledger.jsonl").write_text("\n".join(json.dumps(event) for event in events))
    measured = simulator.json("--measured", str(simulator.folder))["times"]
    assert (measured["first_start_up"], measured["start_up"]) == (15.0, 4.0)
    given = simulator.json("--measured", str(simulator.folder), "--start-up", "8s", "--join", "5s")["times"]
    assert (given["first_start_up"], given["start_up"], given["join"]) == (None, 8.0, 5.0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((), "--step-seconds: set the seconds per step"),
        (("--step-seconds", "fast"), "--step-seconds fast: expected seconds such as 1.2"),
        (("--step-seconds", "2=0"), "--step-seconds 2=0: expected seconds"),
        (("--step-seconds", "1", "--workers", "two"), "--workers two: expected whole numbers"),
        (("--step-seconds", "1", "--checkpoint-every", "often"), "--checkpoint-every: "),
        (("--step-seconds", "1", "--head", "cheap"), "--head cheap: expected spot, on-demand"),
        (("--step-seconds", "1", "--restore", "10"), "--restore: "),
        (("--step-seconds", "1", "--head-price", "3"), "--head-price 3: expected two prices"),
        (("--measured", "nowhere"), "--measured nowhere: cannot read the run's ledger"),
    ],
)
def test_errors_name_the_option(simulator: Simulator, options: tuple[str, ...], words: str) -> None:
    assert words in simulator.refused(*options)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("time,count\n0,4\n", "expected the columns seconds and nodes"),
        ("seconds,nodes\n0,4\n", "expected two lines or more"),
        ("seconds,nodes\n5,4\n9,3\n", "the first at 0 seconds"),
        ("seconds,nodes\n0,4\n9,3\n8,2\n", "each later than the one before"),
        ("seconds,nodes\n0,4\n9,some\n", "trace.csv:3: expected a number of seconds"),
        ("seconds,nodes\n0,4\n9,-1\n", "trace.csv:3: seconds must be finite"),
    ],
)
def test_a_broken_trace_is_refused_with_its_line(simulator: Simulator, content: str, words: str) -> None:
    simulator.trace.write_text(content)
    assert words in simulator.refused("--step-seconds", "1")
    simulator.trace.unlink()
    assert "cannot read the file" in simulator.refused("--step-seconds", "1")
