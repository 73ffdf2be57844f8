"""The examples of pipelines: the workflow fits the CRD, and the Python functions train against a server.

Argo, Kubeflow and Airflow are not installed. Airflow's decorators are replaced by ones that record the task.
"""

from __future__ import annotations

import importlib.util
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from spotune.crd.definition import custom_resource_definition
from spotune.errors import TimedOutError
from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune_operator.notifications.targets import PHASES
from tests import ROOT
from tests.api.support.job_files import a_job
from tests.client.support.stateful_server import ROOT as API
from tests.client.support.stateful_server import Store, serving_store
from tests.operator.support.objects import condition

FOLDER = ROOT / "examples/pipelines"
OUTPUT = "pvc://claim/job/export"
JOB = f"{API}/namespaces/team/finetunejobs/job"


def loaded(name: str) -> ModuleType:
    """A module of the examples."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A server for the kubeconfig of the environment."""
    with serving_store(tmp_path) as (found, kubeconfig):
        monkeypatch.setenv("KUBECONFIG", str(kubeconfig))
        yield found


def ends_with(store: Store, **status: Any) -> None:
    """Let every job get this status once it has been read."""
    told = {"observedGeneration": 1, "step": 7, **status}

    def tell(found: dict[str, Any]) -> None:
        if "status" not in found:
            store.put(JOB, {**found, "status": told})

    store.after_get = tell


def test_the_workflow_waits_for_fields_and_phases_that_jobs_have() -> None:
    workflow = yaml.safe_load((FOLDER / "argo-workflow.yaml").read_text())
    assert (workflow["apiVersion"], workflow["kind"]) == ("argoproj.io/v1alpha1", "Workflow")
    templates = {template["name"]: template for template in workflow["spec"]["templates"]}
    assert workflow["spec"]["entrypoint"] in templates
    train = templates["train"]
    version = custom_resource_definition()["spec"]["versions"][0]
    status = version["schema"]["openAPIV3Schema"]["properties"]["status"]["properties"]
    for name in ("successCondition", "failureCondition"):
        path, phase = train["resource"][name].split(" == ")
        assert re.fullmatch(r"[A-Za-z0-9_.-]+", path)  # Argo parses it as a label selector
        assert path == "status.phase"
        assert phase in PHASES
    assert "phase" in status
    assert train["outputs"]["parameters"][0]["valueFrom"]["jsonPath"] == "{.status.output}"
    assert "output" in status
    for template in workflow["spec"]["templates"]:
        given = {each["name"] for each in template.get("inputs", {}).get("parameters", ())}
        used = set(re.findall(r"\{\{inputs\.parameters\.([\w-]+)\}\}", yaml.safe_dump(template)))
        assert used == given


def test_the_job_of_the_workflow_is_valid() -> None:
    workflow = yaml.safe_load((FOLDER / "argo-workflow.yaml").read_text())
    [train] = [each for each in workflow["spec"]["templates"] if each["name"] == "train"]
    values = {each["name"]: each["value"] for each in workflow["spec"]["arguments"]["parameters"]}
    text = re.sub(
        r"\{\{inputs\.parameters\.([\w-]+)\}\}", lambda found: values[found[1]], train["resource"]["manifest"]
    )
    job = parse_job(Document(yaml.safe_load(text)))
    assert (job.metadata.name, job.spec.training.learning_rate) == ("t5-sql", 1e-4)


def test_the_component_of_kubeflow_returns_where_the_model_is(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    ends_with(store, phase="Complete", output=OUTPUT, conditions=[condition("Complete", "True")])
    job = a_job().model_dump(mode="json", exclude_unset=True)
    assert loaded("kfp_pipeline").finetune(job, "team", 1.0) == OUTPUT
    assert JOB in store.objects
    assert "Complete 7" in capsys.readouterr().out
    ends_with(store, phase="Training")
    store.objects.clear()
    with pytest.raises(TimedOutError):
        loaded("kfp_pipeline").finetune(job, "team", 0.0)


def test_the_task_of_airflow_fails_for_good_with_the_message_of_the_job(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks: list[tuple[dict[str, Any], tuple[Any, ...]]] = []

    class AirflowFailException(Exception):  # noqa: N818 - its name in Airflow
        """Fails a task without a retry."""

    def task(_: Any, **options: Any) -> Any:
        return lambda *arguments: tasks.append((options, arguments))

    airflow, decorators, exceptions = (ModuleType(f"airflow{name}") for name in ("", ".decorators", ".exceptions"))
    decorators.dag = lambda **_: lambda function: function  # type: ignore[attr-defined]
    decorators.task = task  # type: ignore[attr-defined]
    exceptions.AirflowFailException = AirflowFailException  # type: ignore[attr-defined]
    for module in (airflow, decorators, exceptions):
        monkeypatch.setitem(sys.modules, module.__name__, module)

    dag = loaded("airflow_dag")
    [(options, (file, namespace, hours))] = tasks
    assert (options, Path(file).name, namespace, hours) == ({"retries": 3}, "finetunejob.yaml", "team", 24.0)
    given = tmp_path / "finetunejob.yaml"
    given.write_text(yaml.safe_dump(a_job().model_dump(mode="json", exclude_unset=True) | {"kind": "FinetuneJob"}))
    ends_with(store, phase="Complete", output=OUTPUT, conditions=[condition("Complete", "True")])
    assert dag.finetune(str(given), "team", 1.0) == OUTPUT
    store.objects.clear()
    ends_with(store, phase="Failed", conditions=[condition("Failed", "True", "AppError", "loss is nan")])
    with pytest.raises(AirflowFailException, match="job failed: loss is nan"):
        dag.finetune(str(given), "team", 1.0)
