"""ModelServices in, children out.

The files under golden/ are what `spotune render` prints for golden/service-<case>.yaml. After an intended change write
them again, and read the difference:

    SPOTUNE_WRITE_GOLDEN=1 .venv/bin/pytest tests/operator/children/serving/test_golden.py
    git diff tests/operator/children/serving/golden
"""

import os
from pathlib import Path

import pytest

from tests.command_line import run_spotune

GOLDEN = Path(__file__).parent / "golden"
CASES = {"trained": "none", "mixed": "aks", "hub": "gke"}
"""The provider of each case."""


@pytest.mark.parametrize(("case", "provider"), CASES.items())
def test_children_of_a_service(case: str, provider: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = GOLDEN / f"{provider}-{case}.yaml"
    options = ("--provider", provider, "--image", "registry.example/serve:1")
    code, actual, error = run_spotune(capsys, "render", GOLDEN / f"service-{case}.yaml", *options)
    assert code == 0, error
    if os.environ.get("SPOTUNE_WRITE_GOLDEN"):
        file.write_text(actual)
    assert actual == file.read_text(), f"{file} holds something else (this module's docstring says how to write it)"


def test_every_golden_file_belongs_to_a_case() -> None:
    names = [name for case, provider in CASES.items() for name in (f"service-{case}.yaml", f"{provider}-{case}.yaml")]
    assert sorted(file.name for file in GOLDEN.iterdir()) == sorted(names)
