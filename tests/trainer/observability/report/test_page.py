"""The report of a job: its content, that it is one self-contained file, and that a browser shows it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from PIL import Image

from spotune.errors import UsageError
from spotune.job.training.metric import OBJECTIVE_METRICS, STEP_STATISTICS
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.observability.report.charts import Axis, duration, thinned
from spotune_trainer.observability.report.page import report_of_directory
from spotune_trainer.observability.report.run_summary import read_summary
from tests.command_line import run_spotune
from tests.trainer.support.runs import Layout, Runs
from tests.trainer.support.tiny import make_job

START = 1_800_000_000.0
RIGHT = {"prompt": "how many <b>?", "prediction": "SELECT 1", "reference": "SELECT 1", "scores": {"exactMatch": True}}
WRONG = {
    "prompt": "who?",
    "prediction": "SELECT 2",
    "reference": "SELECT 3",
    "scores": {"exactMatch": False, "bleu": 0.125},
}


@pytest.fixture
def eventful(tmp_path: Path) -> JobDirectory:
    """A job that lost a worker after six steps, two of them uncommitted, and continues with fewer workers."""
    directory = JobDirectory(tmp_path / "eventful")
    directory.logs.mkdir(parents=True)
    job = make_job("/models/<t5>", "seq2seq")
    directory.job.write_text(job.model_dump_json(by_alias=True))
    ledger = Ledger(directory)
    write_generation(directory, 1, None, range(1, 7))
    write_generation(directory, 2, "step-00000004.gen-1", range(5, 11))
    for record in (
        {"time": START, "event": "generation-started", "generation": 1, "step": 0, "stepsLost": 0, "worldSize": 4},
        {"time": START + 20, "event": "committed", "generation": 1, "step": 4},
        {"time": START + 40, "event": "generation-ended", "generation": 1, "seconds": 40.0, "steps": 6},
        {
            "time": START + 40,
            "event": "failure",
            "generation": 1,
            "cause": "workerLost",
            "message": "lost <rank> 3",
            "step": 6,
        },
        {"time": START + 60, "event": "generation-started", "generation": 2, "step": 4, "stepsLost": 2, "worldSize": 2},
        {"time": START + 80, "event": "evaluated", "generation": 2, "step": 10, "loss": 0.5, "exactMatch": 0.25}
        | {"scores": {"bleu": 41.25}}
        | {"predictions": [RIGHT, WRONG]},
    ):
        ledger.append_record(record)
    status = {"time": START + 90, "phase": "Training", "step": 10, "totalSteps": 20, "loss": 0.6, "goodput": 0.5}
    parts = {"productive": 45.0, "lost": 15.0, "startup": 30.0}
    directory.status.write_text(
        json.dumps(status | {"goodputParts": parts, "restarts": {"workerLost": 1}, "stepsLost": 2})
    )
    return directory


def write_generation(directory: JobDirectory, number: int, restored: str | None, steps: range) -> None:
    folder = directory.generations / f"{number:07}"
    folder.mkdir(parents=True)
    (folder / "restored.json").write_text(json.dumps({"checkpoint": restored}))
    logs = directory.generation_logs(number)
    logs.root.mkdir()
    lines = [
        {"step": step, "loss": 2.0 / step, "tokens": 100, "labelTokens": 60, "seconds": 0.5, "generation": number}
        for step in steps
    ]
    logs.steps.write_text("".join(json.dumps(line) + "\n" for line in lines))


def test_summary_has_each_step_once_and_the_outcome_of_each_worker_group(eventful: JobDirectory) -> None:
    summary = read_summary(eventful.root)
    assert [(step["step"], step["generation"]) for step in summary.steps] == [
        *((step, 1) for step in range(1, 5)),
        *((step, 2) for step in range(5, 11)),
    ]
    lost, running = summary.groups
    assert (lost.world_size, lost.steps, lost.seconds(summary.updated), lost.description) == (
        4,
        6,
        40.0,
        "workerLost: lost <rank> 3",
    )
    assert (running.first_step, running.seconds(summary.updated), running.description) == (4, 30.0, "running")


def test_outcome_of_a_group_that_was_preempted_has_what_the_driver_weighed(eventful: JobDirectory) -> None:
    ledger = Ledger(eventful)
    ledger.append("leaving", generation=2, reason="1 node is draining", seconds=30.0, why="leaving at once loses 3 s")
    ledger.append("failure", generation=2, cause="preempted", message="1 node is draining", step=10)
    assert read_summary(eventful.root).groups[1].description == (
        "preempted: 1 node is draining; leaving at once loses 3 s"
    )
    ledger.append("left", generation=2, step=10)
    assert read_summary(eventful.root).groups[1].description == (
        "left: another number of workers continues; leaving at once loses 3 s"
    )


def test_unfit_nodes_and_stragglers_are_listed(eventful: JobDirectory) -> None:
    ledger = Ledger(eventful)
    ledger.append("node-unfit", node="<n2>", boot="b", reason="it is too hot")
    ledger.append("straggler", generation=2, rank=1, node="n1", ratio=1.456, since=START)
    ledger.append("straggler-replaced", generation=2, rank=1, reason="rank 1 on n1 took 1.46 of the median")
    ledger.append("left", generation=2, step=10)
    page = report_of_directory(eventful.root)
    assert "node &lt;n2&gt; is unfit and is left out: it is too hot" in page
    assert "rank 1 on n1 is slow: it takes 1.46 of the median of all ranks" in page
    (group,) = [each for each in read_summary(eventful.root).groups if each.generation == 2]
    assert group.message.endswith("rank 1 on n1 took 1.46 of the median")


def test_scores_of_tasks_are_in_the_table_of_evaluations_by_their_step(eventful: JobDirectory) -> None:
    for step, accuracy in ((8, 0.125), (10, 0.25), (10, 0.375)):
        Ledger(eventful).append("harness", generation=2, step=step, scores={"arc_easy/acc": accuracy})
    of_tasks, both = read_summary(eventful.root).evaluations
    assert (of_tasks["step"], of_tasks["scores"]) == (8, {"arc_easy/acc": 0.125})
    assert (both["step"], both["loss"], both["scores"]) == (10, 0.5, {"bleu": 41.25, "arc_easy/acc": 0.375})
    page = report_of_directory(eventful.root)
    assert "<th>arc_easy/acc</th>" in page
    assert [f"<td>{value}</td>" in page for value in ("0.125", "0.25", "0.375")] == [True, False, True]


def test_a_mixture_has_a_chart_of_the_loss_of_each_source(eventful: JobDirectory) -> None:
    by_source = {"evalBySource": {"sql": {"loss": 0.25}, "chat": {"loss": 0.75, "exactMatch": 0.5}}}
    Ledger(eventful).append_record(
        {"time": START + 85, "event": "evaluated", "generation": 2, "step": 10, "loss": 0.5, **by_source}
    )
    page = report_of_directory(eventful.root)
    assert "Evaluation loss by source" in page
    assert [f"{name}</span>" in page for name in ("sql", "chat")] == [True, True]
    assert len(re.findall(r"<svg.*?</svg>", page, re.DOTALL)) == 5


@pytest.mark.parametrize("objective", [each for each, metrics in OBJECTIVE_METRICS.items() if metrics])
def test_what_an_objective_computes_is_in_a_chart(eventful: JobDirectory, objective: str) -> None:
    for number in (1, 2):
        steps = eventful.generation_logs(number).steps
        lines = map(json.loads, steps.read_text().splitlines())
        statistics = dict.fromkeys(STEP_STATISTICS[objective], 0.25)
        steps.write_text("".join(json.dumps({**line, **statistics}) + "\n" for line in lines))
    scores = dict.fromkeys(OBJECTIVE_METRICS[objective], 0.5)
    Ledger(eventful).append("evaluated", generation=2, step=10, loss=0.5, scores=scores)
    drawn = {
        name: len(re.findall(r"\d,\d", points))
        for _, lines, legend in charts_of(report_of_directory(eventful.root))
        for name, points in zip(legend, lines, strict=bool(legend))
    }
    assert {name: drawn.get(name) for name in STEP_STATISTICS[objective]} == dict.fromkeys(
        STEP_STATISTICS[objective], 10
    )
    assert {name: drawn.get(f"{name}, evaluation") for name in scores} == dict.fromkeys(scores, 1)


def charts_of(page: str) -> list[tuple[str, list[str], list[str]]]:
    """The title of each chart of lines, the points of its lines, and its legend, which one line does not have."""
    found = re.findall(r"<figcaption>(.*?)<span class=.legend.>(.*?)</figcaption>(.*?)</figure>", page, re.DOTALL)
    return [
        (title, points, re.findall(r"<span class=.key c\d.>(.*?)</span>", legend))
        for title, legend, chart in found
        if (points := re.findall(r"<polyline[^>]*points=.(.*?).[ /]*>", chart))
    ]


def test_a_run_that_only_learns_texts_has_no_charts_of_other_objectives(eventful: JobDirectory) -> None:
    titles = {title for title, _, _ in charts_of(report_of_directory(eventful.root))}
    assert titles == {"Loss", "Tokens per second"}


def test_page_is_one_file_with_all_texts_escaped(eventful: JobDirectory) -> None:
    page = report_of_directory(eventful.root)
    assert not re.findall(r"<script|<link|<img|https?://|url\(|@import", page)
    assert "<rank>" not in page
    assert "lost &lt;rank&gt; 3" in page
    assert "/models/&lt;t5&gt;" in page
    charts = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(charts) == 4  # loss, tokens per second, worker groups, parts of the time
    for chart in charts:
        ElementTree.fromstring(chart)
    assert "productive 50.0%, 45 s" in page
    assert "<dd>10 of 20</dd>" in page
    evaluations = page[page.index("<h2>Evaluations") :]
    assert re.findall(r"<th>(.*?)</th>", evaluations)[:4] == ["step", "loss", "exact match", "bleu"]
    assert re.findall(r"<td>(.*?)</td>", evaluations)[:4] == ["10", "0.5000", "25.0%", "41.25"]
    assert answers_of(page) == [
        ("how many &lt;b&gt;?", [("10", "SELECT 1", "exactMatch"), ("expected", "SELECT 1", "")]),
        ("who?", [("10", "SELECT 2", "bleu 0.125"), ("expected", "SELECT 3", "")]),
    ]


def answers_of(page: str) -> list[tuple[str, list[tuple[str, str, str]]]]:
    """Each prompt of the sample answers with the rows of its table: step, answer, scores."""
    row = r"<tr[^>]*><td>(.*?)</td><td class=.text.>(.*?)</td><td[^>]*>(.*?)</td></tr>"
    found = re.findall(r"<summary>(.*?)</summary>(.*?)</details>", page, re.DOTALL)
    return [(prompt, re.findall(row, table)) for prompt, table in found]


def test_page_shows_how_answers_change_from_evaluation_to_evaluation(eventful: JobDirectory) -> None:
    """An evaluation that a lost worker group made and its successor repeated is shown once."""
    ledger = Ledger(eventful)
    for generation, step, answer in ((1, 5, "LOST"), (2, 5, "SEL"), (2, 10, "SELECT 1"), (2, 15, "SELECT 1;")):
        scored = {**RIGHT, "prediction": answer, "scores": {"exactMatch": answer == "SELECT 1"}}
        ledger.append("evaluated", generation=generation, step=step, loss=1.0, predictions=[scored])
    page = report_of_directory(eventful.root)
    assert answers_of(page) == [
        (
            "how many &lt;b&gt;?",
            [
                ("5", "SEL", ""),
                ("10", "SELECT 1", "exactMatch"),
                ("15", "SELECT 1;", ""),
                ("expected", "SELECT 1", ""),
            ],
        )
    ]
    evaluations = page[page.index("<h2>Evaluations") : page.index("<h2>Sample answers")]
    assert re.findall(r"<tr><td>(\d+)</td>", evaluations) == ["5", "10", "15"]


def test_of_many_evaluations_ten_are_shown_with_the_first_and_the_last(eventful: JobDirectory) -> None:
    for step in range(10, 410, 10):
        Ledger(eventful).append("evaluated", generation=2, step=step, loss=1.0, predictions=[RIGHT])
    ((_, rows),) = answers_of(report_of_directory(eventful.root))
    steps = [int(step) for step, *_ in rows[:-1]]
    assert len(steps) == len(set(steps)) == 10
    assert (steps[0], steps[-1]) == (10, 400)
    assert steps == sorted(steps)


@pytest.mark.slow
def test_report_of_a_finished_run(runs: Runs, tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path / "run")
    shutil.copytree(runs.finished(Layout(1, 0)).root, directory.root)
    directory.job.write_text(make_job("/model").model_dump_json(by_alias=True))
    page = report_of_directory(directory.root)
    assert "Gradient norm" in page
    assert "Learning rate" in page


def test_folder_without_a_job_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"is not the directory of a job: there is no job\.json in it"):
        report_of_directory(tmp_path)


def test_command_writes_the_page_of_a_folder(
    eventful: JobDirectory, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "page.html"
    code, out, error = run_spotune(capsys, "report", eventful.root, "--file", file)
    assert code == 0, error
    assert file.read_text() == report_of_directory(eventful.root)
    assert out.startswith(f"{file} (")


def test_report_of_a_job_that_has_not_started(tmp_path: Path) -> None:
    directory = JobDirectory(tmp_path)
    directory.job.write_text(make_job("/model").model_dump_json(by_alias=True))
    page = report_of_directory(tmp_path)
    assert "No training steps yet." in page
    assert "No worker group has started yet." in page


def test_spikes_survive_thinning() -> None:
    points = [(float(x), 1.0) for x in range(50_000)]
    points[31_234] = (31_234.0, 99.0)
    kept = thinned(points)
    assert len(kept) <= 1000
    assert (31_234.0, 99.0) in kept
    assert kept == sorted(kept)


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [(0, 10, [0, 2, 4, 6, 8, 10]), (0.13, 0.31, [0.15, 0.2, 0.25, 0.3]), (5, 5, [5]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert Axis(low, high, 0, 100).ticks() == pytest.approx(ticks)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.25, "0.25 s"), (59.4, "59 s"), (61, "1 min 01 s"), (3700, "1 h 01 min"), (90_000, "1 d 1 h")],
)
def test_durations_have_their_two_largest_units(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.long
def test_browser_shows_it(eventful: JobDirectory, tmp_path: Path) -> None:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("no chromium: apt-get install chromium")
    (tmp_path / "report.html").write_text(report_of_directory(eventful.root))
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--window-size=1200,1600")
    shot = tmp_path / "report.png"
    command: list[Any] = [browser, *flags, f"--screenshot={shot}", (tmp_path / "report.html").as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
    colours = Image.open(shot).convert("RGB").getcolors(1 << 24) or []
    assert {(37, 99, 235), (220, 38, 38)} <= {colour for _, colour in colours}  # a running group and a failed one
