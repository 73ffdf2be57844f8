"""`spotune sweep`: the trials of a sweep in the order of their values, as text, JSON and an HTML page."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from spotune_client.sweeps.page import page
from spotune_client.sweeps.trials import as_json, sorted_trials
from spotune_operator.cli.sweeps.table import table
from tests.api.support.sweep_files import a_sweep
from tests.client.support.api_server import serving_cluster
from tests.command_line import run_spotune
from tests.operator.cli.test_status import rendered
from tests.operator.sweeps.scenario import GRID, NOW, SweepScenario

SWEEPS = "/apis/spotune.dev/v1alpha1/namespaces/team/finetunesweeps"


def raw(scenario: SweepScenario) -> dict[str, Any]:
    """The sweep as the API server returns it."""
    content = scenario.sweep.model_dump(mode="json", exclude_unset=True)
    status = scenario.status.model_dump(mode="json", exclude_none=True)
    return {**content, "metadata": {**content["metadata"], "generation": 1}, "status": status}


@pytest.fixture
def sweep() -> dict[str, Any]:
    """Two complete trials, a pruned one, a failed one and a running one; all started at once."""
    scenario = SweepScenario(
        a_sweep(**GRID | {"maxConcurrent": 5, "earlyStopping": {"algorithm": "asha", "minSteps": 100}})
    )
    scenario.reconcile()
    scenario.evaluates(0, 100, 2.0)
    scenario.evaluates(1, 100, 1.5)
    scenario.evaluates(2, 100, 4.0)
    scenario.report(0, gpuSeconds={"spot": 3600})
    scenario.fails(3)
    scenario.reconcile()
    scenario.completes(0, 1.25)
    scenario.completes(1, 0.75)
    scenario.reconcile()
    return raw(scenario)


def test_the_best_trial_comes_first_and_those_without_a_value_last(sweep: dict[str, Any]) -> None:
    assert [(trial["number"], trial["state"]) for trial in sorted_trials(sweep)] == [
        *((1, "Complete"), (0, "Complete"), (2, "Pruned")),
        *((3, "Failed"), (4, "Running"), (5, "Running")),
    ]
    sweep["spec"]["objective"] = {"metric": "accuracy"}
    assert [trial["number"] for trial in sorted_trials(sweep)][:2] == [0, 1]


def test_a_row_has_state_value_parameters_and_gpu_time(sweep: dict[str, Any]) -> None:
    lines = [re.split(" {2,}", line) for line in rendered(table(sweep, NOW))]
    assert lines[0] == ["t5-search", "Running"]
    assert lines[1] == ["trials", "2 running, 2 complete, 1 pruned, 1 failed"]
    assert lines[2] == ["best", "t5-search-1: loss 0.75"]
    headings = ["TRIAL", "STATE", "LOSS", "STEP", "globalBatchSize", "learningRate", "GPU TIME", "MESSAGE"]
    assert headings in lines
    rows = lines[lines.index(headings) + 1 :]
    assert rows[0] == ["t5-search-1", "Complete", "0.75", "1000", "32", "0.0001", "-"]
    assert rows[1] == ["t5-search-0", "Complete", "1.25", "1000", "32", "1e-05", "1 h 00 min"]
    assert rows[2][:3] == ["t5-search-2", "Pruned", "4"]
    assert rows[2][-1].startswith("pruned at step 100")
    assert rows[3][-1] == "the loss is not finite"


def test_a_sweep_without_a_status_has_no_table() -> None:
    new = raw(SweepScenario())
    new["status"] = {"observedGeneration": -1}
    assert rendered(table(new, NOW))[0].split() == ["t5-search", "New"]
    assert as_json(new)["status"]["trials"] == []


class _Tags(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}
        self.sources: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.counts[tag] = self.counts.get(tag, 0) + 1
        self.sources += [value or "" for name, value in attrs if name in ("src", "href")]


def test_the_page_has_a_line_per_trial_and_loads_nothing(sweep: dict[str, Any]) -> None:
    sweep["status"]["trials"][3]["message"] = "<script>alert(1)</script>"
    text = page(sweep, NOW)
    tags = _Tags()
    tags.feed(text)
    assert tags.sources == []
    assert "script" not in tags.counts
    assert tags.counts["polyline"] == 3, "the trials that were evaluated"
    assert tags.counts["tr"] == 1 + 6
    assert '<tr class="best"><td>t5-search-1</td>' in text
    assert "6 trials, 1.00 GPU hours" in text


def test_a_page_without_evaluations_has_no_chart() -> None:
    scenario = SweepScenario()
    scenario.reconcile()
    assert "<svg" not in page(raw(scenario), NOW)


def test_the_command_prints_and_writes_the_page(
    sweep: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = {f"{SWEEPS}/t5-search": sweep, SWEEPS: {"items": [sweep], "metadata": {}}}

    def answer(path: str, *_: Any) -> tuple[int, str]:
        return (200, json.dumps(answers[path])) if path in answers else (404, "{}")

    with serving_cluster(answer, tmp_path):
        options = ("--kubeconfig", kubeconfig_in(tmp_path))
        code, out, error = run_spotune(capsys, "sweep", "t5-search", "--report", tmp_path / "page.html", *options)
        assert (code, error) == (0, "")
        assert "t5-search-1: loss 0.75" in out
        assert out.splitlines()[-1].startswith(f"{tmp_path}/page.html (")
        assert (tmp_path / "page.html").read_text().startswith("<!doctype html>")
        code, out, _ = run_spotune(capsys, "sweep", "t5-search", "--output", "json", *options)
        assert (code, json.loads(out)["status"]["trials"][0]["name"]) == (0, "t5-search-1")
        code, _, error = run_spotune(capsys, "sweep", "t5-serch", *options)
        assert code == 2
        assert "namespace team has no FinetuneSweep t5-serch; did you mean t5-search?" in error


def kubeconfig_in(folder: Path) -> Path:
    """The kubeconfig that `serving_cluster` has written."""
    return next(path for path in folder.iterdir() if "127.0.0.1" in path.read_text())
