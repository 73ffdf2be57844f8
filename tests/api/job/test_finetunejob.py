"""The models of a FinetuneJob: defaults, names, round trips and checks across sections."""

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from spotune.custom_resource import Metadata, SecretKeyRef
from spotune.custom_resource.base import Section
from spotune.errors import JobError
from spotune.job import (
    CheckpointSpec,
    DatasetSpec,
    ExecutionSpec,
    FinetuneJob,
    FinetuneJobSpec,
    ModelSpec,
    ShardsSpec,
    TrainingSpec,
    WorkersSpec,
)
from spotune.job.training.metric import OBJECTIVE_METRICS
from spotune.job_file.load import load_job
from spotune.units.durations import Duration
from tests.api.support.job_files import FULL_JOB_FILE, a_job


def all_sections(section: type[BaseModel] = FinetuneJob) -> Iterator[type[BaseModel]]:
    yield section
    for field in section.model_fields.values():
        for annotation in (field.annotation, *get_args(field.annotation)):
            if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                yield from all_sections(annotation)


def test_every_field_but_source_data_and_length_has_a_default_that_works() -> None:
    spec = FinetuneJobSpec(
        given_model=ModelSpec(source="model"),
        given_dataset=DatasetSpec(train=ShardsSpec(source="shards")),
        training=TrainingSpec(epochs=1),
    )
    job = FinetuneJob(metadata=Metadata(name="job"), spec=spec)
    assert job.spec.checkpoint.every == "auto"
    assert job.spec.retry.hang_timeout.seconds == 1800
    assert job.spec.workers.capacity == "spot"
    assert job.spec.head.capacity == "on-demand"
    assert job.spec.training.evaluation.metrics == ["loss"]


def test_a_job_with_every_field_survives_a_round_trip_through_yaml_and_json(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(FULL_JOB_FILE)
    job = load_job(file)
    assert FinetuneJob.model_validate_json(job.model_dump_json()) == job
    file.write_text(yaml.safe_dump(job.model_dump(mode="json")))
    assert load_job(file) == job


def test_the_full_example_names_every_field_there_is(tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(FULL_JOB_FILE)

    def unset(section: BaseModel, path: str) -> Iterator[str]:
        for name in type(section).model_fields:
            value = getattr(section, name)
            if name not in section.model_fields_set:
                yield f"{path}.{name.removeprefix('given_')}"
            elif isinstance(value, BaseModel):
                yield from unset(value, f"{path}.{name.removeprefix('given_')}")

    # rows have one of several forms, evaluation data one of two origins; sft has no beta; status is the operator's
    exempt = {"job.status", "job.spec.dataset.eval.fraction", "job.spec.dataset.eval.seed"}
    exempt |= {"job.spec.dataset.text", "job.spec.dataset.messages"}
    exempt |= {"job.spec.training.preference.beta", "job.spec.training.preference.target_margin"}
    exempt |= {"job.spec.dataset.mixture", "job.spec.dataset.mixture_temperature"}  # instead of train and prepare
    user_code = ("function", "command", "code", "code_from", "config")  # instead of all the others
    exempt |= {f"job.spec.training.{field}" for field in user_code}
    exempt |= {"job.spec.workers.resources.requests", "job.spec.head.resources.limits"}
    exempt |= {"job.spec.serving.resources.requests", "job.spec.serving.gateway.resources.limits"}
    exempt |= {"job.spec.ttl_seconds_after_finished"}  # not beside serving
    assert set(unset(load_job(file), "job")) == exempt


def test_every_field_and_section_has_a_description_for_the_custom_resource_definition() -> None:
    bare = [f"{section.__name__}.{name}" for section in all_sections() for name, field in section.model_fields.items()]
    described = [
        f"{section.__name__}.{name}"
        for section in all_sections()
        for name, field in section.model_fields.items()
        if field.description
    ]
    assert described == bare
    assert all(section.__doc__ for section in all_sections())


def test_names_are_camel_case_in_json_and_snake_case_in_python() -> None:
    section = ExecutionSpec(micro_batch_size=4)
    assert section.model_dump(exclude_defaults=True) == {"microBatchSize": 4}


def test_sections_are_immutable() -> None:
    section = CheckpointSpec()
    with pytest.raises(ValidationError, match="frozen"):
        section.keep = 5  # type: ignore[misc]


def test_jobs_can_be_sent_to_other_processes() -> None:
    job = a_job(checkpoint={"every": "300s"})
    copy = pickle.loads(pickle.dumps(job))
    assert copy == job
    assert copy.spec.checkpoint.every.seconds == 300


@pytest.mark.parametrize(
    ("every", "kind"), [("auto", str), ("300s", Duration), (200, int)], ids=["auto", "duration", "steps"]
)
def test_checkpoint_interval_is_auto_or_a_duration_or_steps(every: str | int, kind: type) -> None:
    found = a_job(checkpoint={"every": every}).spec.checkpoint.every
    assert found == every
    assert type(found) is kind


@pytest.mark.parametrize(("stage", "allowed"), [(0, True), (3, True), ("auto", True), (True, False), ("2", False)])
def test_zero_stage_accepts_numbers_but_not_strings_or_booleans(stage: Any, allowed: bool) -> None:
    content = {"zero_stage": stage}
    if allowed:
        assert ExecutionSpec.model_validate(content).zero_stage == stage
    else:
        with pytest.raises(ValidationError, match="expected auto, 0, 1, 2 or 3"):
            ExecutionSpec.model_validate(content)


@pytest.mark.parametrize(
    ("fields", "row_format"),
    [
        ({}, None),
        ({"prompt": "{a}", "completion": "{b}"}, "completion"),
        ({"text": "body"}, "text"),
        ({"messages": "chat"}, "messages"),
    ],
)
def test_row_format_follows_from_the_template_that_is_given(fields: dict[str, str], row_format: str | None) -> None:
    dataset = DatasetSpec.model_validate({"train": {"source": "shards"}} | fields)
    assert dataset.row_format == row_format


def test_doubled_braces_are_text_and_no_column() -> None:
    dataset = {"train": {"source": "shards"}, "prompt": "{{json}} {a}", "completion": "{b}"}
    assert DatasetSpec.model_validate(dataset).prompt == "{{json}} {a}"
    with pytest.raises(ValidationError, match=r"has no \{column\} in it"):
        DatasetSpec.model_validate(dataset | {"prompt": "{{json}}"})


@pytest.mark.parametrize(("gpus", "world_size", "least"), [(0, 4, 2), (1, 4, 2), (8, 32, 16)])
def test_one_gpu_is_one_worker_process_and_a_pod_without_gpus_is_one_too(
    gpus: int, world_size: int, least: int
) -> None:
    workers = WorkersSpec(count=4, min=2, gpus=gpus)
    assert (workers.world_size, workers.min_world_size) == (world_size, least)


def test_metadata_and_status_that_the_api_server_adds_are_passed_over(tmp_path: Path) -> None:
    content = yaml.safe_load(FULL_JOB_FILE)
    content["metadata"] |= {"uid": "1", "resourceVersion": "2", "generation": 3, "managedFields": [{}]}
    content["status"] = {"phase": "Training", "step": 7, "conditions": [], "fieldOfANewerVersion": 1}
    file = tmp_path / "job.yaml"
    file.write_text(yaml.safe_dump(content))
    job = load_job(file)
    assert job.metadata == Metadata(
        name="t5-wikisql", namespace="team", labels={"team": "nlp"}, annotations={"why": "because"}
    )
    assert job.status is not None
    assert job.status.step == 7


def test_a_name_may_be_as_long_as_its_pods_allow() -> None:
    assert Metadata(name="a" * 40).name == "a" * 40
    with pytest.raises(ValidationError, match="has 41 characters"):
        Metadata(name="a" * 41)


def test_unknown_fields_are_errors_in_python_too() -> None:
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        SecretKeyRef.model_validate({"name": "a", "key": "b", "kye": "c"})


FINITE = st.floats(min_value=1e-12, max_value=1e3)
TRAINING = st.fixed_dictionaries(
    {"epochs": st.integers(1, 100), "globalBatchSize": st.integers(64, 2**20), "learningRate": FINITE},
    optional={
        "maxSteps": st.integers(1, 10**9),
        "weightDecay": FINITE,
        "seed": st.integers(0, 2**32 - 1),
        "scheduler": st.sampled_from(["linear", "cosine", "constant"]),
    },
)
EXECUTION = st.fixed_dictionaries(
    {},
    optional={
        "microBatchSize": st.just("auto") | st.integers(1, 64),
        "zeroStage": st.sampled_from(["auto", 0, 1, 2, 3]),
        "compile": st.sampled_from(["auto", True, False]),
    },
)
EVERY = st.just("auto") | st.integers(1, 10**6) | st.integers(1, 10**4).map(lambda seconds: f"{seconds}s")
SOURCES = st.from_regex(r"(hf|s3|gs|az)://[a-z0-9-]+/[a-z0-9.-]+|[a-z0-9][a-z0-9./-]*", fullmatch=True)
JOBS = st.builds(
    lambda source, training, execution, every: a_job(
        model={"source": source}, training=training, execution=execution, checkpoint={"every": every}
    ),
    SOURCES,
    TRAINING,
    EXECUTION,
    EVERY,
)


@settings(max_examples=50, deadline=None)
@given(JOBS)
def test_any_valid_job_survives_json_and_yaml(job: FinetuneJob) -> None:
    assert FinetuneJob.model_validate_json(job.model_dump_json()) == job
    assert FinetuneJob.model_validate(yaml.safe_load(yaml.safe_dump(job.model_dump(mode="json")))) == job
    assert FinetuneJob.model_validate_json(job.model_dump_json(exclude_defaults=True)) == job


def test_all_sections_share_the_rules_of_section() -> None:
    assert all(issubclass(section, Section) for section in all_sections())


def test_tasks_choose_the_best_and_the_stop_without_evaluation_data() -> None:
    harness = {"tasks": ["arc_easy"], "everySteps": 50}
    of_tasks = {"harness": harness, "best": {"metric": "arc_easy/acc"}, "earlyStopping": {"patience": 2}}
    evaluation = a_job(training={"epochs": 1, "evaluation": of_tasks}).spec.training.evaluation
    assert evaluation.compared_every_steps == 50
    for further in ({"everySteps": 10}, {"best": {"metric": "loss"}, "everySteps": 10}):
        with pytest.raises(JobError, match=r"training\.evaluation: has no evaluation data"):
            a_job(training={"epochs": 1, "evaluation": {**of_tasks, **further}})


@pytest.mark.parametrize(
    ("objective", "metric"), [(each, metric) for each, metrics in OBJECTIVE_METRICS.items() for metric in metrics]
)
def test_the_best_is_found_by_what_an_objective_evaluates(objective: str, metric: str) -> None:
    evaluation = {"everySteps": 10, "best": {"metric": metric}, "earlyStopping": {}}
    training = TrainingSpec.model_validate({"objective": objective, "epochs": 1, "evaluation": evaluation})
    assert training.evaluation.best is not None
    assert training.evaluation.best.prefers_lower == (metric in ("rewardRejected", "kl"))


def test_the_service_of_a_job_is_called_like_the_job_unless_it_has_a_name() -> None:
    assert a_job().service_name == ""
    assert a_job(serving={}).service_name == "job"
    assert a_job(serving={"name": "sql"}).service_name == "sql"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"serving": {"name": "sql", "adapters": [{"name": "sql", "finetuneJob": "a"}]}}, "model's own id 'sql'"),
        ({"serving": {"capacity": "mixed", "onDemandBase": 2}}, "more than replicas.max"),
        ({"serving": {"model": {"finetuneJob": "other"}}}, "model"),
        ({"serving": {}, "ttlSecondsAfterFinished": 60}, "would delete the ModelService of spec.serving"),
        ({"serving": {}, "adapter": {"lora": {}}, "output": {"mergeAdapter": False}}, "without its base model"),
    ],
)
def test_a_service_that_cannot_serve_the_job_is_refused(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(JobError, match=message):
        a_job(**sections)
