"""Commands of the user in ranks: real programs under torchrun, their checkpoints, failures and notices."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import pytest

from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.retry import FailureCause
from spotune_trainer import files
from spotune_trainer.checkpoint.generations import choose_checkpoint, surviving_steps
from spotune_trainer.commands.locate import missing_user_code
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.notice import write_notice
from spotune_trainer.training.failures import ProgramError, classify, describe
from spotune_trainer.training.task import RankExit, RankResult
from spotune_trainer.worker_group.rank_process import has_hung
from spotune_trainer.worker_group.result import Failed, classify_exit
from tests import ROOT
from tests.trainer.training_functions.ranks import command_job, run_disturbed, run_generation, wait_for_commit
from tests.trainer.training_functions.test_worker import content_of

pytestmark = pytest.mark.slow

T = TypeVar("T")

PROGRAMS = Path(__file__).parent
EXAMPLE = ROOT / "examples" / "torchrun"
TORCHRUN = ("torchrun", "train.py", "--epochs", "2", "--rows", "640", "--save-every", "4")
STEPS = 20
"""Two epochs of 640 rows, 64 in a step."""


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "run")


def process_of(directory: JobDirectory, rank: int) -> int | None:
    """The process that torchrun has started as a rank of the job in `directory`."""
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().split(b"\0") if entry.name.isdigit() else []
            is_rank = f"RANK={rank}".encode() in variables and any(
                each.startswith(b"TORCHELASTIC_") for each in variables
            )
            if is_rank and any(each.startswith(f"SPOTUNE_TASK={directory.root}".encode()) for each in variables):
                return int(entry.name)
    return None


def programs_of(directory: JobDirectory) -> list[int]:
    """All processes that the commands of the job in `directory` have started."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and f"SPOTUNE_TASK={directory.root}".encode() in (entry / "environ").read_bytes():
                found.append(int(entry.name))
    return found


def wait_until(condition: Callable[[], T]) -> T:
    deadline = time.monotonic() + 180
    while not (value := condition()):
        assert time.monotonic() < deadline, "it did not happen within three minutes"
        time.sleep(0.05)
    return value


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> JobDirectory:
    """A run of torchrun on two nodes; a test that changes it copies it first."""
    finished = JobDirectory(tmp_path_factory.mktemp("torchrun") / "run")
    _, [(rank_exit, summary), second] = run_generation(finished, command_job(*TORCHRUN, code=EXAMPLE), nodes=2)
    assert (rank_exit, second) == (RankExit.TRAINED, (RankExit.TRAINED, {}))
    assert summary["steps"] == summary["exportStep"] == STEPS
    return finished


@pytest.mark.long
def test_torchrun_trains_through_a_killed_process_to_the_bits_of_an_undisturbed_run(
    directory: JobDirectory, undisturbed: JobDirectory
) -> None:
    job = command_job(*TORCHRUN, code=EXAMPLE)

    def kill_one() -> None:
        wait_for_commit(directory)
        process = process_of(directory, 1)
        assert process is not None
        os.kill(process, signal.SIGKILL)

    _, [error, _] = run_disturbed(directory, command_job(*TORCHRUN, "--pause", "1", code=EXAMPLE), kill_one)
    assert isinstance(error, ProgramError)
    assert (classify(error), str(error)) == (FailureCause.WORKER_LOST, "a process of torchrun was killed by SIGKILL")
    assert programs_of(directory) == []
    task, [(rank_exit, _), _] = run_generation(directory, job)
    assert rank_exit is RankExit.TRAINED
    assert task.restore is not None
    assert content_of(directory.export) == content_of(undisturbed.export)
    assert [line["step"] for line in surviving_steps(directory)] == list(range(1, STEPS + 1))
    progress = files.read_json(task.logs.progress)
    assert progress is not None
    assert (progress["step"], progress["totalSteps"], progress["phase"]) == (STEPS, STEPS, "Exporting")
    assert progress["seconds"]["productive"] > 0
    assert set(progress["startup"]) == {"import", "program", "restore", "firstStep"}


def test_a_damaged_checkpoint_is_named_as_the_process_has_found_it(
    directory: JobDirectory, undisturbed: JobDirectory
) -> None:
    shutil.copytree(undisturbed.root, directory.root)
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    content = bytearray((checkpoint.path / "state.pt").read_bytes())
    content[100] ^= 1
    (checkpoint.path / "state.pt").write_bytes(content)
    _, [error] = run_generation(directory, command_job(*TORCHRUN, code=EXAMPLE), world_size=1)
    failure = describe(0, error)
    assert (failure.kind, failure.checkpoint) == ("CorruptCheckpointError", str(checkpoint.name))


def test_sigterm_reaches_a_program_that_its_shell_leaves_behind(directory: JobDirectory) -> None:
    script = "trap '' HUP; python plain_program.py; true"
    job = command_job("bash", "-c", script, code=PROGRAMS, config={"steps": 600, "seconds": 0.1})

    def notify() -> None:
        wait_until(lambda: "starts after 0 steps" in log_of(directory, 1))
        time.sleep(1)
        write_notice(directory.notice, seconds=30, reason="suspended", stop=True)

    _, results = run_disturbed(directory, job, notify, world_size=1)
    assert results == [(RankExit.STOPPED, {})]
    assert json.loads((directory.command_checkpoints / "steps-0.json").read_text())


def test_a_group_with_spotune_train_leaves_after_its_next_checkpoint(directory: JobDirectory) -> None:
    def notify() -> None:
        wait_for_commit(directory)
        write_notice(directory.notice, seconds=30, reason="spot notice", leave=True)

    job = command_job(*TORCHRUN, "--epochs", "10000", "--pause", "0.2", code=EXAMPLE)
    _, [(rank_exit, _), other] = run_disturbed(directory, job, notify)
    assert (rank_exit, other) == (RankExit.YIELDED, (RankExit.YIELDED, {}))
    checkpoint = choose_checkpoint(directory).checkpoint
    assert checkpoint is not None
    assert [line["step"] for line in surviving_steps(directory)][-1] == checkpoint.name.step


def test_a_plain_program_gets_sigterm_at_a_notice_and_goes_on_from_its_own_checkpoint(directory: JobDirectory) -> None:
    def job(steps: int) -> FinetuneJob:
        config = {"steps": steps, "seconds": 0.1, "export": True}
        return command_job("python", "plain_program.py", code=PROGRAMS, config=config)

    def notify() -> None:
        wait_until(lambda: "starts after 0 steps" in log_of(directory, 1))
        time.sleep(1)
        write_notice(directory.notice, seconds=30, reason="suspended", stop=True)

    _, results = run_disturbed(directory, job(100_000), notify)
    assert results == [(RankExit.STOPPED, {}), (RankExit.STOPPED, {})]
    directory.notice.unlink()
    saved = json.loads((directory.command_checkpoints / "steps-0.json").read_text())
    assert len(saved) > 0
    steps = len(saved) + 5
    task, [(rank_exit, summary), _] = run_generation(directory, job(steps))
    assert rank_exit is RankExit.TRAINED
    assert f"starts after {len(saved)} steps" in log_of(directory, task.generation)
    assert json.loads((directory.export / "steps.json").read_text()) == list(range(1, steps + 1))
    assert summary["exportSha256"]


def test_a_program_that_ends_because_that_of_another_node_has_left_at_a_notice_has_not_failed(
    directory: JobDirectory, tmp_path: Path
) -> None:
    """The program of the first node loses its peer and fails before its rank has read the notice."""
    write_notice(tmp_path / "notice.json", seconds=60.0, reason="a spot notice", leave=True)
    notice = directory.generation_logs(1).agent_notice
    fails = f"python -c \"import os; os.rename('{tmp_path}/notice.json', '{notice}'); os._exit(1)\""
    job = command_job("bash", "-c", f"[ $NODE_RANK = 0 ] && exec {fails}; exec sleep 300", code=PROGRAMS)
    _, results = run_generation(directory, job, nodes=2)
    assert results == [(RankExit.YIELDED, {}), (RankExit.YIELDED, {})]


def reporting_job(steps: int, **config: Any) -> FinetuneJob:
    return command_job("python", "reporting_program.py", code=PROGRAMS, config={"steps": steps, **config})


def test_a_program_that_only_reports_gets_sigterm_at_a_notice(directory: JobDirectory) -> None:
    def notify() -> None:
        wait_until(lambda: len(list(files.read_lines(directory.generation_logs(1).steps))) >= 3)
        write_notice(directory.generation_logs(1).notice, seconds=30, reason="spot notice", leave=True)

    _, results = run_disturbed(directory, reporting_job(600, seconds=0.1), notify, world_size=1)
    assert results == [(RankExit.YIELDED, {})]
    saved = json.loads((directory.command_checkpoints / "step.json").read_text())
    assert 3 <= saved < 600


@pytest.fixture(scope="module")
def without_export(tmp_path_factory: pytest.TempPathFactory) -> Callable[[JobDirectory, bool], None]:
    """A function that copies a run of 6 steps whose model is lost. The checkpoint of its program is of step 4."""
    runs: dict[bool, JobDirectory] = {}

    def copy(directory: JobDirectory, saves: bool) -> None:
        if saves not in runs:
            runs[saves] = JobDirectory(tmp_path_factory.mktemp("reporting") / "run")
            run_generation(runs[saves], reporting_job(6, saveAt=4, name="first", saves=saves), world_size=1)
            shutil.rmtree(runs[saves].export)  # as if the node had been lost before the model was copied
        shutil.copytree(runs[saves].root, directory.root)

    return copy


@pytest.mark.long
@pytest.mark.parametrize(("saves", "model"), [(False, "model.json"), (True, "state.pt")])
def test_a_group_after_a_lost_export_repeats_the_steps_since_the_checkpoint_of_the_program(
    directory: JobDirectory, without_export: Callable[[JobDirectory, bool], None], saves: bool, model: str
) -> None:
    without_export(directory, saves)
    task, [(rank_exit, summary)] = run_generation(directory, reporting_job(6, name="second", saves=saves), world_size=1)
    assert task.restore == "step-00000006.gen-1"
    assert "starts after step 4" in log_of(directory, task.generation)
    assert (rank_exit, summary["steps"], summary["exportStep"]) == (RankExit.TRAINED, 6, 6)
    assert [path.name for path in directory.export.iterdir()] == [model]
    assert saves or json.loads((directory.export / model).read_text()) == ["second", 6]
    assert [line["step"] for line in surviving_steps(directory)] == [1, 2, 3, 4, 5, 6]


@pytest.mark.long
def test_a_program_that_has_nothing_to_do_after_a_lost_export_keeps_its_model(
    directory: JobDirectory, without_export: Callable[[JobDirectory, bool], None]
) -> None:
    without_export(directory, False)
    _, [(rank_exit, summary)] = run_generation(directory, reporting_job(4, isTrained=True), world_size=1)
    assert (rank_exit, summary["exportStep"]) == (RankExit.TRAINED, 6)
    assert json.loads((directory.export / "model.json").read_text()) == ["first", 6]


@pytest.mark.long
def test_a_group_after_a_lost_export_gets_sigterm_at_a_notice(
    directory: JobDirectory, without_export: Callable[[JobDirectory, bool], None]
) -> None:
    """The model of the first group is no checkpoint after which the program could leave."""
    without_export(directory, False)

    def notify() -> None:
        wait_until(lambda: list(files.read_lines(directory.generation_logs(2).steps)))
        write_notice(directory.generation_logs(2).notice, seconds=30, reason="spot notice", leave=True)

    _, results = run_disturbed(directory, reporting_job(600, seconds=0.1), notify, world_size=1)
    assert results == [(RankExit.YIELDED, {})]


def test_steps_that_do_not_ascend_are_an_error_of_the_command(directory: JobDirectory) -> None:
    _, [error] = run_generation(directory, reporting_job(6, repeatAt=3), world_size=1)
    assert classify(error) is FailureCause.APP_ERROR
    assert "training.command reported step 3 after step 3: report each step once" in str(error)


@pytest.mark.long
def test_a_program_that_reports_and_hangs_after_its_last_step_is_ended_with_its_stacks(directory: JobDirectory) -> None:
    """Output does not show that a program makes progress once it reports."""
    prints = "(while sleep 0.2; do echo .; done) & exec python reporting_program.py"
    config = {"steps": 2, "hangAt": 2}
    job = command_job("bash", "-c", prints, code=PROGRAMS, config=config, retry={"hangTimeout": "3s"})
    task, [error] = run_generation(directory, job, world_size=1)
    assert [line["step"] for line in files.read_lines(task.logs.steps)] == [1, 2]
    result = classify_exit(
        task.logs, [RankResult(0, 1, hung=has_hung(task.logs, 0), failure=describe(0, error))], {}, ""
    )
    assert isinstance(result, Failed)
    assert result.cause is FailureCause.HANG
    assert "rank 0 made no progress within retry.hangTimeout; stacks are in" in result.message
    assert "reporting_program.py" in task.logs.stacks(0).read_text()
    assert programs_of(directory) == []


def test_an_error_of_the_program_is_named(directory: JobDirectory) -> None:
    _, [error, _] = run_generation(directory, command_job("torchrun", "failing_program.py", code=PROGRAMS))
    assert classify(error) is FailureCause.APP_ERROR
    assert "torchrun ended with exit status 1: ValueError: the labels have 3 classes, the head has 2" in str(error)
    assert programs_of(directory) == []


def test_a_program_that_prints_nothing_for_too_long_hangs(directory: JobDirectory) -> None:
    config = {"steps": 1, "silent": True}
    job = command_job("python", "plain_program.py", code=PROGRAMS, config=config, retry={"hangTimeout": "3s"})
    _, [error, _] = run_generation(directory, job)
    assert classify(error) is FailureCause.HANG
    assert "training.command has printed nothing for" in str(error)
    assert programs_of(directory) == []


def test_processes_of_a_command_end_with_their_rank(directory: JobDirectory) -> None:
    job = command_job("bash", "-c", "sleep 300 & sleep 300", code=PROGRAMS)

    def kill_rank() -> None:
        started = wait_until(lambda: programs if len(programs := programs_of(directory)) >= 4 else [])
        [keeper] = [each for each in started if "keeper" in Path(f"/proc/{each}/cmdline").read_text()]
        rank = int(Path(f"/proc/{keeper}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill(rank, signal.SIGKILL)

    _, [status] = run_disturbed(directory, job, kill_rank, world_size=1)
    assert status == -signal.SIGKILL
    wait_until(lambda: not programs_of(directory))


def test_a_command_that_leaves_no_model_has_failed(directory: JobDirectory) -> None:
    _, [error] = run_generation(directory, command_job("true", code=PROGRAMS), world_size=1)
    assert isinstance(error, JobError)
    assert "training.command ended with exit status 0 and has left no model" in str(error)


@pytest.mark.parametrize(
    ("command", "problem"),
    [
        (("torchrnu", "train.py"), "there is no program torchrnu on the path"),
        (("./missing.sh",), "there is no program ./missing.sh in"),
        (("torchrun", "--nproc-per-node", "2", "missing.py"), "there is no script missing.py in"),
    ],
)
def test_a_program_that_is_not_there_is_found_before_it_runs(command: tuple[str, ...], problem: str) -> None:
    found = missing_user_code(command_job(*command, code=PROGRAMS))
    assert found is not None
    assert found.field == "spec.training.command"
    assert problem in found.message


def test_the_text_of_a_shell_is_no_script() -> None:
    command = "accelerate launch --num_machines $NNODES --machine_rank $NODE_RANK train.py"
    assert missing_user_code(command_job("bash", "-c", command, code=PROGRAMS)) is None


def log_of(directory: JobDirectory, generation: int) -> str:
    log = directory.generation_logs(generation).worker(0)
    return log.read_text() if log.exists() else ""
