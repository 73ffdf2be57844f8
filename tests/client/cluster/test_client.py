"""Requests to the API server: pages, unknown kinds, and misspelt names."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from spotune.crd.definition import MODEL_SERVICES
from spotune.errors import KubernetesError, UsageError
from spotune_client.cluster.client import Cluster
from spotune_client.cluster.jobs import get_job, list_jobs
from spotune_client.cluster.resources import find_object, get_visible, job_name, parse_name
from tests.client.support.api_server import serving_cluster

SERVICES = "/apis/spotune.dev/v1alpha1/namespaces/team/modelservices"
JOBS = "/apis/spotune.dev/v1alpha1/namespaces/team/finetunejobs"
EVERYWHERE = "/apis/spotune.dev/v1alpha1/finetunejobs"
TEN = "a, b, c, d, e, f, g, h, i, j"


class ApiServer:
    """Serves the pages and objects that a test sets, and responds with 404 to all other paths."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.pages: dict[str, list[list[dict[str, Any]]]] = {}
        self.asked: list[tuple[str, dict[str, str], str | None]] = []

    def answer(self, path: str, query: dict[str, str], token: str | None) -> tuple[int, str]:
        self.asked.append((path, query, token))
        if path in self.objects:
            return 200, json.dumps(self.objects[path])
        collection, _, name = path.rpartition("/")
        if path in self.pages:
            number = int(query.get("continue", "0"))
            following = str(number + 1) if number + 1 < len(self.pages[path]) else ""
            return 200, json.dumps({"items": self.pages[path][number], "metadata": {"continue": following}})
        if collection in self.pages:
            message = f'finetunejobs.spotune.dev "{name}" not found'
            return 404, json.dumps({"kind": "Status", "message": message, "reason": "NotFound", "code": 404})
        return 404, "404 page not found\n"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[ApiServer, Cluster]]:
    """A fake API server, and a client for it in namespace `team`."""
    api = ApiServer()
    with serving_cluster(
        lambda path, query, headers: api.answer(path, query, headers["Authorization"]), tmp_path
    ) as cluster:
        yield api, cluster


def test_a_request_is_repeated_while_the_server_is_overloaded(tmp_path: Path) -> None:
    answers = iter([(429, "too many requests"), (429, "too many requests"), (200, '{"kind": "Pod"}')])
    with serving_cluster(lambda *_: next(answers), tmp_path) as cluster:
        assert cluster.get("/api/v1/namespaces/team/pods/x") == {"kind": "Pod"}


def named(*names: str, namespace: str = "team") -> list[dict[str, Any]]:
    return [{"metadata": {"name": name, "namespace": namespace}} for name in names]


def test_list_follows_pages_and_sends_the_token(server: tuple[ApiServer, Cluster]) -> None:
    api, cluster = server
    api.pages[JOBS] = [named("b", "c"), named("a")]
    assert [job["metadata"]["name"] for job in list_jobs(cluster)] == ["a", "b", "c"]
    assert api.asked == [
        (JOBS, {"limit": "500"}, "Bearer secret"),
        (JOBS, {"limit": "500", "continue": "1"}, "Bearer secret"),
    ]


@pytest.mark.parametrize("expirations", [1, 2])
def test_a_list_begins_again_once_when_its_version_has_expired(expirations: int, tmp_path: Path) -> None:
    asked: list[str] = []

    def answer(_path: str, query: dict[str, str], _headers: object) -> tuple[int, str]:
        asked.append(query.get("continue", ""))
        if "continue" not in query:
            return 200, json.dumps({"items": named("a"), "metadata": {"continue": "next"}})
        if asked.count("next") <= expirations:
            message = "The provided continue parameter is too old to display a consistent list result"
            return 410, json.dumps({"kind": "Status", "message": message, "reason": "Expired", "code": 410})
        return 200, json.dumps({"items": named("b"), "metadata": {}})

    with serving_cluster(answer, tmp_path) as cluster:
        if expirations == 1:
            assert [job["metadata"]["name"] for job in list_jobs(cluster)] == ["a", "b"]
        else:
            with pytest.raises(KubernetesError, match="410: The provided continue parameter is too old"):
                list_jobs(cluster)
    assert asked == ["", "next", "", "next"]


def test_jobs_of_all_namespaces_are_sorted_by_namespace(server: tuple[ApiServer, Cluster]) -> None:
    api, cluster = server
    api.pages[EVERYWHERE] = [named("a", namespace="z") + named("b", namespace="y")]
    assert [job["metadata"]["namespace"] for job in list_jobs(cluster, everywhere=True)] == ["y", "z"]


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["t5-sql", "other"], "namespace team has no FinetuneJob t5-sqk; did you mean t5-sql?"),
        (["a", "b"], "namespace team has no FinetuneJob t5-sqk: it has a, b (use --namespace for another namespace)"),
        ([], "namespace team has no FinetuneJob t5-sqk: it has none (use --namespace for another namespace)"),
        (
            list("abcdefghijkl"),
            f"namespace team has no FinetuneJob t5-sqk: it has {TEN} and more (use --namespace for another namespace)",
        ),
    ],
    ids=["nearly", "others", "none", "many"],
)
def test_error_for_an_unknown_job_names_existing_ones(
    names: list[str], message: str, server: tuple[ApiServer, Cluster]
) -> None:
    api, cluster = server
    api.pages[JOBS] = [named(*names)]
    with pytest.raises(UsageError) as caught:
        get_job(cluster, "t5-sqk")
    assert str(caught.value) == message


@pytest.mark.parametrize("name", ["", ".", "..", "../finetunejobs/a", "A b"])
def test_what_is_no_name_is_never_part_of_a_path(name: str, server: tuple[ApiServer, Cluster]) -> None:
    api, cluster = server
    api.pages = {JOBS: [named("a")], SERVICES: [named("a")]}
    with pytest.raises(UsageError, match=f"namespace team has no FinetuneJob {name or '..'}: it has a"):
        get_job(cluster, name)
    assert get_visible(cluster, MODEL_SERVICES, name) is None
    assert [path for path, _, _ in api.asked] == [JOBS]


def test_a_missing_crd_is_not_reported_as_a_missing_job(server: tuple[ApiServer, Cluster]) -> None:
    _, cluster = server
    for look in (
        lambda: list_jobs(cluster),
        lambda: list_jobs(cluster, everywhere=True),
        lambda: get_job(cluster, "x"),
    ):
        with pytest.raises(KubernetesError, match="this cluster has no FinetuneJob resource: spotune is not installed"):
            look()


@pytest.mark.parametrize(
    ("text", "kind", "name"),
    [
        ("t5-sql", None, "t5-sql"),
        ("ftj/t5-sql", "FinetuneJob", "t5-sql"),
        ("finetunejob/t5-sql", "FinetuneJob", "t5-sql"),
        ("ms/t5-sql", "ModelService", "t5-sql"),
        ("ModelService/t5-sql", "ModelService", "t5-sql"),
        ("modelservices/t5-sql", "ModelService", "t5-sql"),
    ],
)
def test_names_have_a_kind_as_for_kubectl(text: str, kind: str | None, name: str) -> None:
    resource, parsed = parse_name(text)
    assert (resource.kind if resource is not None else None, parsed) == (kind, name)


@pytest.mark.parametrize("text", ["pods/t5-sql", "ms/", "a/b/c"])
def test_a_name_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(UsageError, match="write ftj/NAME for a FinetuneJob, ms/NAME for a ModelService"):
        parse_name(text)


def test_a_service_is_refused_where_only_jobs_are_meant() -> None:
    assert job_name("ftj/t5-sql", "watch") == "t5-sql"
    with pytest.raises(UsageError, match="`spotune watch` works on FinetuneJobs, and ms/t5-sql is a ModelService"):
        job_name("ms/t5-sql", "watch")


def test_a_name_alone_means_the_job_or_else_the_service(server: tuple[ApiServer, Cluster]) -> None:
    api, cluster = server
    job, service = ({"metadata": {"name": "both", "uid": uid}} for uid in ("job", "service"))
    api.pages = {JOBS: [named("both")], SERVICES: [named("both", "answers")]}
    api.objects = {f"{JOBS}/both": job, f"{SERVICES}/both": service, f"{SERVICES}/answers": service}
    found = {text: find_object(cluster, text) for text in ("both", "ftj/both", "ms/both", "answers")}
    assert {text: each["metadata"]["uid"] for text, (_, each) in found.items()} == {
        "both": "job",
        "ftj/both": "job",
        "ms/both": "service",
        "answers": "service",
    }
    assert found["answers"][0].kind == "ModelService"
    with pytest.raises(UsageError, match=r"no FinetuneJob answer: .* \(there is a ModelService ms/answers\)"):
        find_object(cluster, "answer")
