"""What `spotune watch` writes where there is no terminal, and how it is put that a job has ended."""

import io
import json

import pytest
from rich.console import Console

from spotune_operator.cli.cluster.jobs import outcome
from spotune_operator.cli.watch import JsonView, LiveView, PlainView, ending
from tests.operator.support.objects import NOW, condition, finetune_job, training_job

STALLED = condition("Stalled", "True", "ErrImagePull", "no such image")


class Plain:
    """A plain view whose lines and clock are the test's."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.now = NOW
        self.view = PlainView(self.lines.append, lambda: self.now)


def test_lines_come_with_a_new_phase_and_every_few_seconds_while_stepping() -> None:
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


def test_job_that_stands_still_is_not_written_again() -> None:
    plain = Plain()
    for second in range(0, 60, 2):
        plain.now = NOW + second
        plain.view.show(training_job())
    assert len(plain.lines) == 1


def test_condition_is_written_when_it_comes_and_when_it_comes_again() -> None:
    plain = Plain()
    for conditions in ([], [STALLED], [STALLED], [], [STALLED]):
        plain.view.show(finetune_job(*conditions, phase="Provisioning"))
    assert plain.lines == ["Provisioning", *["Stalled: ErrImagePull: no such image"] * 2]


def test_json_is_a_line_for_each_other_status() -> None:
    lines: list[str] = []
    view = JsonView(lines.append)
    for step in (1, 1, 2):
        view.show(training_job(step=step))
    view.say("the API server does not answer")
    assert [json.loads(line)["step"] for line in lines] == [1, 2]


def test_live_view_redraws_the_panel_and_lets_sentences_scroll() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100)
    with LiveView(console, lambda: NOW) as view:
        view.show(training_job())
        view.say("the API server does not answer")
    assert "step 1240/4800" in out.getvalue()
    assert "the API server does not answer" in out.getvalue()


@pytest.mark.parametrize(
    ("conditions", "seen", "ended"),
    [
        ([condition("Complete", "True"), condition("Failed", "False")], 2, "Complete"),
        ([condition("Complete", "False"), condition("Failed", "True")], 2, "Failed"),
        ([condition("Complete", "False"), condition("Failed", "False")], 2, None),
        ([condition("Complete", "True")], 1, None),
    ],
    ids=["complete", "failed", "neither", "changed-since"],
)
def test_job_has_ended_when_the_operator_says_so_of_its_newest_form(
    conditions: list[dict[str, str]], seen: int, ended: str | None
) -> None:
    assert outcome(finetune_job(*conditions, observedGeneration=seen)) == ended


def test_ending_says_what_it_took_and_where_the_model_is() -> None:
    job = training_job(step=4800, output="pvc://spotune-t5-sql/team/t5-sql-0123abcd/export")
    assert ending(job) == (
        "t5-sql is trained (4800 steps, GPU time 1 d 01 h on spot, 10 min 00 s on demand); the model is at "
        "pvc://spotune-t5-sql/team/t5-sql-0123abcd/export"
    )
    assert ending(finetune_job(step=10)) == "t5-sql is trained (10 steps)"
