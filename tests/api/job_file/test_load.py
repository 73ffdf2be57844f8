"""Loading jobs and services from files: numbers, anchors, kinds, paths and replaced fields."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import get_args, get_origin

import pytest
from pydantic import BaseModel

from spotune.custom_resource.base import OptionalSource, RawSource, Source
from spotune.errors import JobError
from spotune.job import FinetuneJob
from spotune.job_file.load import (
    SOURCE_FIELDS,
    load_job,
    load_resource,
    load_service,
    parse_job,
    parse_service,
    read_document_of_kind,
    replace_fields,
    resolve_paths,
    sources_of,
)
from spotune.job_file.yaml_file import Document
from spotune.service import ModelService
from spotune.sweep import FinetuneSweep
from tests.api.support.job_files import FULL_JOB_FILE, JOB_FILE, a_job
from tests.api.support.service_files import SERVICE_FILE, a_service
from tests.api.support.sweep_files import SWEEP_FILE


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("number", ["1e-4", "1.0e-4", "1E-04", "0.0001", "+1e-4", ".0001", "1.e-4"])
def test_a_learning_rate_is_a_number_however_it_is_written(number: str, tmp_path: Path) -> None:
    text = JOB_FILE.replace("epochs: 3", f"epochs: 3, learningRate: {number}")
    assert load_job(written(tmp_path, text)).spec.training.learning_rate == 1e-4


def test_text_that_looks_a_little_like_a_number_stays_text(tmp_path: Path) -> None:
    text = JOB_FILE.replace("seq2seq}", "seq2seq, revision: 1e2b}")
    assert load_job(written(tmp_path, text)).spec.model.revision == "1e2b"


def test_anchors_and_merges_work_as_in_any_yaml(tmp_path: Path) -> None:
    text = JOB_FILE.replace(
        "  workers: {count: 2, min: 1}", "  workers: &pods {capacity: on-demand}\n  head: {<<: *pods, resources: {}}"
    )
    assert load_job(written(tmp_path, text)).spec.head.capacity == "on-demand"


def test_an_empty_document_at_the_end_is_no_second_job(tmp_path: Path) -> None:
    assert load_job(written(tmp_path, f"---\n{JOB_FILE}---\n")).metadata.name == "t5-wikisql"


def test_an_error_behind_a_merge_names_the_line_of_its_section(tmp_path: Path) -> None:
    text = JOB_FILE.replace("min: 1}", "min: 1, <<: {gpus: -1}}")
    with pytest.raises(JobError, match=r"job\.yaml:10: spec\.workers\.gpus: expected at least 0, not -1"):
        load_job(written(tmp_path, text))


def test_problems_can_be_read_by_programs(tmp_path: Path) -> None:
    file = written(tmp_path, JOB_FILE.replace("min: 1", "min: 0"))
    with pytest.raises(JobError) as raised:
        load_job(file)
    assert raised.value.as_json() == {
        "error": "JobError",
        "message": f"{file}:10: spec.workers.min: expected auto or a whole number from 1, not 0",
        "exitCode": 20,
        "problems": [
            {
                "file": str(file),
                "line": 10,
                "field": "spec.workers.min",
                "message": "expected auto or a whole number from 1, not 0",
            }
        ],
    }


def test_a_job_that_did_not_come_from_a_file_names_the_field_alone() -> None:
    content = {"apiVersion": "spotune.dev/v1alpha1", "kind": "FinetuneJob", "metadata": {"name": "a"}}
    with pytest.raises(JobError, match=r"^spec: is required$"):
        parse_job(Document(content))


@pytest.mark.parametrize(
    ("text", "model"), [(JOB_FILE, FinetuneJob), (SERVICE_FILE, ModelService), (SWEEP_FILE, FinetuneSweep)]
)
def test_a_file_is_read_as_what_its_kind_says(text: str, model: type[BaseModel], tmp_path: Path) -> None:
    assert type(load_resource(written(tmp_path, text))) is model


@pytest.mark.parametrize(
    ("load", "text", "message"),
    [
        (load_job, SERVICE_FILE, r"job\.yaml:2: kind: is 'ModelService'; expected kind: FinetuneJob$"),
        (load_service, JOB_FILE, r"job\.yaml:2: kind: is 'FinetuneJob'; expected kind: ModelService$"),
        (
            load_resource,
            JOB_FILE.replace("FinetuneJob", "RayJob"),
            r"job\.yaml:2: kind: is 'RayJob'; expected kind: FinetuneJob, ModelService or FinetuneSweep$",
        ),
        (
            load_resource,
            f"{JOB_FILE}---\n{SERVICE_FILE}",
            (
                r"holds 2 YAML documents \(FinetuneJob, ModelService\); "
                r"give one FinetuneJob, ModelService or FinetuneSweep per file$"
            ),
        ),
        (load_service, "- a\n", r"job\.yaml: is not a ModelService: it holds a list"),
        (load_service, SERVICE_FILE.replace("v1alpha1", "v1"), r"expected apiVersion: spotune\.dev/v1alpha1$"),
    ],
    ids=["service-for-a-job", "job-for-a-service", "neither", "both", "list", "version"],
)
def test_a_file_of_another_kind_names_the_kinds_that_are_possible(
    load: Callable[[Path], object], text: str, message: str, tmp_path: Path
) -> None:
    with pytest.raises(JobError, match=message):
        load(written(tmp_path, text))


def test_an_error_of_a_service_names_line_and_field(tmp_path: Path) -> None:
    file = written(tmp_path, SERVICE_FILE.replace("min: 1", "min: 4"))
    with pytest.raises(JobError) as raised:
        load_service(file)
    (problem,) = raised.value.problems
    assert (problem.file, problem.line, problem.field) == (str(file), 9, "spec.replicas.min")


def test_a_document_is_read_without_checks_of_its_fields(tmp_path: Path) -> None:
    file = written(tmp_path, SERVICE_FILE.replace("finetuneJob: t5-wikisql", "job: t5-wikisql"))
    document = read_document_of_kind(file, "FinetuneJob", "ModelService")
    assert document.kind == "ModelService"
    with pytest.raises(JobError, match=r"job\.yaml:5: spec\.model\.job: is not a field"):
        parse_service(document)


def test_relative_sources_become_absolute_and_others_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    job = a_job(
        model={"source": "~/t5", "tokenizer": "hf://google-t5/t5-small", "task": "seq2seq"},
        dataset={"train": {"source": "data/train"}, "eval": {"source": "/data/eval"}},
    )
    spec = resolve_paths(job, tmp_path).spec
    assert spec.model.source == "/home/me/t5"
    assert spec.model.tokenizer == "hf://google-t5/t5-small"
    assert spec.dataset.train is not None
    assert spec.dataset.train.source == str(tmp_path / "data/train")
    assert spec.dataset.eval is not None
    assert spec.dataset.eval.source == "/data/eval"
    assert job.spec.model.source == "~/t5"


def test_sources_of_a_mixture_become_absolute_and_are_named_by_their_place(tmp_path: Path) -> None:
    mixture = [
        {"name": "sql", "train": {"source": "data/sql"}, "eval": {"source": "/data/eval"}},
        {"name": "chat", "train": {"source": "s3://bucket/chat"}},
    ]
    job = resolve_paths(a_job(dataset={"mixture": mixture}), tmp_path)
    assert sources_of(job) == {
        "spec.model.source": str(tmp_path / "model"),
        "spec.dataset.mixture[0].train.source": str(tmp_path / "data/sql"),
        "spec.dataset.mixture[1].train.source": "s3://bucket/chat",
        "spec.dataset.mixture[0].eval.source": "/data/eval",
    }
    changed = replace_fields(job, {"spec.dataset.mixture[1].maxEpochs": 2})
    assert [source.max_epochs for source in changed.spec.dataset.mixture] == [0, 2]


def test_resolving_twice_changes_nothing(tmp_path: Path) -> None:
    once = resolve_paths(load_job(written(tmp_path, FULL_JOB_FILE)), tmp_path)
    assert resolve_paths(once, Path("/elsewhere")) == once


def test_every_source_of_the_language_is_resolved() -> None:
    checks = {str(get_args(kind)[1:]) for kind in (Source, RawSource, OptionalSource)}

    def sources(section: type[BaseModel], path: str) -> Iterator[str]:
        for name, field in section.model_fields.items():
            here = f"{path}.{field.alias or name}".removeprefix(".")
            here += "[]" if get_origin(field.annotation) is list else ""
            for annotation in (field.annotation, *get_args(field.annotation)):
                if isinstance(annotation, type) and issubclass(annotation, BaseModel):
                    yield from sources(annotation, here)
                elif str(get_args(annotation)[1:]) in checks:
                    yield here
            if str(tuple(field.metadata)) in checks:
                yield here

    assert set(sources(FinetuneJob, "")) == set(SOURCE_FIELDS)


def test_replaced_fields_are_checked_again() -> None:
    job = a_job()
    replaced = replace_fields(job, {"spec.workers.count": 4, "spec.training.maxSteps": 10})
    assert (replaced.spec.workers.count, replaced.spec.training.max_steps) == (4, 10)
    assert job.spec.workers.count == 1
    with pytest.raises(JobError, match=r"^spec\.workers\.count: expected at least 1, not 0$"):
        replace_fields(job, {"spec.workers.count": 0})


def test_replaced_fields_of_a_service_are_checked_again() -> None:
    service = a_service(replicas={"max": 2})
    replaced = replace_fields(service, {"spec.cluster.provider": "aks", "spec.replicas.min": 2})
    assert (replaced.spec.cluster.provider, replaced.spec.replicas.min) == ("aks", 2)
    assert service.spec.replicas.min == 1
    with pytest.raises(JobError, match=r"^spec\.replicas\.min: 3 is more than max, 2$"):
        replace_fields(service, {"spec.replicas.min": 3})
