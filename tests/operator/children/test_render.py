"""`spotune render`: its output, its errors and its imports."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.api.support.job_files import JOB_FILE
from tests.command_line import run_spotune

HEAVY = ("kopf", "kubernetes", "aiohttp", "ray", "torch")


@pytest.fixture
def job(tmp_path: Path) -> Path:
    file = tmp_path / "job.yaml"
    file.write_text(JOB_FILE)
    return file


def render(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    return run_spotune(capsys, "render", *words)


def test_json_and_yaml_hold_the_same_objects(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, as_yaml, _ = render(capsys, str(job))
    code, as_json, _ = render(capsys, str(job), "--output", "json")
    assert code == 0
    assert json.loads(as_json)["items"] == list(yaml.safe_load_all(as_yaml))


def test_options_override_fields(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--image", "registry.example/mine:2", "--storage-class", "fast-nfs", "--provider", "gke"]
    _, printed, _ = render(capsys, str(job), *options)
    assert "image: registry.example/mine:2" in printed
    assert "storageClassName: fast-nfs" in printed
    assert "cloud.google.com/gke-spot" in printed


def test_the_job_is_readable_in_the_config(job: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, printed, _ = render(capsys, str(job))
    assert "  job.yaml: |\n    apiVersion: spotune.dev/v1alpha1\n" in printed


@pytest.mark.parametrize(
    ("valid", "broken", "message"),
    [
        ("count: 2", "coumt: 2", "spec.workers.coumt: is not a field; did you mean count?"),
        (
            "training:",
            "storage: {storageClassName: azurefile}\n  training:",
            "spec.storage.storageClassName: azurefile is",
        ),
        ("training:", "head: {podTemplate: {spec: []}}\n  training:", "spec.head.podTemplate.spec: is a"),
    ],
)
def test_invalid_job_is_refused_by_field(
    valid: str, broken: str, message: str, job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job.write_text(JOB_FILE.replace(valid, broken, 1))
    code, out, error = render(capsys, str(job), "--provider", "aks")
    assert (code, out) == (20, "")
    assert message in error


def test_help_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code, printed, _ = render(capsys, "--help")
    assert code == 0
    assert "Example: spotune render job.yaml --provider aks" in printed


def test_nothing_heavy_is_imported(job: Path) -> None:
    script = f"""
import sys
from spotune.cli.main import main
try:
    main(["render", {str(job)!r}])
except SystemExit as ended:
    assert ended.code == 0
print([name for name in {HEAVY!r} if name in sys.modules], file=sys.stderr)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.stderr == "[]\n"


SERVICE_FILE = """\
apiVersion: spotune.dev/v1alpha1
kind: ModelService
metadata: {name: answers, namespace: team}
spec:
  model: {finetuneJob: sql}
  adapters: [{name: french, claim: {name: exports, path: team/french}}]
"""


@pytest.fixture
def service(tmp_path: Path) -> Path:
    file = tmp_path / "service.yaml"
    file.write_text(SERVICE_FILE)
    return file


def test_children_of_a_service_show_where_the_fingerprint_of_its_job_goes(
    service: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, printed, _ = render(capsys, str(service), "--provider", "gke", "--image", "registry.example/mine:2")
    assert code == 0
    assert "kind: RayService" in printed
    assert "/models/spotune-sql/team/sql-FINGERPRINT/export" in printed
    assert "french: /models/exports/team/french" in printed
    assert "image: registry.example/mine:2" in printed
    assert "cloud.google.com/gke-spot" in printed


def test_storage_class_is_refused_for_a_service(service: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, error = render(capsys, str(service), "--storage-class", "fast-nfs")
    assert (code, out) == (2, "")
    assert "--storage-class is for FinetuneJobs" in error


def test_invalid_service_is_refused_by_field(service: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service.write_text(SERVICE_FILE + "  resources: {limits: {nvidia.com/gpu: 1}}\n")
    code, out, error = render(capsys, str(service))
    assert (code, out) == (20, "")
    assert "spec.resources: must not contain nvidia.com/gpu: give GPUs per replica as spec.gpus" in error
