"""A real API server with our definition sets the same defaults and refuses the same values as the models."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune.job_file.load import load_job, parse_job
from spotune.job_file.yaml_file import Document
from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from tests import ROOT
from tests.api.job.test_code_source import REFUSED_CODE
from tests.api.job.test_training_function import REFUSED
from tests.api.job_file.test_broken_job_values import BROKEN
from tests.api.support.job_files import FULL_JOB_FILE, JOB_FILE
from tests.cluster.definitions import apply_definitions, dry_run, explained

pytestmark = pytest.mark.cluster


EXAMPLE = ROOT / "examples" / "text-to-sql" / "finetunejob.yaml"
OWN_FUNCTION = ROOT / "examples" / "own-function" / "finetunejob.yaml"
TORCHRUN = ROOT / "examples" / "torchrun" / "finetunejob.yaml"
FROZEN = "must not change after the first checkpoint"

NAMED_OTHERWISE = {
    "name that is a number": "cannot unmarshal number into Go struct field ObjectMeta.name",
    "label that is a number": "cannot unmarshal number into Go struct field ObjectMeta.labels",
    "no value": 'unknown field "spec.training.globalBatchSize:"',
    "not a number": "unsupported value: NaN",
    "template that is a mapping": 'unknown field "spec.dataset.text.body"',
    "two forms of text": "spec.dataset: ",
    "a preference objective without pairs": "spec.dataset: ",
    "pools: same name": 'spec.workers.pools[1]: Duplicate value: {"name":"a"}',
    "pools: same nodes": "spec.workers.pools: Invalid value",
    "pools: currencies": "spec.workers.pools: Invalid value",
}
"""Error messages for invalid jobs that do not start with `FIELD: ` and the field that the models name."""


@pytest.fixture(scope="module", autouse=True)
def _definition(cluster: ClusterUnderTest) -> None:
    apply_definitions(cluster.kubectl)


@pytest.fixture
def job(namespace: Kubectl) -> Kubectl:
    """A namespace with the full job, t5-wikisql."""
    create(namespace, FULL_JOB_FILE)
    return namespace


@pytest.fixture
def trained(job: Kubectl) -> Kubectl:
    """A namespace with the full job after its first checkpoint."""
    checkpoint(job)
    return job


@pytest.fixture(scope="module")
def frozen(cluster: ClusterUnderTest) -> Iterator[Kubectl]:
    """The same for all tests whose changes are refused."""
    with temporary_namespace(cluster.kubectl) as kubectl:
        create(kubectl, FULL_JOB_FILE)
        checkpoint(kubectl)
        yield kubectl


def checkpoint(job: Kubectl) -> None:
    """Write the first checkpoint of the full job to its status."""
    patch(job, {"status": {"lastCheckpoint": {"step": 1200, "time": "2026-01-02T03:04:05Z"}}}, "--subresource=status")


def create(kubectl: Kubectl, text: str) -> None:
    """Create a job in kubectl's namespace instead of the namespace in the file."""
    kubectl("create", "--filename=-", stdin=text.replace("namespace: team, ", ""))


def patch(kubectl: Kubectl, content: dict[str, Any], *options: str) -> None:
    """Change fields of the job; None removes a field."""
    kubectl("patch", "ftj", "t5-wikisql", "--type=merge", "--patch", json.dumps(content), *options)


@pytest.mark.parametrize(
    "text",
    [EXAMPLE.read_text(), OWN_FUNCTION.read_text(), TORCHRUN.read_text(), JOB_FILE, FULL_JOB_FILE],
    ids=["text-to-sql", "own-function", "torchrun", "small", "full"],
)
def test_a_valid_job_is_stored_with_every_default_of_the_models(text: str, namespace: Kubectl, tmp_path: Path) -> None:
    file = tmp_path / "job.yaml"
    file.write_text(text)
    create(namespace, text)
    [stored] = namespace.get("finetunejobs")
    job = parse_job(Document(stored))
    assert job.spec == load_job(file).spec
    assert job.spec.model_dump(exclude_unset=True) == job.spec.model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("name", "valid", "broken", "line"),
    BROKEN,
    ids=[case[0].replace(" ", "-") for case in BROKEN],
)
def test_a_job_that_the_models_refuse_is_refused_by_the_name_of_the_field(
    name: str, valid: str, broken: str, line: str, cluster: ClusterUnderTest
) -> None:
    field = line.split(":")[2].strip()
    with pytest.raises(KubectlError, match=re.escape(NAMED_OTHERWISE.get(name, f"{field}: "))):
        dry_run(cluster.kubectl, "finetunejobs", JOB_FILE.replace(valid, broken, 1))


@pytest.mark.parametrize(
    ("sections", "message"), REFUSED, ids=lambda case: "-".join(case) if isinstance(case, dict) else ""
)
def test_what_a_training_function_does_not_read_is_refused(
    sections: dict[str, Any], message: str, cluster: ClusterUnderTest
) -> None:
    job = yaml.safe_load(OWN_FUNCTION.read_text())
    for name, section in sections.items():
        job["spec"][name] = {**job["spec"].get(name, {}), **section}
    section = message.split(".")[1].partition(":")[0]
    with pytest.raises(KubectlError, match=rf"spec\.{section}.*(with training.function|package.module:function)"):
        dry_run(cluster.kubectl, "finetunejobs", json.dumps(job))


@pytest.mark.parametrize(("code_from", "message"), REFUSED_CODE)
def test_wrong_sources_of_code_are_refused(code_from: dict[str, Any], message: str, cluster: ClusterUnderTest) -> None:
    job = yaml.safe_load(OWN_FUNCTION.read_text())
    job["spec"]["training"] |= {"code": "", "codeFrom": code_from}
    with pytest.raises(KubectlError, match=re.escape(message)):
        dry_run(cluster.kubectl, "finetunejobs", json.dumps(job))


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"function": "train:train"}, "set function or command, not both"),
        ({"command": [""]}, "has no program: its first entry is empty"),
        ({"learningRate": 0.1}, "has fields that are not used with training.function and training.command"),
    ],
)
def test_what_a_command_does_not_read_is_refused(
    training: dict[str, Any], message: str, cluster: ClusterUnderTest
) -> None:
    job = yaml.safe_load(TORCHRUN.read_text())
    job["spec"]["training"] |= training
    with pytest.raises(KubectlError, match=message):
        dry_run(cluster.kubectl, "finetunejobs", json.dumps(job))


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"workers": {"min": 5}}, "must not be more than count"),
        ({"workers": {"min": 2, "count": 2, "onStraggler": "replace"}}, "replace needs a min below count"),
        ({"retry": {"hangTimeout": "30"}}, "expected a duration such as 30s, 5m, 1h30m or 500ms"),
        ({"execution": {"microBatchSize": "big"}}, "expected auto or a whole number from 1"),
        ({"execution": {"compile": "on"}}, 'Unsupported value: "on": supported values: "auto", "true", "false"'),
        ({"storage": {"size": -1}}, "spec.storage.size in body should be greater than or equal to 0"),
        (
            {"workers": {"resources": {"limits": {"cpu": "many"}}}},
            "spec.workers.resources.limits.cpu in body should match",
        ),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_refusal_says_what_is_allowed(spec: dict[str, Any], message: str, job: Kubectl) -> None:
    with pytest.raises(KubectlError, match=re.escape(message)):
        patch(job, {"spec": spec}, "--dry-run=server")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a" * 41, "metadata.name: 40 characters at most, because pod names are made from it"),
        ("a.b", "metadata.name: use a-z, 0-9 and -, and start and end with a letter or digit"),
    ],
    ids=["long", "with-a-dot"],
)
def test_a_name_that_pods_cannot_have_is_refused(name: str, message: str, cluster: ClusterUnderTest) -> None:
    with pytest.raises(KubectlError, match=message):
        dry_run(cluster.kubectl, "finetunejobs", JOB_FILE.replace("t5-wikisql", name))


def test_what_the_definition_cannot_say_is_left_to_the_operator(cluster: ClusterUnderTest) -> None:
    odd = "  adapter: {lora: {targetModules: 5}}\n  retry: {backoff: {initial: 2d, max: 1h}}\n  tracking:\n"
    dry_run(cluster.kubectl, "finetunejobs", JOB_FILE + odd)
    with pytest.raises(KubectlError, match=r"limits\.cpu .* must be of type integer,string"):
        dry_run(cluster.kubectl, "finetunejobs", JOB_FILE.replace("min: 1", "resources: {limits: {cpu: 1.5}}"))


def test_an_empty_section_is_left_out_or_filled_in(namespace: Kubectl) -> None:
    create(namespace, JOB_FILE + "  adapter:\n  execution:\n")
    spec = namespace.get("ftj", "t5-wikisql")["spec"]
    assert "adapter" not in spec
    assert spec["execution"]["zeroStage"] == "auto"


def test_server_side_apply_takes_every_form_of_a_field_with_several_types(namespace: Kubectl) -> None:
    """The schema of such a field has no type, but the API server must still replace the value, not merge it."""
    for modules, compiled in ((["q", "v"], False), (["k"], True), ("all-linear", "auto")):
        job = yaml.safe_load(JOB_FILE)
        job["spec"] |= {"adapter": {"lora": {"targetModules": modules}}, "execution": {"compile": compiled}}
        namespace.apply(job)
        stored = namespace.get("ftj", "t5-wikisql")["spec"]
        assert stored["adapter"]["lora"]["targetModules"] == modules
        assert stored["execution"]["compile"] == compiled


def test_everything_may_change_before_the_first_checkpoint(job: Kubectl) -> None:
    training = {"epochs": 1, "learningRate": 0.1, "maxSteps": None}
    patch(job, {"spec": {"model": {"revision": "v2"}, "adapter": None, "training": training}})


@pytest.mark.parametrize(
    ("section", "change"),
    [
        ("model", {"source": "hf://google-t5/t5-small"}),
        ("model", {"tokenSecretRef": None}),
        ("adapter", None),
        ("adapter", {"lora": {"r": 8}}),
        ("adapter", {"lora": {"targetModules": ["q", "v"]}}),
        ("dataset", {"eval": {"source": "s3://bucket/other"}}),
        ("storage", {"bucket": "s3://bucket/other"}),
        ("execution", {"precision": "fp8"}),
        ("dataset", {"keep": ["database", "question"]}),
        ("training", {"learningRate": 0.1}),
        ("training", {"evaluation": {"everySteps": 100}}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value or ["absent"]),
)
def test_what_is_trained_is_frozen_after_the_first_checkpoint(section: str, change: Any, frozen: Kubectl) -> None:
    field = "" if section == "adapter" else next(iter(change))
    refusal = {
        "adapter": f"spec.adapter: {FROZEN}",
        "storage": f"spec.storage.{field}: {FROZEN}",
        "execution": f"spec.execution.{field}: {FROZEN}",
    }.get(section, f"spec.{section}: {field} {FROZEN}")
    with pytest.raises(KubectlError, match=refusal):
        patch(frozen, {"spec": {section: change}})


def test_the_refusal_of_a_change_names_every_frozen_field_in_it(frozen: Kubectl) -> None:
    with pytest.raises(KubectlError, match=f"spec.training: learningRate, seed {FROZEN}"):
        patch(frozen, {"spec": {"training": {"learningRate": 0.1, "seed": 7, "epochs": 4}}})


def test_a_trained_model_and_its_dataset_must_not_go(frozen: Kubectl) -> None:
    absent = dict.fromkeys(("model", "dataset", "adapter", "serving"))
    with pytest.raises(KubectlError) as refused:
        patch(frozen, {"spec": absent})
    for section in ("model", "dataset", "adapter"):
        assert f"spec.{section}: {FROZEN}" in str(refused.value)


def test_a_frozen_job_does_not_thaw_without_its_status(frozen: Kubectl) -> None:
    stored = frozen.get("ftj", "t5-wikisql")
    del stored["status"]
    stored["spec"]["training"]["seed"] = 7
    with pytest.raises(KubectlError, match=r"spec\.training: seed"):
        frozen("replace", "--filename=-", stdin=json.dumps(stored))


def test_training_may_go_on_longer_but_not_stop_earlier(trained: Kubectl) -> None:
    patch(trained, {"spec": {"training": {"epochs": 4, "maxSteps": 2000}}})
    for field, less in (("epochs", 3), ("maxSteps", 1999)):
        with pytest.raises(KubectlError, match=rf"spec\.training\.{field}: may only grow"):
            patch(trained, {"spec": {"training": {field: less}}})
    patch(trained, {"spec": {"training": {"maxSteps": None}}})
    with pytest.raises(KubectlError, match="may only grow"):
        patch(trained, {"spec": {"training": {"maxSteps": 10**6}}})


def test_how_it_is_trained_may_change_at_any_time(trained: Kubectl) -> None:
    how = {
        "execution": {"microBatchSize": 4, "zeroStage": 3, "precision": "bf16"},
        "checkpoint": {"every": 200},
        "workers": {"count": 8, "min": 2},
        "retry": {"appFailureLimit": 5},
        "suspend": True,
    }
    patch(trained, {"spec": how})


def test_get_shows_how_far_it_is(trained: Kubectl) -> None:
    progress = {"phase": "Training", "step": 1240, "loss": 1.25, "eta": "2026-01-02T09:00:00Z", "workers": "3/4"}
    patch(trained, {"status": progress | {"restarts": {"total": 2, "preempted": 2}}}, "--subresource=status")
    header, row = (re.split(r" {2,}", line.strip()) for line in trained("get", "ftj").splitlines())
    assert header == ["NAME", "PHASE", "STEP", "LOSS", "ETA", "WORKERS", "RESTARTS", "CHECKPOINT", "AGE"]
    assert row[:-1] == ["t5-wikisql", "Training", "1240", "1.25", "2026-01-02T09:00:00Z", "3/4", "2", "1200"]


def test_explain_reads_like_documentation(cluster: ClusterUnderTest) -> None:
    shown = explained(cluster.kubectl, "finetunejob.spec.training")
    assert "Names follow Hugging Face TrainingArguments" in shown
    assert "epochs <integer> Passes over the training data. Set this, maxSteps, or both." in shown
    assert "enum: linear, cosine" in shown
