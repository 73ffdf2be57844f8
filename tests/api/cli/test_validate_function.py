"""`spotune validate` looks for the training function of a job in a folder on this machine, without running it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spotune.cli.main import main

CODE = "def train(config):\n    pass\n\nraise RuntimeError('this code must not run')\n"


def job_file(folder: Path, function: str, code: str) -> Path:
    (folder / "code").mkdir()
    (folder / "code" / "training.py").write_text(CODE)
    (folder / "code" / "broken.py").write_text("def train(:\n")
    spec = {"training": {"function": function, **({"code": code} if code else {})}}
    file = folder / "job.yaml"
    content = {"apiVersion": "spotune.dev/v1alpha1", "kind": "FinetuneJob", "metadata": {"name": "own"}, "spec": spec}
    file.write_text(json.dumps(content, indent=1))
    return file


def validate(capsys: pytest.CaptureFixture[str], file: Path) -> tuple[Any, dict[str, Any]]:
    with pytest.raises(SystemExit) as exited:
        main(["validate", str(file), "--output", "json"])
    out, err = capsys.readouterr()
    return exited.value.code, json.loads(err or out)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("trainign:train", "trainign:train: there is no module trainign, looked for in {code}: correct the name or"),
        ("training:main", "training:main: the module has no main, looked for in {code}: correct the name or"),
        ("training.inner:train", "training.inner:train: there is no module training.inner, looked for in {code}"),
        ("broken:train", "broken:train: the module cannot be read (SyntaxError: "),
    ],
)
def test_a_missing_function_is_named_with_its_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, message: str
) -> None:
    file = job_file(tmp_path, function, "code")
    code, found = validate(capsys, file)
    assert code == 20
    [problem] = found["problems"]
    assert problem["field"] == "spec.training.function"
    line = next(number for number, text in enumerate(file.read_text().splitlines(), 1) if '"function"' in text)
    assert (problem["file"], problem["line"]) == (str(file), line)
    assert problem["message"].startswith(message.format(code=tmp_path / "code"))


@pytest.mark.parametrize(
    ("function", "code"),
    [("training:train", "code"), ("training:main", ""), ("elsewhere:train", "/nonexistent/on-the-volume")],
    ids=["it is there", "in the image", "on the volume of a cluster"],
)
def test_what_cannot_be_known_here_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], function: str, code: str
) -> None:
    status, found = validate(capsys, job_file(tmp_path, function, code))
    assert (status, found["valid"]) == (0, True)
