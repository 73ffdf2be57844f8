"""`spotune run` rejects invalid jobs and directories before it writes anything, and names the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from spotune.cli.main import main
from spotune.errors import JobError, UsageError
from spotune.job import FinetuneJob
from spotune_trainer import files
from spotune_trainer.job_directory.job import put_job
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from spotune_trainer.job_directory.lock import locked
from spotune_trainer.supervisor.preflight.admission import (
    check_directory,
    missing_secrets,
    read_job,
    refuse_missing_gpus,
    resolve_job,
)

JOB_FILE = """\
apiVersion: spotune.dev/v1alpha1
kind: FinetuneJob
metadata: {name: tiny}
spec:
  model: {source: model, task: seq2seq}
  dataset: {train: {source: shards}}
  training: {epochs: 1}
  workers: {count: 2, min: 2, gpus: 0}
"""


@pytest.fixture
def job_file(tmp_path: Path) -> Path:
    for name in ("model", "shards"):
        (tmp_path / name).mkdir()
    path = tmp_path / "job.yaml"
    path.write_text(JOB_FILE)
    return path


@pytest.fixture
def directory(tmp_path: Path) -> JobDirectory:
    return JobDirectory(tmp_path / "runs" / "tiny")


def edit(job_file: Path, old: str, new: str) -> FinetuneJob:
    job_file.write_text(JOB_FILE.replace(old, new))
    return read_job(job_file, {})


def commit(directory: JobDirectory) -> None:
    folder = directory.checkpoints / "step-00000001.gen-1"
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text("{}")


def start(directory: JobDirectory, job: FinetuneJob) -> None:
    check_directory(directory, job)
    with locked(directory):
        put_job(directory, job)


def test_missing_metric_function_is_refused_with_its_line(job_file: Path) -> None:
    evaluation = "eval: {fraction: 0.5}}\n  training: {epochs: 1, evaluation: {generate: true, metrics: [%s]}}"
    old = "}\n  training: {epochs: 1}"
    dataset = ", prompt: '{a}', completion: '{b}', " + evaluation
    assert edit(job_file, old, dataset % '"json:dumps"').spec.training.evaluation.metrics == ["json:dumps"]
    with pytest.raises(
        JobError, match=r"job.yaml:7: spec.training.evaluation.metrics: judges:length: there is no module"
    ):
        edit(job_file, old, dataset % '"judges:length"')


def test_job_in_the_directory_is_the_given_one(job_file: Path, directory: JobDirectory) -> None:
    job = read_job(job_file, {"spec.workers.count": 1, "spec.training.maxSteps": 5})
    start(directory, job)
    again = FinetuneJob.model_validate(files.read_json(directory.job))
    assert again == job
    assert again.spec.workers.min == 1
    assert again.spec.model.source == str(job_file.parent / "model")


def test_missing_source_is_named_with_its_line(job_file: Path) -> None:
    with pytest.raises(JobError, match=r"job\.yaml:5: spec\.model\.source: .*nowhere does not exist"):
        edit(job_file, "source: model", "source: nowhere")


def test_source_may_be_a_pattern(job_file: Path) -> None:
    (job_file.parent / "part.jsonl").touch()
    pattern = "prepare: {source: '*.jsonl'}, prompt: '{a}', completion: '{b}'"
    edit(job_file, "train: {source: shards}", pattern)
    with pytest.raises(JobError, match="does not exist"):
        edit(job_file, "train: {source: shards}", pattern.replace("jsonl", "csv"))


def test_too_many_gpus_are_refused(job_file: Path) -> None:
    job = edit(job_file, "min: 2, gpus: 0", "min: 2, gpus: 800")
    with pytest.raises(JobError, match="1600 GPUs are needed"):
        refuse_missing_gpus(job)


def test_file_instead_of_a_directory_is_refused(job_file: Path) -> None:
    with pytest.raises(UsageError, match="is a file"):
        check_directory(JobDirectory(job_file / "run"), read_job(job_file, {}))


def test_folder_with_other_files_is_refused(job_file: Path) -> None:
    with pytest.raises(UsageError, match="holds other files and no job"):
        check_directory(JobDirectory(job_file.parent), read_job(job_file, {}))


def test_changed_fingerprint_is_refused_once_there_are_commits(job_file: Path, directory: JobDirectory) -> None:
    start(directory, read_job(job_file, {}))
    changed = edit(job_file, "epochs: 1", "epochs: 1, learningRate: 0.5")
    check_directory(directory, changed)
    commit(directory)
    with pytest.raises(JobError, match=r"spec\.training\.learningRate changed"):
        check_directory(directory, changed)


def test_longer_training_continues_and_drops_its_old_result(job_file: Path, directory: JobDirectory) -> None:
    start(directory, read_job(job_file, {}))
    commit(directory)
    directory.result.write_text("{}")
    start(directory, read_job(job_file, {}))
    assert directory.result.exists()
    start(directory, edit(job_file, "epochs: 1", "epochs: 2"))
    assert not directory.result.exists()


def test_damaged_job_is_not_overwritten(job_file: Path, directory: JobDirectory) -> None:
    start(directory, read_job(job_file, {}))
    directory.job.write_text('{"kind": "Pod"}')
    with pytest.raises(JobError, match="another version of spotune, or edited"):
        check_directory(directory, read_job(job_file, {}))


def test_error_of_a_second_run_names_the_process_of_the_first(directory: JobDirectory) -> None:
    with locked(directory), pytest.raises(UsageError, match=r"process \d+"), locked(directory):
        pass
    with locked(directory):
        pass


def test_finished_run_prints_its_result_again(
    job_file: Path, directory: JobDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    start(directory, read_job(job_file, {}))
    files.write_json(directory.result, {"steps": 7, "trainLoss": 0.5})
    arguments = ["run", str(job_file), "--directory", str(directory.root)]
    with pytest.raises(SystemExit) as text:
        main(arguments)
    assert text.value.code == 0
    assert "tiny is trained" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main([*arguments, "--output", "json"])
    expected = {"steps": 7, "trainLoss": 0.5, "export": str(directory.export)}
    assert json.loads(capsys.readouterr().out) == expected


def test_finished_run_whose_supervisor_was_killed_is_cleaned_up(
    job_file: Path, directory: JobDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    start(directory, read_job(job_file, {}))
    files.write_json(directory.result, {"steps": 7, "trainLoss": 0.5, "epochs": 1, "maxSteps": None})
    Ledger(directory).append("finished", step=7)
    files.write_json(directory.supervisor, {"pid": 1, "ray": None})
    with pytest.raises(SystemExit) as ended:
        main(["run", str(job_file), "--directory", str(directory.root)])
    assert ended.value.code == 0
    assert "tiny is trained" in capsys.readouterr().out
    assert not directory.supervisor.exists()
    assert not list(Ledger(directory).records("attempt-started"))


@pytest.mark.parametrize(
    ("change", "code"),
    [(("source: model", "source: nowhere"), 20), (("epochs: 1", "epochs: -1"), 20), (("epochs", "epoch"), 20)],
)
def test_invalid_job_writes_nothing(
    change: tuple[str, str], code: int, job_file: Path, directory: JobDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    job_file.write_text(JOB_FILE.replace(*change))
    with pytest.raises(SystemExit) as ended:
        main(["run", str(job_file), "--directory", str(directory.root)])
    assert ended.value.code == code
    assert "job.yaml:" in capsys.readouterr().err
    assert not directory.root.parent.exists()


def test_no_workers_are_bad_usage(job_file: Path, directory: JobDirectory) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["run", str(job_file), "--directory", str(directory.root), "--workers", "0"])
    assert ended.value.code == 2
    assert not directory.root.exists()


def test_folder_with_only_a_failure_status_is_still_a_job_directory(job_file: Path, directory: JobDirectory) -> None:
    directory.root.mkdir(parents=True)
    directory.status.write_text("{}")
    check_directory(directory, read_job(job_file, {}))


@pytest.mark.parametrize(
    ("environment", "fields"),
    [
        (
            {},
            [
                *("spec.model.tokenSecretRef", "spec.tracking.wandb.keySecretRef", "spec.output.hub.tokenSecretRef"),
                "spec.dataset.credentials",
            ],
        ),
        ({"HF_TOKEN": "t", "WANDB_API_KEY": "k", "AWS_PROFILE": "p"}, ["spec.dataset.credentials.endpoint"]),
        ({"HF_TOKEN": "t", "WANDB_API_KEY": "k", "AWS_PROFILE": "p", "S3_ENDPOINT_URL": "http://s3"}, []),
    ],
)
def test_content_of_a_secret_has_to_be_in_the_environment(
    job_file: Path, environment: dict[str, str], fields: list[str]
) -> None:
    content = JOB_FILE.replace("task: seq2seq", "task: seq2seq, tokenSecretRef: {name: hf, key: token}")
    secret = "credentials: {secretName: bucket, endpoint: 'http://s3'}"
    content = content.replace("{source: shards}", "{source: shards}, " + secret)
    hub = "  output: {hub: {repo: me/t5, tokenSecretRef: {name: hf, key: write}}}\n"
    job_file.write_text(content + "  tracking: {wandb: {project: p, keySecretRef: {name: wandb, key: key}}}\n" + hub)
    job = resolve_job(job_file, {})[0]
    assert [problem.field for problem in missing_secrets(job, environment)] == fields


def test_a_suspended_job_is_not_run(job_file: Path) -> None:
    job_file.write_text(JOB_FILE + "  suspend: true\n")
    with pytest.raises(JobError, match=r":9: spec\.suspend: a suspended job is not run"):
        read_job(job_file, {})
