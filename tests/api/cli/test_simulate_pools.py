"""`spotune simulate` with several markets, and with a job that has pools."""

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
  workers:
    count: 2
    min: 1
    poolPatience: 5m
    pools:
      - {name: sure, capacity: on-demand, price: 3 USD}
      - {name: east, zone: e, price: 1 USD}
      - {name: west, zone: w, price: 1.5 USD}
"""
OPTIONS = ("--step-seconds", "1", "--steps", "20000")


@pytest.fixture
def traces(tmp_path: Path) -> tuple[Path, str, str]:
    east, west = tmp_path / "east.csv", tmp_path / "west.csv"
    east.write_text("seconds,nodes\n0,2\n3600,0\n14400,2\n28800,2\n")
    west.write_text("seconds,nodes\n0,0\n7200,2\n28800,2\n")
    (tmp_path / "job.yaml").write_text(JOB)
    return east, "--market", str(west)


def simulated(capsys: pytest.CaptureFixture[str], *words: Any) -> dict[str, Any]:
    code, out, err = run_spotune(capsys, "simulate", *words, *OPTIONS, "--output", "json")
    assert (code, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


def test_pools_of_a_job_are_tried_by_price_and_counted_apart(
    traces: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(capsys, *traces, "--job", traces[0].parent / "job.yaml")
    east, west, sure = found["pools"]
    assert [pool["name"] for pool in found["pools"]] == ["east", "west", "sure"]
    assert (east["capacity"], sure["capacity"]) == ("spot", "on-demand")
    assert west["nodeHours"] > 0, "it took over while there was nothing in the east"
    assert sure["nodeHours"] > 0, "and the pool on demand while there was nothing in the west either"
    assert found["cost"] == pytest.approx(east["cost"] + west["cost"] + sure["cost"], abs=1e-3)
    assert found["finished"]
    assert found["moves"] >= 1


def test_markets_without_a_job_are_pools_in_the_given_order(
    traces: tuple[Path, str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    found = simulated(capsys, *traces, "--workers", "2", "--capacity", "spot-then-on-demand", "--on-demand-after", "5m")
    assert [pool["name"] for pool in found["pools"]] == ["east", "west", "on-demand"]
    assert found["cost"] is None, "no prices"
    spot = simulated(capsys, *traces, "--workers", "2")
    assert [pool["name"] for pool in spot["pools"]] == ["east", "west"]
    assert spot["availability"] < found["availability"]
    code, out, _ = run_spotune(capsys, "simulate", *traces, "--workers", "2", *OPTIONS)
    assert code == 0
    assert "finished after" in out
    assert "cost not known" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("east.csv", "--job", "job.yaml"),
            "pool west: has no trace. A trace is named as its pool: --market west.csv.",
        ),
        (("job.yaml", "--job", "job.yaml"), "expected the columns"),
        (("east.csv", "--market", "west.csv", "--workers", "2,4"), "pools take one value each"),
        (("east.csv", "--market", "west.csv", "--head", "spot"), "are not simulated with several pools"),
        (("east.csv", "--market", "east.csv"), "each market needs a trace of another name"),
    ],
)
def test_what_cannot_be_simulated_is_named(
    traces: tuple[Path, str, str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.chdir(traces[0].parent)
    code, _, err = run_spotune(capsys, "simulate", *words, *OPTIONS)
    assert code == 2
    assert message in " ".join(err.split())
