"""Job directories and models of an earlier release: the newest trainer continues them, and all commands read them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spotune.fingerprint import fingerprint
from spotune_operator.observe.supervisor_status import parse_progress
from spotune_trainer import files
from spotune_trainer.job_directory.job import is_trained, job_of
from spotune_trainer.job_directory.layout import JobDirectory
from tests.command_line import run_spotune
from tests.releases.recording.job_directories import KINDS, STOPPED_AFTER, run
from tests.releases.release import NUMERICS, Release, releases
from tests.releases.test_definitions import RELEASES

NUMERICS_CHANGED: dict[str, str] = {}
"""Reason by release whose weights today's code no longer reproduces; samples and losses are compared even so."""
_TOLERANCE = 1e-4


@pytest.fixture(scope="module", params=releases(), ids=lambda release: release.name)
def recorded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Release, Path]:
    """A release and its unpacked directories; tests change copies of them."""
    release: Release = request.param
    return release, release.unpack(tmp_path_factory.mktemp(release.name))


def expected(folder: Path, kind: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / kind / "expected.json").read_text())
    return content


def copied(folder: Path, kind: str, target: Path) -> JobDirectory:
    """A copy of a stopped run."""
    return JobDirectory(Path(shutil.copytree(folder / kind / "directory", target / kind)))


def check_equal(release: Release, before: dict[str, Any], now: dict[str, Any]) -> None:
    """A continued run is the undisturbed run of the release: bit for bit, unless other libraries round otherwise."""
    assert now["samples"] == before["samples"]
    assert now["losses"] == pytest.approx(before["losses"], rel=_TOLERANCE)
    same = (now["torch"], now["processor"]) == (before["torch"], before["processor"])
    if same and release.name not in NUMERICS_CHANGED:
        assert (now["losses"], now["evalLoss"], now["weights"]) == tuple(
            before[name] for name in ("losses", "evalLoss", "weights")
        )


@pytest.fixture(scope="module")
def continued(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """What the runs of all releases gave after they were continued, by release and kind; in one process."""
    folder = tmp_path_factory.mktemp("continued")
    runs: dict[tuple[str, str], JobDirectory] = {}
    for release in releases():
        unpacked = release.unpack(folder / release.name)
        runs |= {(release.name, kind): JobDirectory(unpacked / kind / "directory") for kind in KINDS}
    command = [sys.executable, "-m", "tests.releases.resume", *(str(directory.root) for directory in runs.values())]
    done = subprocess.run(command, check=True, env={**os.environ, **NUMERICS}, stdout=subprocess.PIPE, text=True)
    return dict(zip(runs, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_stopped_run_continues_to_the_same_bits(
    kind: str, recorded: tuple[Release, Path], continued: dict[tuple[str, str], dict[str, Any]]
) -> None:
    release, folder = recorded
    result = continued[release.name, kind]
    assert int(result["restored"].split("-")[1].split(".")[0]) >= STOPPED_AFTER
    check_equal(release, expected(folder, kind), result)


@pytest.mark.parametrize("kind", KINDS)
def test_commands_read_a_stopped_run_and_its_model(
    kind: str, recorded: tuple[Release, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder = recorded
    directory = copied(folder, kind, tmp_path)
    job, plan = job_of(directory), files.read_json(directory.plan)
    assert job is not None
    assert plan is not None
    assert fingerprint(job) == plan["fingerprint"]
    assert not is_trained(directory, job)
    code, out, error = run_spotune(capsys, "checkpoint", "ls", directory.root, "--output", "json")
    assert code == 0, error
    assert [found["state"] for found in json.loads(out)["checkpoints"]] == ["whole", "whole"]
    code, _, error = run_spotune(capsys, "checkpoint", "verify", directory.root)
    assert code == 0, error
    progress = parse_progress(json.loads(directory.status.read_text()))  # as the operator reads it from a supervisor
    assert (progress.step or 0) >= STOPPED_AFTER
    report = tmp_path / "report.html"
    code, _, error = run_spotune(capsys, "report", directory.root, "--file", report)
    assert code == 0, error
    assert f"release-{kind}" in report.read_text()
    before = expected(folder, kind)
    code, out, error = run_spotune(capsys, "predict", folder / kind / "export", before["prompt"], "--output", "json")
    assert code == 0, error
    assert json.loads(out) == before["predicted"]


@pytest.mark.long
@pytest.mark.ray
@pytest.mark.parametrize("kind", KINDS)
def test_the_command_continues_a_stopped_run(
    kind: str, recorded: tuple[Release, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With supervisor, driver and Ray, as a user does."""
    _, folder = recorded
    for name, value in NUMERICS.items():
        monkeypatch.setenv(name, value)
    directory = copied(folder, kind, tmp_path)
    run(folder / kind / "job.json", directory.root, tmp_path / "run.log")
    result = json.loads(directory.result.read_text())
    assert result["exportSha256"] == expected(folder, kind)["weights"]


@RELEASES
def test_the_plain_manifest_of_the_release_is_kept(release: Release) -> None:
    assert "kind: Deployment" in (release.folder / "install.yaml").read_text()
