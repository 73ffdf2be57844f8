"""FinetuneJobs whose only storage is a bucket: an S3 server in a pod, and jobs that nothing else is shared by.

The server is moto. Its pod keeps the objects in memory, so no fault may hit it. Model and shards, which a job only
reads, come from the volume of the workplace.
"""

import json
import os
import socket
import subprocess
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import boto3
import pytest

from spotune_operator.children.pod_template.environment import variables
from spotune_testcluster.kubectl import Kubectl, KubectlError
from spotune_testcluster.waiting import wait_for
from spotune_trainer.bucket.client import Bucket, BucketError
from spotune_trainer.bucket.link import writer_folder
from spotune_trainer.bucket.state_mirror import pull_job
from spotune_trainer.bucket.writer import newest_state
from spotune_trainer.job_directory.layout import JobDirectory
from tests.cluster.finetune_jobs import CLAIM, INPUTS, RunArtifacts, RunningJob, Workplace
from tests.cluster.pods import pod, restricted, wait_until_running
from tests.cluster.status_history import StatusHistory

STORE = "s3"
_PORT = 5000
_BUCKET = "bucket"
_ACCESS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test"}
_INPUTS = "/inputs"
_SERVER = {"HOME": "/tmp", "S3_IGNORE_SUBDOMAIN_BUCKETNAME": "true"}
_COMMAND = ("python", "-m", "moto.server", "--host", "0.0.0.0", "--port", str(_PORT))
_SECONDS_TO_FORWARD = 60.0


@dataclass(frozen=True)
class BucketWorkplace(Workplace):
    """A workplace with an S3 server, whose jobs are kept in a bucket."""

    @property
    def service(self) -> str:
        """The Service of the server, as `Fault.cut` names it."""
        return f"{self.kubectl.namespace}/{STORE}"

    def manifest(self, name: str, **sections: Mapping[str, Any]) -> dict[str, Any]:
        """A FinetuneJob as those of a workplace, kept in a bucket."""
        storage = sections.pop("storage", {})
        return self.kept_in_bucket(super().manifest(name, **sections), **storage)

    def kept_in_bucket(self, manifest: Mapping[str, Any], **storage: Any) -> dict[str, Any]:
        """A manifest whose job is kept in a bucket. The volume with its inputs is read-only."""
        kept = {
            "bucket": f"s3://{_BUCKET}/jobs/{manifest['metadata']['name']}",
            "credentials": {"secretName": STORE, "endpoint": f"http://{STORE}.{self.kubectl.namespace}.svc:{_PORT}"},
            **storage,
        }
        changed = {**manifest, "spec": {**manifest["spec"], "storage": kept}}
        found: dict[str, Any] = json.loads(json.dumps(changed).replace(INPUTS, _INPUTS))
        for group, containers in (("head", ("ray-head", "supervisor")), ("workers", ("ray-worker",))):
            found["spec"][group]["podTemplate"] = _with_inputs(containers)
        return found

    @contextmanager
    def running(self, manifest: Mapping[str, Any]) -> Iterator["BucketJob"]:
        """A job that is applied, and deleted with its pods at the end of the block."""
        with (
            StatusHistory(self.kubectl, manifest["metadata"]["name"]) as history,
            forwarded(self.kubectl) as url,
        ):
            job = BucketJob(self, manifest, history, url)
            job.apply(manifest)
            try:
                yield job
            finally:
                job.delete()


class BucketJob(RunningJob):
    """One job whose progress is in a bucket."""

    def __init__(
        self, workplace: Workplace, manifest: Mapping[str, Any], history: StatusHistory, endpoint: str
    ) -> None:
        super().__init__(workplace, manifest, history)
        with _environment(endpoint):
            self.bucket = Bucket(manifest["spec"]["storage"]["bucket"])

    def progress(self) -> dict[str, Any]:
        """The progress in the bucket, some seconds old; {} before the first."""
        try:
            number = newest_state(self.bucket)
            content = self.bucket.read(f"{writer_folder(number)}/status.json") if number else None
        except BucketError as error:  # the connection to the server's pod broke
            raise KubectlError(str(error)) from error
        found: dict[str, Any] = json.loads(content) if content else {}
        return found

    def artifacts(self, folder: Path) -> RunArtifacts:
        """Download the files of the job into a new folder."""
        directory = JobDirectory(folder / f"{self.name}-{time.time_ns():x}")
        directory.root.mkdir(parents=True)
        pull_job(self.bucket, directory, ("export",))
        return RunArtifacts(directory)


@contextmanager
def bucket_workplace(workplace: Workplace, node: str) -> Iterator[BucketWorkplace]:
    """Start an S3 server on a node; it is deleted at the end of the block."""
    kubectl = workplace.kubectl
    server = restricted(pod(STORE, workplace.cluster.image, _COMMAND, node=node, labels={"app": STORE}))
    server["spec"]["containers"][0]["env"] = variables(_SERVER)
    service = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": STORE}}
    service |= {"spec": {"selector": {"app": STORE}, "ports": [{"port": _PORT}]}}
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": STORE}, "stringData": _ACCESS}
    kubectl.apply(server, service, secret)
    try:
        wait_until_running(kubectl, STORE)
        with forwarded(kubectl) as endpoint:
            keys = {"aws_access_key_id": "test", "aws_secret_access_key": "test", "region_name": "us-east-1"}
            boto3.client("s3", endpoint_url=endpoint, **keys).create_bucket(Bucket=_BUCKET)
        yield BucketWorkplace(workplace.cluster, kubectl, workplace.inputs)
    finally:
        kubectl("delete", f"pod/{STORE}", f"service/{STORE}", f"secret/{STORE}", "--grace-period=0", "--force")


@contextmanager
def forwarded(kubectl: Kubectl) -> Iterator[str]:
    """URL of the server on this machine, by a port-forward that is started again when it ends."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    command = [kubectl.program, f"--kubeconfig={kubectl.kubeconfig}", f"--namespace={kubectl.namespace}"]
    forward = f"while true; do {' '.join(command)} port-forward pod/{STORE} {port}:{_PORT}; sleep 0.5; done"
    with subprocess.Popen(
        ["bash", "-c", forward], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            wait_for("the port of the S3 server", _SECONDS_TO_FORWARD, lambda: _answers(port), every=0.2)
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, 9)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 1) as connection:
            connection.settimeout(5)
            connection.sendall(b"GET /moto-api/ HTTP/1.0\r\n\r\n")
            return bool(connection.recv(16))
    except OSError:
        return False


@contextmanager
def _environment(endpoint: str) -> Iterator[None]:
    """Environment variables by which a client finds the server, while it is made."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {**_ACCESS, "S3_ENDPOINT_URL": endpoint}.items():
            patch.setenv(name, value)
        yield


def _with_inputs(containers: tuple[str, ...]) -> dict[str, Any]:
    """A pod template that mounts the workplace's inputs."""
    mount = {"name": "inputs", "mountPath": _INPUTS, "subPath": INPUTS.rpartition("/")[2], "readOnly": True}
    volume = {"name": "inputs", "persistentVolumeClaim": {"claimName": CLAIM}}
    return {"spec": {"containers": [{"name": n, "volumeMounts": [mount]} for n in containers], "volumes": [volume]}}
