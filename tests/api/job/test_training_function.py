"""Jobs with training.function: what they may set, and what their fingerprint covers."""

from typing import Any

import pytest

from spotune.errors import JobError
from spotune.fingerprint import fingerprint
from spotune.job import FinetuneJob
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document

REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"model": {"source": "m"}}, "spec.model: is not used with training.function and training.command: remove it"),
    ({"dataset": {"train": {"source": "d"}}}, "spec.dataset: is not used with training.function and training.command"),
    ({"adapter": {"lora": {}}}, "spec.adapter: is not used with training.function and training.command"),
    ({"serving": {}}, "spec.serving: is not used with training.function and training.command"),
    ({"training": {"maxSteps": 5}}, "spec.training.maxSteps: is not used with training.function and training.command"),
    (
        {"execution": {"zeroStage": 3}},
        "spec.execution.zeroStage: is not used with training.function and training.command",
    ),
    ({"checkpoint": {"every": 5}}, "spec.checkpoint.every: is not used with training.function and training.command"),
    (
        {"output": {"mergeAdapter": False}},
        "spec.output.mergeAdapter: is not used with training.function and training.command",
    ),
    ({"training": {"function": "train.py"}}, "spec.training.function: expected a function as package.module:"),
)
"""Sections of a job with a training function that are refused, and the begin of the message."""


def a_job(**sections: Any) -> FinetuneJob:
    training = {"function": "package.train:train", **sections.pop("training", {})}
    metadata = {"name": "own"}
    spec = {"training": training, **sections}
    api_version = "spotune.dev/v1alpha1"
    return parse_job(Document({"apiVersion": api_version, "kind": "FinetuneJob", "metadata": metadata, "spec": spec}))


def test_a_function_is_all_that_a_job_needs() -> None:
    job = a_job()
    assert job.spec.given_model is None
    assert job.spec.given_dataset is None
    assert not job.spec.prepares_data
    assert FinetuneJob.model_validate_json(job.model_dump_json()) == job


def test_a_bucket_may_keep_it() -> None:
    assert (
        a_job(storage={"bucket": "s3://b/j", "credentials": {"secretName": "keys"}}).spec.storage.bucket == "s3://b/j"
    )


def test_code_argument_and_number_of_checkpoints_may_be_set() -> None:
    job = a_job(
        training={"code": "code", "config": {"layers": [1, {"size": 2}]}}, checkpoint={"keep": 5, "keepEverySteps": 10}
    )
    assert job.spec.training.config == {"layers": [1, {"size": 2}]}


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_what_the_function_does_not_read_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as refused:
        a_job(**sections)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({}, "spec.model: is required, unless training.function or training.command names code of your own"),
        ({"model": {"source": "m"}}, "spec.dataset: is required, unless training.function or training.command names"),
        (
            {"model": {"source": "m"}, "dataset": {"train": {"source": "d"}}, "training": {"epochs": 1, "code": "."}},
            "spec.training.code: is only used by function and command: set one of them, or remove it",
        ),
    ],
)
def test_without_a_function_model_and_data_are_required(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as refused:
        a_job(**{**sections, "training": {"function": "", "epochs": 1, **sections.get("training", {})}})
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"function": "train:train"}, "spec.training.command: set function or command, not both"),
        ({"command": [""]}, "spec.training.command: has no program: its first entry is empty"),
        ({"epochs": 1}, "spec.training.epochs: is not used with training.function and training.command"),
        ({"code": "s3://bucket/code"}, "spec.training.code: must be a folder"),
    ],
)
def test_what_a_command_does_not_read_is_refused(training: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError) as refused:
        a_job(training={"function": "", "command": ["torchrun", "train.py"], **training})
    assert message in str(refused.value)


def test_a_command_may_change_after_the_first_checkpoint() -> None:
    job = a_job(training={"function": "", "command": ["torchrun", "train.py"]})
    changed = a_job(training={"function": "", "command": ["torchrun", "train.py", "--epochs", "8"], "code": "code"})
    assert fingerprint(changed) == fingerprint(job) != fingerprint(a_job())


def test_fingerprint_covers_the_function_but_not_where_it_is_and_its_argument() -> None:
    job = a_job()
    assert fingerprint(a_job(training={"code": "code", "config": {"epochs": 2}})) == fingerprint(job)
    assert fingerprint(a_job(training={"function": "package.train:other"})) != fingerprint(job)
