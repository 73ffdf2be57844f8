"""The logs of services from a real HTTP server: merged, followed over broken connections, and refused."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from spotune.errors import RefusedError, UsageError
from spotune_client.cluster.client import Cluster
from spotune_client.logs.service_logs import LogSelection, followed_service_lines, service_log_lines
from tests.client.support.api_server import serving_cluster
from tests.client.support.streaming_server import Stream, streaming_cluster
from tests.operator.support.model_services import CLUSTER, service_pod, serving

PODS = "/api/v1/namespaces/team/pods"
SERVICE = "/apis/spotune.dev/v1alpha1/namespaces/team/modelservices/answers"
GATEWAY, REPLICA = f"{CLUSTER}-gateway-worker-aaaaa", f"{CLUSTER}-spot-worker-aaaaa"
Answer = tuple[int, str]


def line(second: int, text: str) -> str:
    """A line of a log as the kubelet sends it with timestamps."""
    return f"2026-01-02T03:04:{second:02}.123456789Z {text}\n"


class Logs:
    """The API server of a service with a gateway, a replica and a head."""

    def __init__(self) -> None:
        self.pods = [service_pod("gateway", "gateway"), service_pod(), service_pod("head")]
        self.logs: dict[str, Callable[[dict[str, str]], Answer]] = {}
        self.asked: list[tuple[str, dict[str, str]]] = []

    def answer(self, path: str, query: dict[str, str]) -> Answer:
        if path == PODS:
            component = query["labelSelector"].partition("app.kubernetes.io/component=")[2]
            wanted = [pod for pod in self.pods if component in pod["metadata"]["labels"]["app.kubernetes.io/component"]]
            return 200, json.dumps({"items": wanted, "metadata": {}})
        if path == SERVICE:
            return 200, json.dumps(serving())
        name, _, rest = path.removeprefix(f"{PODS}/").partition("/")
        if rest == "log" and name in self.logs:
            self.asked.append((name, query))
            return self.logs[name](query)
        return 200 if path.endswith("modelservices") else 404, json.dumps({"items": [], "metadata": {}})


def served(api: Logs, folder: Path) -> AbstractContextManager[Cluster]:
    return serving_cluster(lambda path, query, _headers: api.answer(path, query), folder)


@pytest.fixture
def api() -> Logs:
    logs = Logs()
    logs.logs[GATEWAY] = lambda _: (200, line(1, "a") + line(3, "c"))
    logs.logs[REPLICA] = lambda _: (200, line(2, "b") + line(4, "d"))
    logs.logs[f"{CLUSTER}-head-aaaaa"] = lambda _: (200, line(5, "of the head"))
    return logs


@pytest.fixture
def cluster(api: Logs, tmp_path: Path) -> Iterator[Cluster]:
    with served(api, tmp_path) as found:
        yield found


def printed(cluster: Cluster, **options: Any) -> list[str]:
    return list(service_log_lines(cluster, LogSelection("answers", **options), lambda _: None))


def test_lines_of_gateway_and_replicas_come_in_order_of_time_with_their_pod(cluster: Cluster) -> None:
    assert printed(cluster) == [f"{GATEWAY}: a", f"{REPLICA}: b", f"{GATEWAY}: c", f"{REPLICA}: d"]


def test_a_component_is_chosen(cluster: Cluster) -> None:
    assert printed(cluster, component="head") == [f"{CLUSTER}-head-aaaaa: of the head"]


def test_last_lines_and_age_limit_what_is_asked_for(api: Logs, cluster: Cluster) -> None:
    assert printed(cluster, lines=1, since_seconds=300.0) == [f"{REPLICA}: d"]
    assert {(query["tailLines"], query["sinceSeconds"]) for _, query in api.asked} == {("1", "300")}


def test_the_log_before_a_restart_comes_first(api: Logs, cluster: Cluster) -> None:
    api.pods[1]["status"]["containerStatuses"][0]["restartCount"] = 1
    api.logs[REPLICA] = lambda query: (200, line(2, "died") if "previous" in query else line(4, "again"))
    assert printed(cluster, component="replicas") == [f"{REPLICA}: died", f"{REPLICA}: again"]


def test_a_pod_that_has_not_started_or_is_gone_has_no_lines(api: Logs, cluster: Cluster) -> None:
    api.pods[0]["status"]["containerStatuses"][0]["state"] = {"waiting": {}}
    api.logs[REPLICA] = lambda _: (400, json.dumps({"message": "container is waiting to start"}))
    assert printed(cluster) == []
    assert [name for name, _ in api.asked] == [REPLICA]


def test_a_refused_log_is_an_error(api: Logs, cluster: Cluster) -> None:
    api.logs[REPLICA] = lambda _: (403, json.dumps({"message": "you may not read pods/log"}))
    with pytest.raises(RefusedError, match="you may not read pods/log"):
        printed(cluster)
    with pytest.raises(RefusedError, match="you may not read pods/log"):
        list(followed_service_lines(cluster, LogSelection("answers", "replicas"), lambda _: None))


def test_an_unknown_service_is_an_error(cluster: Cluster) -> None:
    with pytest.raises(UsageError, match="namespace team has no ModelService answer"):
        list(service_log_lines(cluster, LogSelection("answer"), lambda _: None))


def test_a_followed_log_continues_after_a_broken_connection_and_with_new_pods(api: Logs, cluster: Cluster) -> None:
    later = service_pod(suffix="bbbbb")
    answers = iter([line(2, "b") + line(2, "b"), line(2, "b") + line(2, "b") + line(3, "c")])

    def replica(query: dict[str, str]) -> Answer:
        api.pods = [later] if "sinceTime" in query else api.pods
        return 200, next(answers, "")

    api.logs[REPLICA], api.logs[later["metadata"]["name"]] = replica, lambda _: (200, line(9, "new"))
    following = followed_service_lines(cluster, LogSelection("answers", "replicas", lines=10), lambda _: None, 0.05)
    found = [next(following) for _ in range(4)]
    found.remove(f"{later['metadata']['name']}: new")  # lines of several pods come in order of arrival
    assert found == [*[f"{REPLICA}: b"] * 2, f"{REPLICA}: c"]
    first, again = (query for name, query in api.asked[:2] if name == REPLICA)
    assert (first["tailLines"], first["follow"]) == ("10", "true")
    assert again["sinceTime"].startswith("2026-01-02T03:04:02")
    assert "tailLines" not in again


@pytest.mark.parametrize("lines", [None, 0])
def test_a_followed_log_goes_on_after_a_silent_connection(lines: int | None, api: Logs, tmp_path: Path) -> None:
    asked: list[dict[str, str]] = []
    streams = iter(
        [
            Stream(end="silence"),
            Stream(line(2, "b") + line(2, "b"), end="silence"),
            Stream(line(2, "b") + line(2, "b") + line(3, "c"), end="silence"),
        ]
    )

    def answer(path: str, query: dict[str, str]) -> Stream | str:
        if not path.endswith("/log"):
            return api.answer(path, query)[1]
        asked.append(query)
        return next(streams)

    with streaming_cluster(answer, tmp_path) as cluster:
        selection = LogSelection("answers", "replicas", lines=lines)
        following = followed_service_lines(cluster, selection, lambda _: None, 0.05)
        assert [next(following) for _ in range(3)] == [*[f"{REPLICA}: b"] * 2, f"{REPLICA}: c"]
    assert asked[0].get("tailLines") == (None if lines is None else "0")
    assert "tailLines" not in asked[1]
    assert asked[1].get("sinceSeconds") == (None if lines is None else "1")
    assert asked[2]["sinceTime"].startswith("2026-01-02T03:04:02")
