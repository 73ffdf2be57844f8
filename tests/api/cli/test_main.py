"""The command line: help, version, lazy commands of other packages, and printed errors."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from spotune.cli.main import main
from tests.api.support.job_files import FULL_JOB_FILE, JOB_FILE
from tests.api.support.service_files import SERVICE_FILE
from tests.command_line import run_spotune

COMMANDS = '''
import typer
from typing import Annotated

from spotune.errors import InfrastructureError, SupersededError

group = typer.Typer(no_args_is_help=True)


@group.command()
def ls(name: str, output: str = "text") -> None:
    """List things."""
    print(f"listed {name}")


@group.command()
def rm(name: str) -> None:
    """Remove things."""


def train(job: str, output: str = "text") -> int:
    """Train things."""
    if job == "storage":
        raise InfrastructureError("the volume is [full]: make room")
    if job == "old":
        raise SupersededError("generation 3 has taken over")
    if job == "heavy":
        import a_package_that_is_not_installed.part
    if job == "moved":
        import spotune_elsewhere.moved
    return 10 if job == "code" else 0
'''


@pytest.fixture
def other_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An installed package ``spotune_elsewhere`` with commands, as the trainer is one."""
    package = tmp_path / "spotune_elsewhere"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "commands.py").write_text(COMMANDS)
    (package / "heavy.py").write_text("import a_package_that_is_not_installed\n")
    metadata = tmp_path / "elsewhere-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(
        "[spotune.commands]\n"
        "train = spotune_elsewhere.commands:train\n"
        "things = spotune_elsewhere.commands:group\n"
        "uninstalled = spotune_elsewhere.heavy:command\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    for name in [name for name in sys.modules if name.startswith("spotune_elsewhere")]:
        del sys.modules[name]


def test_help_shows_examples_exit_codes_and_the_commands_of_all_packages(
    other_package: None, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run_spotune(capsys, "--help")
    assert code == 0
    for text in ("spotune run job.yaml --directory", "Exit codes", "validate", "plan", "train", "Train things"):
        assert text in out


def test_help_is_shown_without_arguments(other_package: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_spotune(capsys) == run_spotune(capsys, "--help")


def test_version_is_the_distributions(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run_spotune(capsys, "--version")
    assert code == 0
    assert out.startswith("spotune 0.")


def test_the_process_runs_its_own_arguments() -> None:
    program = [sys.executable, "-c", "from spotune.cli.main import main; main()", "--version"]
    ran = subprocess.run(program, capture_output=True, text=True, check=True)
    assert ran.stdout.startswith("spotune 0.")


def test_errors_keep_their_exit_code_if_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    with pytest.raises(SystemExit) as ended:
        main(["validate", "missing.yaml", "--output", "json"])
    sys.stderr.close()
    assert ended.value.code == 2


@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("words", [["crd"], ["plan", "--help"], ["--version"]])
def test_a_full_disk_under_standard_output_is_one_line_and_exit_code_10(words: list[str], unbuffered: str) -> None:
    program = [sys.executable, "-c", "from spotune.cli.main import main; main()", *words]
    with Path("/dev/full").open("w") as full:
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        ran = subprocess.run(program, stdout=full, stderr=subprocess.PIPE, text=True, check=False, env=environment)
    message = "standard output cannot be written: No space left on device. Make room there, or redirect it elsewhere\n"
    assert (ran.returncode, ran.stderr) == (10, message)


def test_errors_keep_their_exit_code_if_standard_error_is_full() -> None:
    program = [sys.executable, "-c", "from spotune.cli.main import main; main()", "validate", "missing.yaml"]
    with Path("/dev/full").open("w") as full:
        ran = subprocess.run(program, stdout=subprocess.PIPE, stderr=full, text=True, check=False)
    assert (ran.returncode, ran.stdout) == (2, "")


def test_other_errors_of_the_system_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(path: Path, *kinds: str) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("spotune.cli.validate.read_document_of_kind", broken)
    with pytest.raises(OSError, match="No space left"):
        main(["validate", "job.yaml"])


@pytest.mark.parametrize("words", [["plan", "--help"], ["validate", "--help"], ["--version"]])
def test_light_commands_import_nothing_heavy(words: list[str]) -> None:
    program = (
        "import sys\n"
        "from spotune.cli.main import main\n"
        "try:\n"
        f"    main({words!r})\n"
        "except SystemExit:\n"
        "    heavy = {'torch', 'ray', 'transformers', 'deepspeed', 'numpy', 'streaming', 'pyarrow'}\n"
        "    sys.exit(','.join(sorted(heavy & set(sys.modules))))\n"
    )
    # Run without coverage, which imports modules and prints messages.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, env=plain)
    assert ran.stderr == "\n"


def test_a_valid_job_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    code, out, err = run_spotune(capsys, "validate", str(file))
    assert (code, err) == (0, "")
    assert out.startswith(f"{file}: valid (t5-wikisql)\n")


def test_several_files_are_checked_in_turn_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    code, out, _ = run_spotune(capsys, "validate", str(file), str(file), "--output", "json")
    assert code == 0
    first, second = (json.loads(line) for line in out.splitlines())
    assert first == second
    assert (first["valid"], first["name"]) == (True, "t5-wikisql")


def test_jobs_and_services_are_checked_by_the_same_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job, service = tmp_path / "job.yaml", tmp_path / "service.yaml"
    job.write_text(JOB_FILE)
    service.write_text(SERVICE_FILE)
    code, out, err = run_spotune(capsys, "validate", str(job), str(service))
    assert (code, err) == (0, "")
    assert out.splitlines()[-1] == f"{service}: valid (text-to-sql)"
    _, out, _ = run_spotune(capsys, "validate", str(job), str(service), "--output", "json")
    found = [json.loads(line) for line in out.splitlines()]
    assert [each["kind"] for each in found] == ["FinetuneJob", "ModelService"]
    assert found[1] == {"file": str(service), "valid": True, "kind": "ModelService", "name": "text-to-sql"}


@pytest.mark.parametrize("option", [["--output", "json"], ["--output=json"]])
def test_errors_are_one_json_object_for_scripts(
    option: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(FULL_JOB_FILE.replace("compile: auto", "compile: sometimes"))
    line = next(number for number, text in enumerate(FULL_JOB_FILE.splitlines(), 1) if "compile: auto" in text)
    code, out, err = run_spotune(capsys, "validate", str(file), *option)
    found = json.loads(err)
    assert (code, out, found["exitCode"], found["error"]) == (20, "", 20, "JobError")
    assert found["problems"][0] == {
        "file": str(file),
        "line": line,
        "field": "spec.execution.compile",
        "message": 'expected auto, true or false, not "sometimes"',
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["validate"], "Missing argument 'FILE.yaml...' (see 'spotune validate --help')"),
        (["validate", "--out"], "No such option: --out (Possible options: --output) (see 'spotune validate --help')"),
        (["vlaidate"], "No such command 'vlaidate'. Did you mean 'validate'? (see 'spotune --help')"),
        (["tarin"], "No such command 'tarin'. Did you mean 'train'? (see 'spotune --help')"),
        (["things", "rn", "x"], "No such command 'rn' (see 'spotune things --help')"),
        (["--bogus"], "No such option: --bogus (see 'spotune --help')"),
    ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(
    words: list[str], message: str, other_package: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_spotune(capsys, *words) == (2, "", f"{message}\n")


def test_wrong_usage_is_json_for_scripts(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run_spotune(capsys, "validate", "--output", "json")
    message = "Missing argument 'FILE.yaml...' (see 'spotune validate --help')"
    assert (code, json.loads(err)) == (2, {"error": "UsageError", "message": message, "exitCode": 2})


def test_a_group_without_a_command_shows_its_help(other_package: None, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run_spotune(capsys, "things")
    assert (code, err) == (2, "Missing command (see 'spotune things --help')\n")
    assert "List things" in out


def test_a_command_of_another_package_runs(other_package: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_spotune(capsys, "things", "ls", "all") == (0, "listed all\n", "")


@pytest.mark.parametrize(
    ("job", "code", "message"),
    [
        ("well", 0, ""),
        ("code", 10, ""),
        ("storage", 10, "the volume is [full]: make room\n"),
        ("old", 30, "generation 3 has taken over\n"),
        (
            "heavy",
            2,
            (
                "spotune train needs the Python package a_package_that_is_not_installed, which is not installed: "
                "pip install 'spotune[elsewhere]'\n"
            ),
        ),
        (
            "moved",
            2,
            "spotune train needs spotune_elsewhere.moved, which is missing from this installation: reinstall spotune\n",
        ),
    ],
)
def test_errors_of_any_command_are_printed_and_set_the_exit_code(
    job: str, code: int, message: str, other_package: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_spotune(capsys, "train", job) == (code, "", message)
    if not message:
        assert run_spotune(capsys, "train", job, "--output", "json") == (code, "", "")


def test_a_command_whose_package_is_not_installed_is_listed_and_says_what_to_install(
    other_package: None, capsys: pytest.CaptureFixture[str]
) -> None:
    message = (
        "spotune uninstalled needs the Python package a_package_that_is_not_installed, which is not installed: "
        "pip install 'spotune[elsewhere]'"
    )
    assert run_spotune(capsys, "uninstalled", "job.yaml", "--workers", "2") == (2, "", f"{message}\n")
    code, out, _ = run_spotune(capsys, "--help")
    assert code == 0
    assert "uninstalled" in out


def test_a_missing_module_of_this_package_is_a_bug_and_keeps_its_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)

    def broken(path: Path, *kinds: str) -> None:
        raise ModuleNotFoundError("No module named 'spotune.gone'", name="spotune.gone")

    monkeypatch.setattr("spotune.cli.validate.read_document_of_kind", broken)
    with pytest.raises(ModuleNotFoundError, match=r"spotune\.gone"):
        main(["validate", str(file)])
