"""What other programs answer: Ray's Jobs API, supervisors, gateways, and the API server of Kubernetes."""

from __future__ import annotations

import json
import threading
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from hypothesis import strategies as st
from kubernetes.client import ApiClient, Configuration

from spotune.errors import JobError, KubernetesError
from spotune_client.cluster.client import Cluster
from spotune_client.cluster.conditions import condition_heading, notable_conditions
from spotune_client.fleet.summary import cells, fleet_of
from spotune_client.objects import StoredJob, StoredService, StoredSweep
from spotune_operator.observe.supervisor_status import parse_progress
from spotune_operator.serving.gateway_stats import parse_stats
from spotune_trainer.supervisor.ray_head.jobs_client import JobsClient, JobsUnavailableError
from tests.fuzz.mutations import VALUES, changed_bytes, changed_json, changed_values
from tests.fuzz.target import Target, check_names
from tests.fuzz.targets.volumes import JOB, STATUS
from tests.operator.support.malformed_responses import answers


class _Answering(ThreadingHTTPServer):
    """A server that gives every request the same answer."""

    daemon_threads = True
    body: bytes = b""
    status: int = 200

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    server: _Answering

    def do_GET(self) -> None:
        self.send_response(self.server.status)
        self.send_header("Content-Length", str(len(self.server.body)))
        self.end_headers()
        self.wfile.write(self.server.body)

    def log_message(self, *_: Any) -> None:
        """Do not log requests."""


@cache
def _server() -> _Answering:
    server = _Answering(("127.0.0.1", 0), _Handler)
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    return server


@cache
def _cluster() -> Cluster:
    configuration = Configuration()
    configuration.host = _server().url
    configuration.retries = False
    return Cluster(ApiClient(configuration), "team")


RAY_JOB = {
    "submission_id": "spotune-1",
    "status": "RUNNING",
    "driver_exit_code": None,
    "message": "runs",
    "metadata": {"job": "sql"},
}


def read_ray_answer(answer: tuple[int, bytes]) -> None:
    """Any answer of Ray's dashboard: values, or the error of an API that does not answer."""
    server = _server()
    server.status, server.body = answer
    client = JobsClient(server.url, "token", 5.0)
    for call in (client.version, client.list_jobs, lambda: client.find("spotune-1"), lambda: client.logs("spotune-1")):
        try:
            found = call()
        except JobsUnavailableError as error:
            check_names(error, server.url)
        else:
            for job in found if isinstance(found, list) else ():
                assert isinstance(job.submission_id, str)
                assert isinstance(job.has_ended, bool)


OBJECT = {**JOB, "metadata": {"name": "sql", "namespace": "team", "labels": {"team": "a"}, "uid": "u", "generation": 2}}
CONDITION = {
    "type": "Training",
    "status": "True",
    "reason": "Steps",
    "message": "trains",
    "lastTransitionTime": "2027-01-01T00:00:00Z",
    "observedGeneration": 2,
}


def read_api_server(answer: tuple[int, bytes]) -> None:
    """Any answer of an API server, or of a proxy before it: objects, or a KubernetesError."""
    server, cluster = _server(), _cluster()
    server.status, server.body = answer
    path = cluster.path("finetunejobs", "", "spotune.dev/v1alpha1")
    for call in (lambda: cluster.get(path), lambda: cluster.items(path), lambda: list(cluster.lines(path))):
        try:
            call()
        except KubernetesError as error:
            str(error).encode()


JOB_STATUS = {
    "phase": "Training",
    "observedGeneration": 2,
    "conditions": [CONDITION],
    "workers": "1/2",
    "goodput": 0.5,
    "gpuSeconds": {"spot": 30.0, "onDemand": 1.0},
    "cost": {"spent": 3.0, "saved": 1.0, "currency": "USD"},
    "stepsLost": 1,
}


def read_object(status: Any) -> None:
    """Any status: a model, or a JobError that names the object. What the schema of the CRD accepts can be shown."""
    raw = {**OBJECT, "status": _as_stored(status)}
    for kind in (StoredJob, StoredSweep, StoredService):
        try:
            valid = kind(raw).status
        except JobError as error:
            check_names(error, "sql")
        else:
            shown = {**OBJECT, "status": json.loads(valid.model_dump_json(by_alias=True, exclude_none=True))}
            _show(kind(shown))


def _as_stored(value: Any) -> Any:
    """The value as an API server stores it: halves of surrogate pairs are replaced."""
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _show(found: Any) -> None:
    assert found.phase
    assert repr(found)
    found.is_current, found.outcome  # noqa: B018 - properties that read the status
    if isinstance(found, StoredJob):
        for condition in notable_conditions(found.raw):
            condition_heading(condition)
        fleet = fleet_of([found.raw])
        json.dumps([fleet.as_json(), cells(fleet.total)])


STATS = {
    "process": "p",
    "versions": {
        "v1": {
            "weight": 100,
            "error": "",
            "running": 1,
            "requests": 3,
            "errors": 0,
            "firstToken": {"0.1": 2, "+Inf": 3},
            "token": {"0.1": 2, "+Inf": 3},
        }
    },
    "replicas": {"v1": {"RUNNING": 1}},
}


def read_polled(content: Any) -> None:
    """A JSON object at the address of a supervisor or gateway: values within the limits of a status."""
    if not isinstance(content, dict):
        return
    progress, stats = parse_progress(content), parse_stats(content)
    json.dumps(progress.model_dump(mode="json"), allow_nan=False)
    for version in stats.versions.values():
        assert version.counters.error_rate >= 0
        for histogram in (version.counters.first_token, version.counters.token):
            histogram.median()
            histogram.fraction_above(0.5)


def _responses(samples: list[Any]) -> st.SearchStrategy[tuple[int, bytes]]:
    statuses = st.sampled_from([200, 200, 200, 201, 301, 401, 403, 404, 409, 422, 500, 503])
    text = changed_bytes([b"<html>502 Bad Gateway</html>", b""])
    return st.tuples(statuses, changed_json(samples) | text)


API_ANSWERS = [
    {"kind": "Status", "message": "no", "reason": "Forbidden", "code": 403},
    OBJECT,
    {"items": [OBJECT], "metadata": {"resourceVersion": "7", "continue": ""}},
]

TARGETS = (
    Target(
        "ray",
        "answers of Ray's Jobs API",
        _responses([RAY_JOB, [RAY_JOB], {"ray_version": "2", "logs": "x"}]),
        read_ray_answer,
        60,
    ),
    Target(
        "api-server",
        "answers of the API server, and of proxies before it",
        _responses(API_ANSWERS),
        read_api_server,
        60,
    ),
    Target("objects", "statuses of jobs, sweeps and services", changed_values([JOB_STATUS]) | VALUES, read_object),
    Target(
        "polled",
        "/progress and /stats, as the operator polls them",
        answers() | changed_values([STATS, STATUS]) | VALUES,
        read_polled,
    ),
)
