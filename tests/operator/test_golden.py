"""FinetuneJobs in, children out, for every provider and capacity.

The files under golden/ are what `spotune render` prints for golden/job-local.yaml; for the other jobs they hold only
the lines by which its output differs from that. After a wanted change write them again, and read the difference:

    SPOTUNE_WRITE_GOLDEN=1 .venv/bin/pytest tests/operator/test_golden.py && git diff tests/operator/golden
"""

import difflib
import itertools
import os
from pathlib import Path

import pytest

from spotune.cli import main
from spotune_operator.providers import PROVIDERS

GOLDEN = Path(__file__).parent / "golden"
CAPACITIES = ("spot", "on-demand")
PLACES = list(itertools.product([provider.value for provider in PROVIDERS], CAPACITIES))
CHANGED_DATA = ("s3", "prepared")


def rendered(data: str, provider: str, capacity: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `spotune render` prints."""
    text = (GOLDEN / f"job-{data}.yaml").read_text()
    assert "capacity: spot" in text
    job = folder / "job.yaml"
    job.write_text(text.replace("capacity: spot", f"capacity: {capacity}"))
    with pytest.raises(SystemExit) as ended:
        main(["render", str(job), "--provider", provider, "--image", "registry.example/trainer:1"])
    printed = capsys.readouterr()
    assert ended.value.code == 0, printed.err
    return printed.out


def difference(before: str, after: str) -> str:
    """The lines that differ, with two around them and without line numbers, so that a golden file moves seldom."""
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=2, lineterm="")
    return "".join(("@@" if line.startswith("@@") else line) + "\n" for line in list(lines)[2:])


def compare(name: str, actual: str) -> None:
    file = GOLDEN / name
    if os.environ.get("SPOTUNE_WRITE_GOLDEN"):
        file.write_text(actual)
    assert actual == file.read_text(), f"{file} holds something else (this module's docstring says how to write it)"


@pytest.mark.parametrize(("provider", "capacity"), PLACES)
def test_children_of_a_job_with_data_on_the_volume(
    provider: str, capacity: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compare(f"{provider}-{capacity}.yaml", rendered("local", provider, capacity, tmp_path, capsys))


@pytest.mark.parametrize("data", CHANGED_DATA)
@pytest.mark.parametrize(("provider", "capacity"), PLACES)
def test_what_other_data_changes_in_the_children(
    provider: str, capacity: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    local = rendered("local", provider, capacity, tmp_path, capsys)
    compare(
        f"{provider}-{capacity}-{data}.diff", difference(local, rendered(data, provider, capacity, tmp_path, capsys))
    )


def test_every_golden_file_belongs_to_a_case() -> None:
    jobs = [f"job-{data}.yaml" for data in ("local", *CHANGED_DATA)]
    places = [f"{provider}-{capacity}" for provider, capacity in PLACES]
    others = [f"{place}-{data}.diff" for place in places for data in CHANGED_DATA]
    assert sorted(file.name for file in GOLDEN.iterdir()) == sorted([*jobs, *(f"{p}.yaml" for p in places), *others])
