"""A job's phases reach a webhook in the cluster, also after a failure of the receiver; then its ttl deletes the job."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spotune_testcluster.pytest_plugin import ClusterUnderTest
from spotune_testcluster.waiting import wait_for
from tests.cluster.finetune_jobs import CLAIM, STEPS, Workplace
from tests.cluster.operator_install import Operator
from tests.cluster.pods import pod, restricted, wait_until_running

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(1200)]

NAME = "receiver"
PORT = 8099
TTL = 20
PROGRAM = f"""
import http.server, sys

class Receiver(http.server.BaseHTTPRequestHandler):
    count = 0

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Receiver.count += 1
        status = 503 if Receiver.count == 1 else 200
        print(status, body.decode(), flush=True)
        self.send_response(status)
        self.end_headers()

    def log_message(self, *arguments):
        pass

http.server.HTTPServer(("", {PORT}), Receiver).serve_forever()
"""


def _start_receiver(cluster: ClusterUnderTest, workplace: Workplace, operator: Operator) -> None:
    """Start a pod that answers the first request with 503, and put its URL into a Secret of the operator."""
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": NAME},
        "spec": {"selector": {"app": NAME}, "ports": [{"port": PORT}]},
    }
    labels = {"app": NAME}
    workplace.kubectl.apply(
        service, restricted(pod(NAME, cluster.image, ("python3", "-c", PROGRAM), node=cluster.nodes[0], labels=labels))
    )
    wait_until_running(workplace.kubectl, NAME)
    url = f"http://{NAME}.{workplace.kubectl.namespace}.svc:{PORT}/hook"
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": NAME}, "stringData": {"url": url}}
    operator.kubectl.apply(secret)


def _received(workplace: Workplace) -> list[tuple[int, dict[str, Any]]]:
    """The answer and the content of each request so far."""
    lines = workplace.kubectl("logs", NAME, "--tail=-1").splitlines()
    return [(int(status), json.loads(body)) for status, _, body in (line.partition(" ") for line in lines)]


def test_phases_reach_a_webhook_and_the_ttl_deletes_the_job(
    cluster: ClusterUnderTest, operator: Operator, workplace: Workplace
) -> None:
    _start_receiver(cluster, workplace, operator)
    values = (
        f"notifications[0].secretRef.name={NAME}",
        "notifications[0].secretRef.key=url",
        "notifications[0].phases={Training,Complete}",
        f"notifications[0].namespaces={{{workplace.kubectl.namespace}}}",
        f"networkPolicy.notificationPorts={{{PORT}}}",
    )
    manifest = workplace.manifest("notified")
    manifest["spec"]["ttlSecondsAfterFinished"] = TTL
    with operator.with_values(*values), workplace.running(manifest) as job:
        uid = job.wait_for("its uid", lambda seen: bool(seen.job)).uid
        ended = job.wait_until_complete()

        def complete() -> dict[str, Any] | None:
            own = [body for status, body in _received(workplace) if status == 200 and body["name"] == "notified"]
            return next((body for body in own if body["phase"] == "Complete"), None)

        told = wait_for("the notification of its end", 120, complete, every=0.5)
        assert (told["kind"], told["namespace"], told["uid"]) == ("FinetuneJob", workplace.kubectl.namespace, uid)
        assert told["output"] == ended.status["output"]
        assert told["totalSteps"] == STEPS
        requests = _received(workplace)
        (refused,) = [body for status, body in requests if status == 503]
        again = [body for status, body in requests if status == 200 and body["id"] == refused["id"]]
        assert again == [refused], "a change that the receiver did not take is sent again, once it takes it"
        assert {body["phase"] for _, body in requests} <= {"Training", "Complete"}

        wait_for(
            "the deletion by the ttl",
            TTL + 120,
            lambda: not job.kubectl("get", "ftj", "notified", "--ignore-not-found", "--output=name"),
            every=0.5,
        )
        wait_for("the end of its pods", 180, lambda: not job.pods("head") and not job.pods("workers"), every=0.5)
        assert job.kubectl.get("pvc", CLAIM)["status"]["phase"] == "Bound", "the volume is not the job's own"
    workplace.kubectl("delete", "pod,service", NAME, "--ignore-not-found", "--wait=false")
    operator.kubectl("delete", "secret", NAME, "--ignore-not-found")
