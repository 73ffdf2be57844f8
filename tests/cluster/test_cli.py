"""The commands against a real API server, by a user who has only the documented Role in one namespace.

There is no operator: the tests write the status of the job themselves.
"""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from spotune.job_file.load import parse_job
from spotune.job_file.yaml_file import Document
from spotune_operator.children.pods import SUPERVISOR_CONTAINER
from spotune_operator.children.resolved_job import ResolvedJob, resolve
from spotune_operator.children.storage import volume_claim
from spotune_operator.providers import NONE
from spotune_operator.reconcile.pinned import pin
from spotune_operator.settings import Settings
from spotune_testcluster.kubectl import Kubectl
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from spotune_testcluster.waiting import wait_for
from tests import ROOT
from tests.cluster.definitions import apply_definitions
from tests.cluster.operator_install import no_operator
from tests.cluster.pods import pod, restricted, run_in, wait_until_running

pytestmark = pytest.mark.cluster

PAGE = ROOT / "docs" / "how-to" / "from-the-terminal.md"
SPOTUNE = str(Path(sys.executable).with_name("spotune"))
JOB = "t5-sql"
HEAD_LABELS = {"spotune.dev/job": JOB, "app.kubernetes.io/component": "head"}
LEDGER = [
    {"time": 1767323040.0, "event": "attempt-started", "attempt": 1},
    {"time": 1767323041.0, "event": "attempt-ended", "attempt": 1, "exitCode": 10},
    {"time": 1767323042.0, "event": "attempt-started", "attempt": 2},
]
DRIVERS = {1: ["2026-01-02T03:04:00.500Z the head is lost"], 2: ["2026-01-02T03:04:03.000Z goes on"]}
TOLD = [
    "driver-1: 2026-01-02T03:04:00.500Z the head is lost",
    "job: 2026-01-02T03:04:01.000Z attempt 1 ended with exit code 10",
    "job: 2026-01-02T03:04:02.000Z attempt 2 starts",
    "driver-2: 2026-01-02T03:04:03.000Z goes on",
]
FOLDER = """
import json, sys
from pathlib import Path
from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.summary.writer.event_file_writer import EventFileWriter
from spotune_trainer.job_directory.layout import JobDirectory
place = JobDirectory(Path(sys.argv[1]))
ledger, drivers, job = json.loads(sys.argv[2])
place.logs.mkdir(parents=True)
place.job.write_text(json.dumps(job))
place.ledger.write_text("".join(json.dumps(record) + "\\n" for record in ledger))
for attempt, lines in drivers.items():
    place.driver_log(int(attempt)).write_text("".join(line + "\\n" for line in lines))
writer = EventFileWriter(str(place.tensorboard))
writer.add_event(Event(step=1))
writer.close()
"""
"""Script that makes the folder of a job on the volume."""
SUPERVISOR = """
import sys, threading
from pathlib import Path
from spotune_trainer.supervisor.control import ControlSignals, SupervisorStatus
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.supervisor.pod_api import PodApi
from spotune_trainer.supervisor.http_server import ProgressServer
place, control = JobDirectory(Path(sys.argv[1])), ControlSignals()
api = PodApi(place, control, SupervisorStatus(control))
with ProgressServer(place, lambda: None, "0.0.0.0", 8090, api.get_routes, api.post_routes):
    threading.Event().wait()
"""
"""Script that serves the supervisor's HTTP API without a training."""


class Running:
    """A running command and its output."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process
        assert process.stdout is not None
        self._out = process.stdout

    def line(self) -> str:
        """Wait for the next line of output and return it."""
        return self._out.readline().rstrip("\n")

    def ended(self) -> tuple[int, str]:
        """Wait until the command exits; returns exit code and the rest of its output."""
        rest = self._out.read()
        return self._process.wait(timeout=60), rest

    def interrupt(self) -> None:
        """Send SIGINT, as Ctrl-C does."""
        self._process.send_signal(signal.SIGINT)


@dataclass(frozen=True)
class Stage:
    """A namespace with a job that is not trained, and a user with the rights that the docs list.

    Attributes:
        cluster: The cluster.
        kubectl: kubectl in the namespace, with the rights of the administrator.
        resolved: The job.
        kubeconfig: The kubeconfig of the user.
    """

    cluster: ClusterUnderTest
    kubectl: Kubectl
    resolved: ResolvedJob
    kubeconfig: Path

    def words(self, command: str, *words: str) -> list[str]:
        """The command line of a command. Ctrl-C works, even if these tests run in the background."""
        return ["env", "--default-signal=INT", SPOTUNE, command, *words, "--kubeconfig", str(self.kubeconfig)]

    def run(self, command: str, *words: str, code: int = 0) -> str:
        """Run a command; returns its standard output, and standard error if it is expected to fail."""
        done = subprocess.run(self.words(command, *words), capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == code, f"{done.returncode}: {done.stdout}{done.stderr}"
        return done.stdout if code == 0 else done.stdout + done.stderr

    @contextmanager
    def started(self, command: str, *words: str, notices: bool = True) -> Iterator[Running]:
        """A running command, which is killed at the end of the block; its output, with or without its notices."""
        errors = subprocess.STDOUT if notices else subprocess.DEVNULL
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": errors, "text": True}
        with subprocess.Popen(self.words(command, *words), **pipes) as process:
            try:
                yield Running(process)
            finally:
                process.kill()

    def say(self, *conditions: tuple[str, str, str], **status: Any) -> None:
        """Write the job's status as the operator would."""
        job = self.kubectl.get("ftj", JOB)
        generation = job["metadata"]["generation"]
        told = [
            {"type": name, "status": value, "reason": "Test", "message": message}
            | {"observedGeneration": generation, "lastTransitionTime": "2026-01-02T03:04:05Z"}
            for name, value, message in conditions
        ]
        content = {**status, "observedGeneration": generation, "conditions": told}
        change = json.dumps([{"op": "add", "path": "/status", "value": content}])
        self.kubectl("patch", "ftj", JOB, "--subresource=status", "--type=json", "--patch", change)

    @contextmanager
    def head(self, name: str) -> Iterator[str]:
        """A head pod whose supervisor serves the job's folder; yields its name."""
        manifest = pod(name, self.cluster.image, self._python(SUPERVISOR), claims={"/data": self.resolved.claim})
        manifest["metadata"]["labels"] = HEAD_LABELS
        manifest["spec"]["containers"][0] |= {"name": SUPERVISOR_CONTAINER, "ports": [{"containerPort": 8090}]}
        manifest["spec"]["containers"][0]["readinessProbe"] = {
            "httpGet": {"path": "/healthz", "port": 8090},
            "periodSeconds": 1,
        }
        self.kubectl.apply(restricted(manifest))
        try:
            wait_until_running(self.kubectl, name)
            yield name
        finally:
            self.remove(name)

    def remove(self, name: str) -> None:
        """Delete a pod without a grace period."""
        self.kubectl("delete", "pod", name, "--ignore-not-found", "--grace-period=0", "--force")

    def append(self, name: str, *lines: str) -> None:
        """Append lines to the log of the second driver."""
        log = f"{self.resolved.directory}/logs/driver-2.log"
        run_in(self.kubectl, name, "bash", "-c", 'printf "%s\\n" "$@" >> "$0"', log, *lines)

    def readers(self) -> list[str]:
        """Names of the pods that commands have created."""
        found = self.kubectl.get("pods", "--selector=app.kubernetes.io/component=reader")
        return [item["metadata"]["name"] for item in found]

    def _python(self, script: str, *arguments: str) -> list[str]:
        return ["python", "-c", script, str(self.resolved.directory), *arguments]

    def make_folder(self) -> None:
        """Put the job's folder, with logs of two attempts, on the volume."""
        content = self._python(
            FOLDER, json.dumps([LEDGER, DRIVERS, self.resolved.job.model_dump(mode="json", by_alias=True)])
        )
        manifest = pod("maker", self.cluster.image, content, claims={"/data": self.resolved.claim})
        self.kubectl.apply(restricted(manifest))
        self.kubectl("wait", "pod/maker", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=120s")


@pytest.fixture(scope="module")
def stage(cluster: ClusterUnderTest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stage]:
    """The stage of all tests of this module. Only they write the status of the job."""
    apply_definitions(cluster.kubectl)
    with no_operator(cluster), temporary_namespace(cluster.kubectl) as own:
        own("label", "namespace", own.namespace, "pod-security.kubernetes.io/enforce=restricted")
        file = tmp_path_factory.mktemp("user") / "kubeconfig"
        file.write_text(yaml.safe_dump(_user(own)))
        resolved = _resolved(cluster, own.namespace)
        found = Stage(cluster, own, resolved, file)
        own.apply(resolved.job.model_dump(mode="json", by_alias=True, exclude_unset=True), volume_claim(resolved) or {})
        found.make_folder()
        yield found


def _resolved(cluster: ClusterUnderTest, namespace: str) -> ResolvedJob:
    content = {
        "apiVersion": "spotune.dev/v1alpha1",
        "kind": "FinetuneJob",
        "metadata": {"name": JOB, "namespace": namespace},
        "spec": {
            "model": {"source": "/data/model", "task": "seq2seq"},
            "dataset": {"train": {"source": "/data/shards"}},
            "training": {"epochs": 3},
            "storage": {"storageClassName": cluster.storage_class, "size": "300Mi"},
            "cluster": {"image": cluster.image, "provider": "none"},
        },
    }
    return resolve(parse_job(Document(content)), NONE)


def _user(kubectl: Kubectl) -> dict[str, Any]:
    """The kubeconfig of a service account that has the Role of the docs in kubectl's namespace."""
    [role] = re.findall(r"```yaml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    subject = {"kind": "ServiceAccount", "name": "ana", "namespace": kubectl.namespace}
    binding = {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": {"name": "ana"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "spotune-user"},
        "subjects": [subject],
    }
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": "ana"}}
    kubectl.apply(account, yaml.safe_load(role), binding)
    config: dict[str, Any] = json.loads(kubectl("config", "view", "--raw", "--minify", "--output=json"))
    config["users"] = [{"name": "ana", "user": {"token": kubectl("create", "token", "ana").strip()}}]
    context = {"cluster": config["clusters"][0]["name"], "user": "ana", "namespace": kubectl.namespace}
    return {**config, "contexts": [{"name": "test", "context": context}], "current-context": "test"}


def _checks(printed: str) -> Mapping[str, Mapping[str, str]]:
    return {check["name"]: check for check in json.loads(printed)["checks"]}


def test_doctor_of_a_user_finds_the_documented_role_enough_and_says_what_it_cannot_see(stage: Stage) -> None:
    done = subprocess.run(stage.words("doctor", "--output", "json"), capture_output=True, text=True, check=False)
    checks = _checks(done.stdout)
    verdicts = {name: check["verdict"] for name, check in checks.items()}
    crds = ("kuberay-crd", "finetunejob-crd", "modelservice-crd", "rayservice-crd")
    assert {verdicts[name] for name in ("api-server", "permissions", *crds)} == {"passed"}, checks
    for name in ("kuberay-operator", "operator", "storage", "gpus"):
        assert verdicts[name] == "warning"
        assert f'User "system:serviceaccount:{stage.kubectl.namespace}:ana" cannot list' in checks[name]["message"]
    assert done.returncode == 0


def test_doctor_names_every_right_that_is_missing(stage: Stage) -> None:
    printed = stage.run("doctor", "--output", "json", "--namespace", "default", code=10)
    check = _checks(printed)["permissions"]
    assert check["verdict"] == "failed"
    for words in ("get and list finetunejobs", "get and create pods/portforward", "list events"):
        assert words in check["message"]


def test_doctor_of_an_administrator_sees_the_whole_cluster(stage: Stage) -> None:
    if stage.cluster.machine:  # whose device plugins may have started just now
        gpus = r"--output=jsonpath={.items[*].status.allocatable.nvidia\.com/gpu}"
        wait_for("the GPUs", 60, lambda: stage.kubectl("get", "nodes", gpus).split() == ["1", "1"])
    admin = ["--kubeconfig", str(stage.kubectl.kubeconfig), "--namespace", stage.kubectl.namespace]
    options = ["--storage-class", "nothing", "--pull", stage.cluster.image, "--output", "json"]
    done = subprocess.run([SPOTUNE, "doctor", *admin, *options], capture_output=True, text=True, check=False)
    checks = _checks(done.stdout)
    assert checks["storage"]["message"].startswith("there is no storage class nothing; existing classes: ")
    assert (checks["image"]["verdict"], done.returncode) == ("passed", 10), done.stdout
    if stage.cluster.machine:
        assert checks["gpus"]["message"] == "2 GPU(s) on 2 node(s), 2 of them spot"
    assert stage.kubectl.get("pods", "--selector=app.kubernetes.io/component=doctor") == []


def test_status_is_that_of_the_job(stage: Stage) -> None:
    stage.say(
        ("Training", "True", "steps are made"), phase="Training", step=12, totalSteps=48, loss=1.25, workers="2/2"
    )
    assert json.loads(stage.run("status", JOB, "--output", "json")) == stage.kubectl.get("ftj", JOB)["status"]
    [listed] = json.loads(stage.run("status", "--output", "json"))["jobs"]
    assert (listed["name"], listed["status"]["step"]) == (JOB, 12)
    assert "12/48 (25%)" in stage.run("status")
    assert "step 12/48" in stage.run("status", JOB)


def test_what_is_not_there_and_what_is_not_allowed_is_one_sentence(stage: Stage) -> None:
    assert f"has no FinetuneJob t5-slq; did you mean {JOB}?" in stage.run("status", "t5-slq", code=2)
    refused = stage.run("status", "--namespace", "default", code=10)
    assert 'cannot list resource "finetunejobs" in API group "spotune.dev" in the namespace "default"' in refused
    assert "Ask a cluster administrator" in refused
    assert refused.count("\n") == 1


def test_watch_ends_with_the_job_and_its_exit_code_is_the_jobs(stage: Stage) -> None:
    stage.say(phase="Provisioning", step=0)
    with stage.started("watch", JOB) as watching:
        assert watching.line() == "Provisioning"
        stage.say(phase="Training", step=24, totalSteps=48)
        assert watching.line() == "Training: step 24/48"
        stage.say(("Complete", "True", "the model is trained"), phase="Complete", step=48, output="pvc://x/export")
        code, rest = watching.ended()
        assert code == 0
        assert "t5-sql has completed (48 steps); the model is at pvc://x/export\n" in rest
    stage.say(("Failed", "True", "the data has no column sql"), phase="Failed")
    assert "t5-sql failed: the data has no column sql" in stage.run("watch", JOB, code=20)


def test_suspend_waits_until_the_pods_are_gone_and_resume_until_it_trains(stage: Stage) -> None:
    stage.say(("Training", "True", "steps are made"), phase="Training")
    waiting = pod("spotune-t5-sql-workers-worker-abcde", stage.cluster.image)
    waiting["metadata"]["labels"] = {"spotune.dev/job": JOB, "app.kubernetes.io/component": "workers"}
    waiting["spec"]["nodeSelector"] = {"spotune.dev/nowhere": "true"}
    stage.kubectl.apply(restricted(waiting))
    with stage.started("suspend", JOB, "--wait") as suspending:
        assert "1 pod(s) left: spotune-t5-sql-workers-worker-abcde" in suspending.line()
        assert stage.kubectl.get("ftj", JOB)["spec"]["suspend"] is True
        stage.remove("spotune-t5-sql-workers-worker-abcde")
        assert "the operator has not processed the change yet" in suspending.line()
        stage.say(("Suspended", "True", "all pods are gone"), phase="Suspended")
        assert suspending.ended() == (0, "t5-sql is suspended\n")
    assert "timed out after 0 s; still waiting: " in stage.run("resume", JOB, "--wait", "--timeout", "1ms", code=10)
    stage.say(("Stalled", "True", "there is no such image"), phase="Stalled")
    assert "Stalled: Test: there is no such image" in stage.run("resume", JOB, "--wait", code=20)
    stage.say(("Training", "True", "steps are made"), phase="Training")
    assert stage.run("resume", JOB, "--wait", "--output", "json").count('"changed": false') == 1


def test_logs_and_report_of_a_job_without_a_head_come_from_the_volume_by_a_pod_that_is_removed(
    stage: Stage, tmp_path: Path
) -> None:
    stage.say(("Complete", "True", "the model is trained"), phase="Complete", pinned=_pinned(stage))
    assert stage.run("logs", JOB).splitlines() == TOLD
    assert stage.run("logs", JOB, "--follow", "--lines", "1").splitlines() == TOLD[-1:]
    stage.run("report", JOB, "--file", str(tmp_path / "report.html"))
    page = (tmp_path / "report.html").read_text()
    assert f"<h1>{JOB}</h1>" in page
    assert page.endswith("</html>\n")
    assert stage.readers() == []


def test_followed_logs_go_on_through_the_loss_of_the_head_without_a_line_twice_or_lost(stage: Stage) -> None:
    stage.say(("Training", "True", "steps are made"), phase="Training", pinned=_pinned(stage))
    # It says that it waits if the next head takes longer to start than the connection to the lost one to end.
    with stage.head("head-1"), stage.started("logs", JOB, "--follow", notices=False) as following:
        said = [following.line() for _ in TOLD]
        stage.append("head-1", *(f"before {number}" for number in range(50)))
        said += [following.line() for _ in range(50)]
        stage.append("head-1", "with the head")
        stage.remove("head-1")
        with stage.head("head-2"):
            stage.append("head-2", *(f"after {number}" for number in range(50)))
            assert stage.run("logs", JOB, "--lines", "2").splitlines() == ["driver-2: after 48", "driver-2: after 49"]
            while not said[-1].endswith("after 49"):
                said.append(following.line())
            stage.say(("Complete", "True", "the model is trained"), phase="Complete")
            assert following.ended()[0] == 0
            assert stage.run("events", JOB).count("Pod head-2  Started") == 1
    numbers = range(50)
    told = [*(f"before {number}" for number in numbers), "with the head", *(f"after {number}" for number in numbers)]
    assert said == [*TOLD, *(f"driver-2: {line}" for line in told)]
    assert stage.readers() == []


def test_tensorboard_is_served_here_and_its_pod_goes_with_ctrl_c(stage: Stage) -> None:
    stage.say(("Complete", "True", "the model is trained"), phase="Complete", pinned=_pinned(stage))
    with stage.started("tensorboard", JOB, "--port", "0") as board:
        url = wait_for("TensorBoard's URL", 100, lambda: re.search(r"http://127\S+", board.line()))[0]
        assert _json_of(f"{url}data/environment")["data_location"] == f"{stage.resolved.directory}/logs/tensorboard"
        wait_for("the run", 120, lambda: "." in _json_of(f"{url}data/runs"), every=1)
        assert len(stage.readers()) == 1
        board.interrupt()
        assert board.ended()[0] == 0
    assert stage.readers() == []


def _json_of(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def _pinned(stage: Stage) -> dict[str, Any]:
    return pin(stage.resolved, None, Settings()).model_dump(mode="json", by_alias=True)
