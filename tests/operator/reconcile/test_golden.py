"""FinetuneJobs in, children out: for every provider and capacity, with volume or bucket, and data here, there or raw.

The files under golden/ are what `spotune render` prints for golden/job-<data>.yaml with another capacity. After a
wanted change write them again, and read the difference:

    SPOTUNE_WRITE_GOLDEN=1 .venv/bin/pytest tests/operator/reconcile/test_golden.py
    git diff tests/operator/reconcile/golden
"""

import itertools
import os
from pathlib import Path

import pytest

from spotune_operator.providers import ProviderName
from tests.command_line import run_spotune

GOLDEN = Path(__file__).parent / "golden"
CAPACITIES = ("spot", "on-demand", "spot-then-on-demand")
DATA = ("local", "s3", "prepared", "bucket")
CASES = list(itertools.product([name.value for name in ProviderName], CAPACITIES, DATA))


def rendered(provider: str, capacity: str, data: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """What `spotune render` prints."""
    text = (GOLDEN / f"job-{data}.yaml").read_text()
    assert "capacity: spot}" in text
    job = folder / "job.yaml"
    job.write_text(text.replace("capacity: spot}", f"capacity: {capacity}}}"))
    options = ("--provider", provider, "--image", "registry.example/trainer:1")
    code, out, error = run_spotune(capsys, "render", job, *options)
    assert code == 0, error
    return out


@pytest.mark.parametrize(("provider", "capacity", "data"), CASES)
def test_children_of_a_job(
    provider: str, capacity: str, data: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = GOLDEN / f"{provider}-{capacity}-{data}.yaml"
    actual = rendered(provider, capacity, data, tmp_path, capsys)
    if os.environ.get("SPOTUNE_WRITE_GOLDEN"):
        file.write_text(actual)
    assert actual == file.read_text(), f"{file} holds something else (this module's docstring says how to write it)"


def test_every_golden_file_belongs_to_a_case() -> None:
    cases = [f"{provider}-{capacity}-{data}.yaml" for provider, capacity, data in CASES]
    jobs = [f"job-{data}.yaml" for data in DATA]
    assert sorted(file.name for file in GOLDEN.iterdir()) == sorted([*jobs, *cases])


def test_every_case_has_children_of_its_own() -> None:
    texts = {file.stem: file.read_text() for file in GOLDEN.glob("*.yaml")}
    assert len(set(texts.values())) == len(texts)
