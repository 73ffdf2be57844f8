"""Tiny FinetuneJobs on the cluster: their inputs on a volume, their status, and their artifacts.

A `Workplace` is a namespace with restricted pod security and one volume that all its jobs share
(`storage.existingClaim`), so model and shards are copied once. A job always has two CPU workers, so its weights equal
those of an undisturbed run bit for bit. A step takes some tens of milliseconds, so faults hit the job while it trains.
"""

import hashlib
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spotune.job import FinetuneJob
from spotune_operator.children.resolved_job import resolve
from spotune_operator.providers import PROVIDERS, ProviderName
from spotune_testcluster.cluster import Cluster
from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.pytest_plugin import ClusterUnderTest, temporary_namespace
from spotune_testcluster.waiting import wait_for
from spotune_trainer.checkpoint.generations import surviving_steps
from spotune_trainer.job_directory.layout import JobDirectory
from spotune_trainer.job_directory.ledger import Ledger
from tests.cluster import paced
from tests.cluster.pods import claim, pod, restricted, run_in, wait_until_running
from tests.cluster.status_history import ObservedJob, StatusHistory
from tests.trainer.support.runs import write_shards
from tests.trainer.support.tiny import make_job, save_source

WORKERS = 2
STEPS = 200
ENDLESS = 1_000_000
"""Number of steps of a job that must not finish during a test, even on a fast machine."""
GLOBAL_BATCH_SIZE = 32
STEPS_PER_EPOCH = 3
"""75 rows; the last step of an epoch has 11 of them."""
SMALL = {"requests": {"cpu": "100m", "memory": "512Mi"}, "limits": {"cpu": "2", "memory": "3Gi"}}
NOWHERE = {"podTemplate": {"spec": {"nodeSelector": {"spotune.dev/nowhere": "true"}}}}
"""Such pods fit no node, so the job never starts."""
CLAIM = "shared"
READER = "reader"
SECONDS_TO_TRAIN = 1800.0
SECONDS_TO_READ = 300.0
"""A restarted node may take minutes until it runs its pods again."""
MOUNTED_AT = "/data"
INPUTS = f"{MOUNTED_AT}/inputs"
PACED = f"{INPUTS}/paced"
"""Folder on the volume by which a worker makes its steps at a pace: see `tests.cluster.paced`."""
_STEPS_TO_THE_END = 20
_NOT_COPIED = ("checkpoints", "logs/tensorboard")


@dataclass(frozen=True)
class Workplace:
    """A namespace for jobs, with their data on a volume.

    Attributes:
        cluster: The cluster.
        kubectl: kubectl in the namespace.
        inputs: Local copy of the model and shards on the volume.
    """

    cluster: ClusterUnderTest
    kubectl: Kubectl
    inputs: Path

    def manifest(self, name: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
        """A FinetuneJob; sections of the spec (in camelCase) are merged over those of a tiny job."""
        defaults: dict[str, dict[str, Any]] = {
            "dataset": {"train": {"source": f"{INPUTS}/shards"}, "eval": None},
            # With a constant learning rate a step does not depend on the number of steps.
            "training": {
                "epochs": None,
                "maxSteps": STEPS,
                "globalBatchSize": GLOBAL_BATCH_SIZE,
                "scheduler": "constant",
            },
            "execution": {"microBatchSize": 2, "zeroStage": 1},
            "checkpoint": {"every": 20},
            "workers": {"count": WORKERS, "min": WORKERS, "gpus": 0, "resources": SMALL},
            "head": {"resources": SMALL},
            "storage": {"existingClaim": CLAIM},
            "cluster": {"provider": "aks" if self.cluster.machine else "none", "image": self.cluster.image},
            "retry": {"backoff": {"initial": "1s", "max": "10s"}},
            "cleanup": {"after": "5s"},
        }
        merged = {key: {**defaults.get(key, {}), **sections.get(key, {})} for key in defaults.keys() | sections.keys()}
        job = make_job(f"{INPUTS}/source", "seq2seq", **merged)
        metadata = {"name": name, "namespace": self.kubectl.namespace}
        return {**job.model_dump(mode="json", by_alias=True, exclude_unset=True), "metadata": metadata}

    @contextmanager
    def running(self, manifest: Mapping[str, Any]) -> Iterator["RunningJob"]:
        """A job that is applied, and deleted with its pods at the end of the block."""
        with StatusHistory(self.kubectl, manifest["metadata"]["name"]) as history:
            job = RunningJob(self, manifest, history)
            job.apply(manifest)
            try:
                yield job
            finally:
                job.delete()

    def add_input(self, name: str) -> None:
        """Copy a new folder of `inputs` to the volume."""
        copy_to_pod(self.kubectl, READER, self.inputs / name, f"{INPUTS}/{name}")

    def move_reader(self, node: str) -> None:
        """Move the reader pod to another node."""
        self.kubectl("delete", "pod", READER, "--force", "--grace-period=0", "--ignore-not-found")
        self.start_reader(READER, CLAIM, node)

    def start_reader(self, name: str, claim_name: str, node: str) -> None:
        """Start a pod with a volume at /data."""
        found = restricted(pod(name, self.cluster.image, node=node, claims={MOUNTED_AT: claim_name}))
        self.kubectl.apply(found)
        wait_until_running(self.kubectl, name, seconds=SECONDS_TO_READ)


@contextmanager
def workplace(cluster: ClusterUnderTest) -> Iterator[Workplace]:
    """A new workplace, which is deleted at the end of the block."""
    with temporary_namespace(cluster.kubectl) as kubectl, tempfile.TemporaryDirectory() as folder:
        kubectl("label", "namespace", kubectl.namespace, "pod-security.kubernetes.io/enforce=restricted")
        kubectl.apply(claim(CLAIM, "2Gi", cluster.storage_class))
        inputs = Path(folder)
        save_source(inputs / "source", "seq2seq")
        write_shards(inputs / "shards", "seq2seq")
        (inputs / "paced").mkdir()
        for file in paced.FILES:
            shutil.copy(file, inputs / "paced")
        found = Workplace(cluster, kubectl, inputs)
        found.start_reader(READER, CLAIM, cluster.nodes[0])
        copy_to_pod(kubectl, READER, inputs, INPUTS)
        yield found


def copy_to_pod(kubectl: Kubectl, name: str, folder: Path, target: str) -> None:
    """Copy the content of a folder into a new folder of a pod."""
    packed = subprocess.run(["tar", "--create", "--directory", folder, "."], capture_output=True, check=True).stdout
    unpack = f"mkdir --parents {target} && tar --extract --no-same-owner --directory={target}"
    subprocess.run([*_exec(kubectl, name), "bash", "-c", unpack], input=packed, check=True, capture_output=True)


def copy_from_pod(kubectl: Kubectl, name: str, source: str, folder: Path, leave_out: tuple[str, ...] = ()) -> None:
    """Copy the content of a folder of a pod into a local folder, while processes may write to it."""
    options = [f"--exclude=./{path}" for path in leave_out]
    pack = ["tar", "--create", "--ignore-failed-read", "--warning=none", *options, f"--directory={source}", "."]
    packed = subprocess.run([*_exec(kubectl, name), *pack], capture_output=True, check=False)
    if packed.returncode > 1:  # 1: a file changed while it was read
        raise KubectlError(f"{' '.join(pack)} in pod {name}: {packed.stderr.decode()}")
    folder.mkdir(parents=True, exist_ok=True)
    unpack = ["tar", "--extract", "--no-same-owner", f"--directory={folder}"]
    subprocess.run(unpack, input=packed.stdout, check=True, capture_output=True)


def _exec(kubectl: Kubectl, name: str) -> list[str]:
    return kubectl.command("exec", "--stdin", name, "--")


@dataclass(frozen=True)
class RunArtifacts:
    """A local copy of the files that a job wrote to the volume.

    Attributes:
        directory: The job's folder without checkpoints.
    """

    directory: JobDirectory

    @property
    def ledger(self) -> Ledger:
        """The ledger of the job."""
        return Ledger(self.directory)

    def steps(self) -> list[dict[str, Any]]:
        """The surviving steps, each once."""
        return surviving_steps(self.directory)

    def samples(self) -> list[str]:
        """Hash of the rows of every surviving step."""
        steps = self.steps()
        assert [step["step"] for step in steps] == list(range(1, len(steps) + 1))
        return [step["samples"] for step in steps]

    def sha256(self) -> str:
        """SHA-256 of the exported weights."""
        return hashlib.sha256((self.directory.export / "model.safetensors").read_bytes()).hexdigest()


class RunningJob:
    """One job in a cluster: its objects by kubectl, and its progress on the volume."""

    def __init__(self, workplace: Workplace, manifest: Mapping[str, Any], history: StatusHistory) -> None:
        self.workplace = workplace
        self.kubectl = workplace.kubectl
        self.name: str = manifest["metadata"]["name"]
        self.history = history
        self._manifest = manifest
        self._job = FinetuneJob.model_validate(manifest)
        self.workers = self._job.spec.workers.count
        self._reader = READER
        self._claim = CLAIM
        self._volumes: dict[str, str] = {}

    @property
    def directory(self) -> str:
        """The job's folder on the volume, the same for every provider."""
        return str(resolve(self._job, PROVIDERS[ProviderName.NONE]).directory)

    # -- objects -----------------------------------------------------------------------------------------------------

    def pods(self, component: str) -> list[dict[str, Any]]:
        """Pods of the head or the workers that are not being deleted."""
        selector = f"--selector=spotune.dev/job={self.name},app.kubernetes.io/component={component}"
        found: list[dict[str, Any]] = self.kubectl.get("pods", selector)
        return [pod for pod in found if "deletionTimestamp" not in pod["metadata"]]

    def head(self) -> dict[str, Any]:
        """Wait for the head pod and return it."""
        return wait_for(f"{self.name}: the head pod", 120, lambda: next(iter(self.pods("head")), None), every=0.3)

    def worker_uids(self) -> set[str]:
        """The uids of the worker pods."""
        return {pod["metadata"]["uid"] for pod in self.pods("workers")}

    def apply(self, manifest: Mapping[str, Any]) -> None:
        """`kubectl apply`."""
        self.kubectl("apply", "--filename=-", stdin=json.dumps(manifest))

    def apply_as(self, manager: str) -> None:
        """Apply the job's manifest server-side with another field manager."""
        flags = ("--server-side", "--force-conflicts", f"--field-manager={manager}")
        self.kubectl("apply", *flags, "--filename=-", stdin=json.dumps(_without_nulls(self._manifest)))

    def finish_soon(self) -> None:
        """Let an endless job end soon: suspend it, delete it, and apply it again with a few more steps.

        `maxSteps` may not be reduced, except in a new job. The new job continues at the step of the old one.
        """
        self.suspend()
        steps = self.progress()["step"] + _STEPS_TO_THE_END
        self.delete()
        spec = self._manifest["spec"]
        self.apply({**self._manifest, "spec": {**spec, "training": {**spec["training"], "maxSteps": steps}}})

    def patch(self, spec: Mapping[str, Any]) -> None:
        """Change the spec; sections are merged."""
        self.kubectl("patch", "ftj", self.name, "--type=merge", f"--patch={json.dumps({'spec': spec})}")

    def suspend(self) -> ObservedJob:
        """Suspend the job, and wait until its status reports it."""
        since = time.time()
        self.patch({"suspend": True})
        return self.history.wait_for("Suspended", 180, lambda seen: seen.holds("Suspended"), since)

    def delete(self) -> None:
        """Delete the job, and wait until its pods are gone."""
        self.kubectl("delete", "ftj", self.name, "--ignore-not-found")
        wait_for(f"{self.name}: the end of its pods", 180, lambda: not self._all_pods(), every=0.5)

    def wait_for(
        self, what: str, wanted: Callable[[ObservedJob], bool], seconds: float = SECONDS_TO_TRAIN
    ) -> ObservedJob:
        """Wait for a status that satisfies a condition. Earlier statuses count, too."""
        return self.history.wait_for(what, seconds, wanted)

    def wait_until_complete(self, seconds: float = SECONDS_TO_TRAIN) -> ObservedJob:
        """Wait until the job is trained.

        Raises:
            AssertionError: The job has failed.
        """
        ended = self.wait_for("Complete", lambda seen: seen.holds("Complete") or seen.holds("Failed"), seconds)
        assert not ended.holds("Failed"), ended.condition("Failed")
        return ended

    def _all_pods(self) -> list[Any]:
        found: list[Any] = self.kubectl.get("pods", f"--selector=spotune.dev/job={self.name}")
        return found

    # -- progress ----------------------------------------------------------------------------------------------------

    def on_volume(self, *command: str) -> str:
        """Run a command in a pod with the job's volume at /data; returns its output."""
        return run_in(self.kubectl, self._reader, *command)

    def move_to_own_volume(self, inputs: Path | None = None, target: str = INPUTS) -> None:
        """Move the reader to the volume that the operator made for this job, and copy the inputs to it."""
        own = f"spotune-{self.name}"
        wait_for(f"claim {own}", 60, lambda: self.kubectl("get", "pvc", own, "--ignore-not-found"), every=0.3)
        self._reader, self._claim = f"reader-{self.name}", own
        self.workplace.start_reader(self._reader, own, self.workplace.cluster.nodes[0])
        copy_to_pod(self.kubectl, self._reader, inputs or self.workplace.inputs, target)

    def progress(self) -> dict[str, Any]:
        """The progress that the trainer wrote to the volume; {} before the first."""
        if machine := self.workplace.cluster.machine:  # a command in a pod takes the processors as long as some steps
            status = self._folder_on(machine) / "status.json"
            printed = machine.enter("cat", str(status), check=False).stdout
        else:
            printed = self.on_volume("bash", "-c", f"cat {self.directory}/status.json 2>/dev/null || true")
        found: dict[str, Any] = json.loads(printed or "{}")
        return found

    def _folder_on(self, machine: Cluster) -> Path:
        """The job's folder within the namespaces of the cluster, which mounts each volume."""
        if self._claim not in self._volumes:
            self._volumes[self._claim] = self.kubectl.get("pvc", self._claim)["spec"]["volumeName"]
        return machine.files.volumes / self._volumes[self._claim] / Path(self.directory).relative_to(MOUNTED_AT)

    def wait_for_progress(
        self, what: str, wanted: Callable[[dict[str, Any]], bool], seconds: float = SECONDS_TO_TRAIN
    ) -> dict[str, Any]:
        """Wait for a progress that satisfies a condition.

        Raises:
            AssertionError: The job failed or was trained before.
        """

        def look() -> dict[str, Any] | None:
            try:
                found = self.progress()
            except KubectlError:  # the API server restarts, or a node is lost
                return None
            if wanted(found):
                return found
            assert found.get("phase") not in {"Failed", "Done"}, f"{self.name} has ended before: {what}; {found}"
            return None

        return wait_for(f"{self.name}: {what}", seconds, look, every=0.3)

    def wait_for_step(self, step: int, generation: int = 0, seconds: float = SECONDS_TO_TRAIN) -> dict[str, Any]:
        """Wait until this or a later generation has made this or a later step."""

        def reached(found: dict[str, Any]) -> bool:
            return (found.get("step") or 0) >= step and found["generation"] >= generation

        return self.wait_for_progress(f"step {step}", reached, seconds)

    def wait_for_commit(self, step: int = 1) -> int:
        """Wait until this or a later step is committed; returns the committed step."""

        def committed(found: dict[str, Any]) -> int:
            return int((found.get("lastCheckpoint") or {}).get("step", 0))

        return committed(self.wait_for_progress(f"a commit from step {step} on", lambda f: committed(f) >= step))

    def artifacts(self, folder: Path) -> RunArtifacts:
        """Copy the files of the job into a new folder."""
        copy = folder / f"{self.name}-{time.time_ns():x}"
        copy_from_pod(self.kubectl, self._reader, self.directory, copy, _NOT_COPIED)
        return RunArtifacts(JobDirectory(copy))


def _without_nulls(value: Any) -> Any:
    """Remove nulls. `kubectl apply` of a client drops them too, but the server takes them as values."""
    if isinstance(value, dict):
        return {name: _without_nulls(each) for name, each in value.items() if each is not None}
    return value
