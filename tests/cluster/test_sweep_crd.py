"""A real API server with our definition of FinetuneSweeps sets the defaults and refuses what the models refuse."""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from spotune.job_file.load import load_sweep, parse_sweep
from spotune.job_file.yaml_file import Document
from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from tests import ROOT
from tests.api.support.sweep_files import FULL_SWEEP_FILE, SWEEP_FILE
from tests.api.sweep.test_broken_sweep_files import WITHOUT_EVALUATION, WRONG_COMBINATIONS, WRONG_VALUES
from tests.cluster.definitions import apply_definitions, dry_run, explained

pytestmark = pytest.mark.cluster

EXAMPLE = ROOT / "examples" / "sweep" / "sweep.yaml"
BROKEN = [*WRONG_VALUES, *WRONG_COMBINATIONS]
FROZEN = "is immutable after the first trial"
TRIAL = {"number": 0, "name": "t5-search-0", "state": "Running", "parameters": {"training.globalBatchSize": 32}}
NAMED_OTHERWISE = {"long name": "metadata.name: 36 characters at most"}
"""Error messages that do not start with `FIELD: ` and the field that the models name."""


@pytest.fixture(scope="module", autouse=True)
def _definition(cluster: ClusterUnderTest) -> None:
    apply_definitions(cluster.kubectl)


@pytest.fixture
def sweep(namespace: Kubectl) -> Iterator[Kubectl]:
    """A namespace with the small sweep, t5-search."""
    with small_sweep(namespace):
        yield namespace


@pytest.fixture(scope="module")
def started(cluster: ClusterUnderTest) -> Iterator[Kubectl]:
    """A namespace with the small sweep after its first trial; the same for all tests, which change it by dry-run."""
    with temporary_namespace(cluster.kubectl) as kubectl, small_sweep(kubectl):
        patch(kubectl, {"status": {"observedGeneration": 1, "trials": [TRIAL]}}, "--subresource=status")
        yield kubectl


@contextmanager
def small_sweep(kubectl: Kubectl) -> Iterator[None]:
    """Create the small sweep. It is being deleted, so an installed operator leaves it alone."""
    create(kubectl, SWEEP_FILE.replace("{name: t5-search}", "{name: t5-search, finalizers: [spotune.dev/test]}"))
    kubectl("delete", "ftsweep", "t5-search", "--wait=false")
    yield
    patch(kubectl, {"metadata": {"finalizers": None}})


def create(kubectl: Kubectl, text: str) -> None:
    """Create a sweep in the namespace of kubectl instead of the namespace in the file."""
    kubectl("create", "--filename=-", stdin=text.replace("namespace: team, ", ""))


def patch(kubectl: Kubectl, content: dict[str, Any], *options: str) -> None:
    kubectl("patch", "ftsweep", "t5-search", "--type=merge", "--patch", json.dumps(content), *options)


@pytest.mark.parametrize("text", [SWEEP_FILE, FULL_SWEEP_FILE, EXAMPLE.read_text()], ids=["small", "full", "example"])
def test_a_valid_sweep_is_stored_with_every_default_of_the_models(
    text: str, namespace: Kubectl, tmp_path: Path
) -> None:
    suspended = text if "suspend" in text else text.replace("\nspec:\n", "\nspec:\n  suspend: true\n")
    file = tmp_path / "sweep.yaml"
    file.write_text(suspended)
    create(namespace, suspended)
    [stored] = namespace.get("finetunesweeps")
    sweep = parse_sweep(Document(stored))
    assert sweep.spec == load_sweep(file).spec
    assert sweep.spec.model_dump(exclude_unset=True) == sweep.spec.model_dump(exclude_none=True)


@pytest.mark.parametrize(
    ("name", "valid", "broken", "line"), BROKEN, ids=[case[0].replace(" ", "-") for case in BROKEN]
)
def test_a_sweep_that_the_models_refuse_is_refused_by_the_name_of_the_field(
    name: str, valid: str, broken: str, line: str, cluster: ClusterUnderTest
) -> None:
    field = line.split(":")[2].strip()
    expected = "spec.parameters" if field.startswith("spec.parameters") else field  # servers write the key in brackets
    with pytest.raises(KubectlError, match=re.escape(NAMED_OTHERWISE.get(name, expected))):
        dry_run(cluster.kubectl, "finetunesweeps", SWEEP_FILE.replace(valid, broken, 1))


def test_a_template_without_evaluation_data_is_refused(cluster: ClusterUnderTest) -> None:
    with pytest.raises(KubectlError, match=r"spec\.template\.spec\.(dataset\.eval|training\.evaluation)"):
        dry_run(cluster.kubectl, "finetunesweeps", WITHOUT_EVALUATION)


def test_an_unknown_field_is_refused_by_its_name(cluster: ClusterUnderTest) -> None:
    with pytest.raises(KubectlError, match=re.escape('unknown field "spec.template.spec.training.epoch"')):
        dry_run(cluster.kubectl, "finetunesweeps", SWEEP_FILE.replace("epochs: 3", "epochs: 3, epoch: 3"))


@pytest.mark.parametrize(
    "spec",
    [
        {"parameters": {"training.seed": {"values": [1, 2]}}},
        {"parameters": {"training.globalBatchSize": {"values": [32, 128]}}},
        {"search": {"seed": 1}},
        {"search": {"algorithm": "tpe"}},
        {"objective": {"mode": "minimize"}},
        {"earlyStopping": {"minSteps": 200}},
        {"template": {"spec": {"training": {"epochs": 4}}}},
        {"template": {"spec": {"workers": {"count": 2}}}},
    ],
    ids=["parameter", "values", "seed", "algorithm", "objective", "pruning", "training", "workers"],
)
def test_what_trials_are_compared_by_is_immutable_after_the_first_one(spec: dict[str, Any], started: Kubectl) -> None:
    with pytest.raises(KubectlError, match=FROZEN):
        patch(started, {"spec": spec}, "--dry-run=server")


@pytest.mark.parametrize(
    "spec",
    [{"search": {"trials": 20}}, {"maxConcurrent": 2}, {"budget": {"maxGpuHours": 5}}, {"suspend": True}],
    ids=["trials", "concurrency", "budget", "suspend"],
)
def test_how_a_sweep_runs_may_change_at_any_time(spec: dict[str, Any], started: Kubectl) -> None:
    patch(started, {"spec": spec}, "--dry-run=server")


def test_everything_may_change_before_the_first_trial(namespace: Kubectl) -> None:
    create(namespace, SWEEP_FILE.replace("  maxConcurrent: 4\n", "  suspend: true\n"))
    patch(namespace, {"spec": {"template": {"spec": {"training": {"epochs": 4}}}, "search": {"seed": 3}}})


def test_get_shows_how_it_is(sweep: Kubectl) -> None:
    counts = {"running": 2, "complete": 3, "pruned": 4, "failed": 1, "waiting": 2}
    best = {"number": 1, "name": "t5-search-1", "value": 0.25, "parameters": {"training.globalBatchSize": 32}}
    status = {"phase": "Running", "counts": counts, "best": best, "gpuHours": 1.5}
    patch(sweep, {"status": status}, "--subresource=status")
    header, row = (re.split(r" {2,}", line.strip()) for line in sweep("get", "ftsweep").splitlines())
    assert header == [
        *("NAME", "PHASE", "RUNNING", "COMPLETE", "PRUNED", "FAILED", "WAITING", "BEST", "VALUE", "GPU HOURS", "AGE")
    ]
    assert row[:-1] == ["t5-search", "Running", "2", "3", "4", "1", "2", "t5-search-1", "0.25", "1.5"]


def test_explain_reads_like_documentation(cluster: ClusterUnderTest) -> None:
    shown = explained(cluster.kubectl, "finetunesweep.spec.search")
    assert "How the parameters of each trial are chosen." in shown
