"""An upgrade from an earlier release while a job trains and a service answers, back, and again.

The definitions and the operator are installed by the chart of that release. The image of the running job and service
has its code; another job uses today's. `SPOTUNE_TEST_UPGRADE_FROM` names another release of tests/releases/recorded.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest
from tests import ROOT
from tests.cluster import chart, older_release, paced
from tests.cluster.finetune_jobs import ENDLESS, PACED, RunArtifacts, RunningJob, Workplace
from tests.cluster.model_services import RunningService, add_model, running_service, service_manifest
from tests.cluster.older_release import IMAGE, PYTHON_PATH, OlderRelease
from tests.cluster.operator_install import Operator
from tests.cluster.service_load import load_on
from tests.releases.definitions import Schema, schemas
from tests.releases.release import releases

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(3600)]

FROM = os.environ.get("SPOTUNE_TEST_UPGRADE_FROM", "before-v0.1.0")
SERVING = "serving.enabled=true"
NEW_STEPS = 10
"""Steps that the job makes between two changes of the release."""
ANSWERS = 10
STEPS_OF_SECOND_JOB = 40
_SECONDS_TO_REPORT = 120.0


@pytest.fixture(scope="module")
def older(
    cluster: ClusterUnderTest, operator: Operator, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[OlderRelease]:
    """The earlier release, installed; today's is installed again at the end."""
    (release,) = [found for found in releases() if found.name == FROM]
    known = subprocess.run(["git", "cat-file", "-e", release.about["commit"]], cwd=ROOT, check=False)
    if known.returncode != 0:
        pytest.skip(f"commit {release.about['commit']} of {FROM} is not in this clone: fetch its whole history")
    found = older_release.load(cluster, release, tmp_path_factory.mktemp("older"))
    chart.install(operator.kubectl, IMAGE, SERVING, chart=found.chart)
    yield found
    operator.install()


def fields_of_workers(schema: Schema) -> set[str]:
    return set(schema["properties"]["spec"]["properties"]["workers"]["properties"])


@dataclass
class Running:
    """The job and the service of the earlier release, and what must not change of them."""

    job: RunningJob
    service: RunningService

    def __post_init__(self) -> None:
        self.before = self.state()
        self.progress = self.job.progress()

    def state(self) -> dict[str, Any]:
        """Uids of all pods, with the restarts of their containers, and the pins."""
        pods = [*self.job.pods("head"), *self.job.pods("workers")]
        pods += [pod for component in ("head", "gateway", "replicas") for pod in self.service.pods(component)]
        restarts = {
            pod["metadata"]["uid"]: sum(each["restartCount"] for each in pod["status"]["containerStatuses"])
            for pod in pods
        }
        status = self.job.kubectl.get("ftj", self.job.name)["status"]
        return {
            "restarts of pods": restarts,
            "job": status["pinned"],
            "service": self.service.status()["pinned"],
            "clusters": sorted(self.job.kubectl("get", "rayclusters", "--output=name").split()),
        }

    def check(self) -> None:
        """New steps are made by the same worker group in the same pods, and the status reports them."""
        changed = time.time()
        step = self.job.progress()["step"]
        now = self.job.wait_for_step(step + NEW_STEPS, self.progress["generation"])
        for name in ("generation", "stepsLost", "restarts", "attempt"):
            assert now[name] == self.progress[name], name
        self.job.history.wait_for(
            "a status of the operator that was installed last",
            _SECONDS_TO_REPORT,
            lambda seen: seen.status.get("step", 0) >= step + NEW_STEPS and seen.holds("Ready"),
            since=changed,
        )
        self.service.wait_until_ready(2)
        assert self.state() == self.before


def assert_definitions(kubectl: Kubectl, expected: Schema) -> None:
    """The API server has the definition of a release."""
    (version,) = kubectl.get("crd", "finetunejobs.spotune.dev")["spec"]["versions"]
    assert fields_of_workers(version["schema"]["openAPIV3Schema"]) == fields_of_workers(expected)


def test_upgrade_rollback_and_upgrade_lose_no_step_and_no_request(
    cluster: ClusterUnderTest,
    operator: Operator,
    older: OlderRelease,
    workplace: Workplace,
    undisturbed: Callable[[int], RunArtifacts],
    tmp_path: Path,
) -> None:
    today = schemas((ROOT / "manifests/crd.yaml").read_text())["FinetuneJob"]
    before = older.release.schemas["FinetuneJob"]
    assert fields_of_workers(before) != fields_of_workers(today), "there is nothing to upgrade"
    assert_definitions(cluster.kubectl, before)
    add_model(workplace)
    provider = "aks" if workplace.cluster.machine else "none"
    sections: dict[str, dict[str, Any]] = {
        "training": {"maxSteps": ENDLESS},
        "checkpoint": {"every": 8},
        "workers": {"podTemplate": paced.pod_template(f"{PYTHON_PATH}:{PACED}")},
        "cluster": {"provider": provider, "image": IMAGE},
    }
    changes: list[tuple[Schema, Callable[[], None]]] = [
        (today, lambda: operator.install(SERVING)),
        (before, operator.roll_back),
        (today, operator.roll_back),  # to the revision before the last one, as Helm does
    ]
    answers = service_manifest(workplace, "answers", cluster={"provider": provider, "image": IMAGE})
    with (
        workplace.running(workplace.manifest("upgraded", **sections)) as job,
        running_service(workplace, answers) as service,
    ):
        job.wait_for_commit()
        service.wait_until_ready(2)
        running = Running(job, service)
        with load_on(service, threads=1) as load:  # the job needs the processors, too
            for definition, change in changes:
                answered = load.versions.total()
                change()
                assert_definitions(cluster.kubectl, definition)
                running.check()
                assert load.versions.total() >= answered + ANSWERS
                assert load.failed == []

            # The job file of the upgraded operator is read by the next supervisor, which has the older code.
            lost = job.progress()["restarts"]["headLost"]
            job.kubectl("delete", "pod", job.head()["metadata"]["name"], "--wait=false")
            job.wait_for_progress("the next head", lambda found: found["restarts"]["headLost"] > lost)
            step = job.progress()["step"]
            job.wait_for_step(step + NEW_STEPS)
            (image,) = {each["image"] for each in job.head()["spec"]["containers"]}
            assert image == IMAGE

            with workplace.running(workplace.manifest("second", training={"maxSteps": STEPS_OF_SECOND_JOB})) as second:
                second.wait_until_complete()
                check_equal(second, undisturbed(STEPS_OF_SECOND_JOB), tmp_path)
        assert load.failed == []

        job.finish_soon()
        ended = job.wait_until_complete()
        check_equal(job, undisturbed(ended.status["totalSteps"]), tmp_path)


def check_equal(job: RunningJob, reference: RunArtifacts, folder: Path) -> None:
    """A job has trained on the rows of an undisturbed run, and its weights equal those of that run."""
    artifacts = job.artifacts(folder)
    assert artifacts.samples() == reference.samples()
    assert artifacts.sha256() == reference.sha256()
