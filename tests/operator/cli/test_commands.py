"""The commands: help, options, exit codes, and imports before a cluster is contacted."""

import json
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from spotune.crd.definition import FINETUNE_JOBS
from spotune_client.cluster import resources
from spotune_client.logs import job_logs
from spotune_operator.cli import commands
from tests.command_line import run_spotune
from tests.operator.support.objects import finetune_job

COMMANDS = ("status", "watch", "logs", "events", "suspend", "resume", "tensorboard", "doctor")
HEAVY = ("kubernetes", "kopf", "aiohttp", "websocket", "ray", "torch")


@pytest.fixture(autouse=True)
def _no_kubeconfig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.delenv("KUBECONFIG", raising=False)
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_an_example_and_where_the_cluster_is_named(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_spotune(capsys, command, "--help")
    assert code == 0
    assert f"Example: spotune {command}" in out
    for option in ("--namespace", "-n", "--kubeconfig", "--context"):
        assert option in out


@pytest.mark.parametrize("command", COMMANDS)
def test_error_without_a_kubeconfig_says_how_to_get_one(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = [] if command in ("status", "doctor") else ["t5-sql"]
    code, out, error = run_spotune(capsys, command, *name)
    assert (code, out) == (2, "")
    assert "there is no kubeconfig" in error
    assert "az aks get-credentials" in error


def test_errors_are_json_with_output_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, error = run_spotune(capsys, "doctor", "--output", "json")
    assert (code, json.loads(error)["error"]) == (2, "UsageError")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["status", "t5-sql", "--all-namespaces"], "--all-namespaces shows the jobs of all namespaces: remove t5-sql"),
        (["status", "-A", "-n", "team"], "--all-namespaces shows the jobs of all namespaces: remove --namespace"),
        (["fleet", "-A", "-n", "team"], "--all-namespaces counts the jobs of all namespaces: remove --namespace"),
        (["suspend", "t5-sql", "--timeout", "30"], "--timeout: '30' is not a duration such as 30s"),
        (["logs", "t5-sql", "--lines", "-1"], "--lines"),
        (["logs", "ms/answers", "--since", "5"], "--since: '5' is not a duration such as 30s"),
        (["logs", "ms/answers", "--component", "worker"], "--component"),
        (["status", "pods/answers"], "pods/answers names no job and no service: write ftj/NAME"),
        (["suspend", "ms/answers"], "`spotune suspend` works on FinetuneJobs, and ms/answers is a ModelService"),
        (["suspend", "t5-sql", "--timeout", "30s"], "--timeout limits the time of --wait: add --wait"),
        (["fleet", "--file", "/"], "--file /: is a folder"),
        (["sweep", "t5-search", "--report", "/"], "--report /: is a folder"),
        (["report", "t5-sql", "--file", "/"], "--file /: is a folder"),
        (["report", "runs/x"], "there is no folder runs/x, and runs/x names no job and no service"),
        (["watch"], "NAME"),
    ],
)
def test_wrong_arguments_are_rejected_before_the_cluster_is_contacted(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, error = run_spotune(capsys, *words)
    assert code == 2
    assert message in error


def test_all_commands_are_entry_points_and_light_at_import() -> None:
    points = {point.name: point.value for point in entry_points(group="spotune.commands")}
    modules = {points[command].partition(":")[0] for command in COMMANDS}
    script = f"""
import importlib, sys
for module in {sorted(modules)!r}:
    importlib.import_module(module)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


@pytest.mark.parametrize(("found", "hint"), [((), True), (("driver-1: begins",), False)])
def test_logs_say_when_there_are_none(
    found: tuple[str, ...], hint: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_cluster", lambda *_: None)
    monkeypatch.setattr(resources, "find_object", lambda *_: (FINETUNE_JOBS, finetune_job()))
    monkeypatch.setattr(job_logs, "log_lines", lambda *_: iter(found))
    code, out, err = run_spotune(capsys, "logs", "t5-sql")
    assert (code, out) == (0, "".join(f"{line}\n" for line in found))
    assert ("There are no logs of t5-sql yet" in err) is hint
