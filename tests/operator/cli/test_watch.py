"""The output of `spotune watch`, and when a job counts as ended."""

import io
import json

import pytest
from rich.console import Console

from spotune_client.cluster.jobs import outcome
from spotune_operator.cli.watch import JsonView, LiveView, PlainView, completion_message
from tests.operator.support.objects import NOW, condition, finetune_job, training_job

STALLED = condition("Stalled", "True", "ErrImagePull", "no such image")


class Plain:
    """A PlainView that records its lines and has a settable clock."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = NOW
        self.view = PlainView(self.lines.append, lambda: self.now)


def test_lines_are_written_for_each_phase_and_every_few_seconds() -> None:
    plain = Plain()
    plain.view.show(finetune_job(phase="Provisioning"))
    for second in range(12):
        plain.now = NOW + second
        plain.view.show(training_job(step=second, eta=""))
    assert [line.partition(", epoch")[0] for line in plain.lines] == [
        "Provisioning",
        "Training: step 0/4800",
        "Training: step 5/4800",
        "Training: step 10/4800",
    ]


def test_an_unchanged_job_is_written_once() -> None:
    plain = Plain()
    for second in range(0, 60, 2):
        plain.now = NOW + second
        plain.view.show(training_job())
    assert len(plain.lines) == 1


def test_a_condition_is_written_each_time_it_appears() -> None:
    plain = Plain()
    for conditions in ([], [STALLED], [STALLED], [], [STALLED]):
        plain.view.show(finetune_job(*conditions, phase="Provisioning"))
    waiting = "waiting until this is mended; Ctrl-C ends the watch, not the job"
    assert plain.lines == ["Provisioning", *["Stalled: ErrImagePull: no such image", waiting] * 2]


def test_a_stalled_job_is_said_to_wait_also_if_another_condition_gives_the_cause() -> None:
    plain = Plain()
    of_cluster = condition("ClusterReady", "False", "ErrImagePull", "no such image")
    plain.view.show(finetune_job(STALLED, of_cluster, phase="Stalled"))
    assert plain.lines == [
        "Stalled",
        "not ClusterReady: ErrImagePull: no such image",
        "waiting until this is mended; Ctrl-C ends the watch, not the job",
    ]


def test_json_has_a_line_per_changed_status() -> None:
    lines: list[str] = []
    messages: list[str] = []
    view = JsonView(lines.append, messages.append)
    for step in (1, 1, 2):
        view.show(training_job(step=step))
    view.notify("the API server does not answer")
    assert [json.loads(line)["step"] for line in lines] == [1, 2]
    assert messages == ["the API server does not answer"]


def test_live_view_redraws_the_panel_and_prints_messages_above() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with LiveView(console, lambda: NOW) as view:
        view.show(training_job())
        view.notify("the API server does not answer")
    assert "step 1240/4800" in out.getvalue()
    assert "the API server does not answer" in out.getvalue()


@pytest.mark.parametrize(
    ("conditions", "observed", "ended"),
    [
        ([condition("Complete", "True"), condition("Failed", "False")], 2, "Complete"),
        ([condition("Complete", "False"), condition("Failed", "True")], 2, "Failed"),
        ([condition("Complete", "False"), condition("Failed", "False")], 2, None),
        ([condition("Complete", "True")], 1, None),
    ],
    ids=["complete", "failed", "neither", "changed-since"],
)
def test_outcome_requires_a_condition_of_the_current_generation(
    conditions: list[dict[str, str]], observed: int, ended: str | None
) -> None:
    assert outcome(finetune_job(*conditions, observedGeneration=observed)) == ended


def test_completion_message_shows_gpu_time_and_location() -> None:
    job = training_job(step=4800, output="pvc://spotune-t5-sql/team/t5-sql-0123abcd/export")
    assert completion_message(job) == (
        "t5-sql has completed (4800 steps, GPU time 1 d 01 h on spot, 10 min 00 s on demand); the model is at "
        "pvc://spotune-t5-sql/team/t5-sql-0123abcd/export"
    )
    assert completion_message(finetune_job(step=10)) == "t5-sql has completed (10 steps)"
