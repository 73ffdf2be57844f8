"""`spotune serve` refuses what it cannot serve before it starts Ray."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from spotune.prompting.export_manifest import MANIFEST
from tests.command_line import run_spotune
from tests.serve.support.served_models import save_model

JOB = """
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: my-job}
spec:
  model: {source: hf://owner/model, task: causal}
  dataset: {train: {source: /shards}}
  training: {epochs: 1}
"""


def refusal(capsys: pytest.CaptureFixture[str], *options: object) -> tuple[int, str]:
    code, out, errors = run_spotune(capsys, "serve", *options)
    assert out == ""
    return code, errors


def test_a_folder_without_a_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(capsys, tmp_path / "none") == (2, f"there is no directory {tmp_path / 'none'}.\n")
    code, errors = refusal(capsys, tmp_path)
    assert code == 2
    assert "is neither an exported model" in errors


def test_a_reward_model_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path)
    manifest = json.loads((model / MANIFEST).read_text())
    (model / MANIFEST).write_text(json.dumps({**manifest, "task": "reward"}))
    code, errors = refusal(capsys, model)
    assert code == 20
    assert f"{model} is a reward model (training.objective: reward): it scores answers and generates none" in errors
    assert "AutoModelForSequenceClassification" in errors


def test_a_run_that_has_not_finished_is_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "job.json").write_text("{}")
    code, errors = refusal(capsys, tmp_path)
    assert code == 2
    assert f"spotune checkpoint export {tmp_path}" in errors


def test_a_job_file_means_its_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("job.yaml").write_text(JOB)
    assert refusal(capsys, "job.yaml") == (2, "there is no directory runs/my-job.\n")
    assert refusal(capsys, "job.yaml", "--directory", "other") == (2, "there is no directory other.\n")


def test_a_directory_option_without_a_job_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, errors = refusal(capsys, tmp_path, "--directory", tmp_path)
    assert code == 2
    assert "--directory belongs to a job file" in errors


@pytest.mark.parametrize("option", ["name", "name=", "=folder"])
def test_an_adapter_needs_a_name_and_a_folder(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = save_model(tmp_path)
    assert refusal(capsys, model, "--adapter", option) == (2, f"--adapter {option}: write NAME=DIR.\n")


def test_a_port_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        code, errors = refusal(capsys, save_model(tmp_path), "--port", port, "--output", "json")
    assert code == 2
    assert json.loads(errors)["message"].startswith(f"port {port} on 127.0.0.1 cannot be used: Address already in use")
