"""`spotune validate` names deadlines and limits of cost that cannot be."""

from pathlib import Path

import pytest

from tests.api.support.job_files import JOB_FILE, run_validate
from tests.api.support.sweep_files import SWEEP_FILE
from tests.command_line import run_spotune


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("deadline: 2020-01-31T18:00:00Z", "2020-01-31T18:00:00Z is in the past: give a later time, or a duration"),
        ("deadline: 0s", "0s leaves no time: give a duration longer than 0s"),
        ("deadline: 2027-01-31T18:00:00", "expected a time with its offset such as 2027-01-31T18:00:00Z, or a"),
        ("deadline: soon", "expected a time with its offset such as 2027-01-31T18:00:00Z, or a duration"),
        ("maxCost: 120", "expected an amount above 0 with its currency, such as 120 USD or 99.50 EUR, not 120"),
        ('maxCost: "120"', "expected an amount above 0 with its currency, such as 120 USD or 99.50 EUR, not "),
    ],
)
def test_field_and_remedy_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], line: str, message: str
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{JOB_FILE}  {line}\n")
    code, printed = run_validate(capsys, str(file))
    assert code == 20
    field = line.partition(":")[0]
    assert f":11: spec.{field}: {message}" in printed


def test_times_to_come_are_accepted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(f"{JOB_FILE}  deadline: 9999-01-31T18:00:00+01:00\n  maxCost: 99.50 EUR\n")
    assert run_validate(capsys, str(file)) == (0, "")


_OF_JOB = (f"{JOB_FILE}  deadline: 2020-01-31T18:00:00Z\n", "spec.deadline")
_OF_TRIALS = (f"{SWEEP_FILE}      deadline: 2020-01-31T18:00:00Z\n", "spec.template.spec.deadline")


@pytest.mark.parametrize(
    ("command", "content", "field"),
    [("plan", *_OF_JOB), ("render", *_OF_JOB), ("validate", *_OF_TRIALS), ("render", *_OF_TRIALS)],
    ids=["plan-job", "render-job", "validate-sweep", "render-sweep"],
)
def test_commands_about_something_new_refuse_a_deadline_in_the_past(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str, content: str, field: str
) -> None:
    file = tmp_path / "new.yaml"
    file.write_text(content)
    code, _, printed = run_spotune(capsys, command, str(file))
    assert code == 20
    assert f"{field}: 2020-01-31T18:00:00Z is in the past: give a later time" in printed
