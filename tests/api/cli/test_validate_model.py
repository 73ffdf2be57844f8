"""`spotune validate` says if it has not seen the folder of a job's model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotune.cli.hub_cache import HUB_HINT
from spotune.cli.main import main
from tests.api.support.job_files import a_job


def validate(capsys: pytest.CaptureFixture[str], folder: Path, source: str, *options: str) -> str:
    """The output for a job with this model, whose file is in the folder."""
    job = a_job(model={"source": source, "task": "seq2seq"})
    file = folder / "job.yaml"
    file.write_text(job.model_dump_json(by_alias=True, exclude_unset=True))
    with pytest.raises(SystemExit) as exited:
        main(["validate", str(file), "--rows", "0", *options])
    out, err = capsys.readouterr()
    assert (exited.value.code, err) == (0, "")
    return out


def test_a_folder_that_is_missing_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    missing = f"{tmp_path}/data/nothing is not on this machine ({HUB_HINT})"
    assert f"  spec.model.source: not checked: {missing}\n" in validate(capsys, tmp_path, "data/nothing")
    found = json.loads(validate(capsys, tmp_path, "data/nothing", "--output", "json"))
    assert (found["valid"], found["model"]) == (True, {"source": "data/nothing", "notChecked": missing})


@pytest.mark.parametrize("source", ["here", "~/here", "hf://google-t5/t5-small"])
def test_other_models_are_not_mentioned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "here").mkdir()
    assert "spec.model" not in validate(capsys, tmp_path, source)
