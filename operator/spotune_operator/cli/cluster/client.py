"""The API server as a user of it: plain JSON objects in and out, and its refusals as sentences."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any, Final
from urllib.parse import quote, urlencode

import urllib3
from kubernetes.client import ApiClient

from spotune_operator.cli.cluster.api_errors import refusal, unreachable
from spotune_operator.cli.cluster.pod_stream import PodConnection, open_connection

Manifest = dict[str, Any]

_CONNECT_SECONDS: Final = 10.0
_ANSWER_SECONDS: Final = 60.0
_PAGE: Final = 500
_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"


class Cluster:
    """One API server, and the namespace that is looked at.

    Args:
        client: Knows the server and logs in to it.
        namespace: Of the jobs.
    """

    def __init__(self, client: ApiClient, namespace: str) -> None:
        self._client = client
        self.namespace = namespace

    @property
    def server(self) -> str:
        """The API server's URL."""
        return str(self._client.configuration.host)

    def path(self, resource: str, name: str = "", group_version: str = "v1") -> str:
        """Path of a kind in the namespace, or of one of its objects."""
        root = "/api" if "/" not in group_version else "/apis"
        parts = (group_version, "namespaces", self.namespace, resource, *filter(None, [name]))
        return "/".join((root, *(quote(part) for part in parts)))

    def get(self, path: str, **parameters: str) -> Manifest:
        """An object.

        Raises:
            NotFoundError: There is no such object, or no such kind.
            RefusedError: The user may not see it.
            KubernetesError: The API server does not answer.
        """
        return self._json("GET", path, parameters)

    def items(self, path: str, **parameters: str) -> list[Manifest]:
        """All objects of a collection; raises as ``get`` does."""
        found: list[Manifest] = []
        wanted = {"limit": str(_PAGE), **parameters}
        while True:
            page = self._json("GET", path, wanted)
            found += page["items"]
            following = page["metadata"].get("continue")
            if not following:
                return found
            wanted["continue"] = following

    def create(self, path: str, manifest: Manifest) -> Manifest:
        """Create an object; raises as ``get`` does."""
        return self._json("POST", path, {}, manifest)

    def patch(self, path: str, changes: Manifest) -> Manifest:
        """Merge changes into an object; raises as ``get`` does."""
        return self._json("PATCH", path, {}, changes, _MERGE)

    def delete(self, path: str, grace_seconds: int) -> None:
        """Delete an object; raises as ``get`` does."""
        self._json("DELETE", path, {}, {"gracePeriodSeconds": grace_seconds, "propagationPolicy": "Background"})

    def lines(self, path: str, **parameters: str) -> Iterator[str]:
        """Lines of a text that the API server streams, such as a container's log, until it ends; raises as ``get``."""
        answer = self._request("GET", path, parameters, None, _JSON, read_seconds=None)
        rest = b""
        try:
            for chunk in answer.stream():
                *whole, rest = (rest + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        except urllib3.exceptions.HTTPError as error:
            raise unreachable(self.server, error) from error
        finally:
            answer.close()
        if rest:
            yield rest.decode(errors="replace")

    def connect(self, pod: str, port: int) -> PodConnection:
        """A connection to a port of a pod, through the API server.

        Raises:
            RefusedError: The user may not forward ports.
            KubernetesError: There is no such pod, or it does not listen.
        """
        url = f"{self.server}{self.path('pods', pod)}/portforward"
        return open_connection(self._client.configuration, url, port, self.authorization())

    def authorization(self) -> dict[str, str]:
        """The header that says who asks, with a fresh token where tokens expire; empty with a client certificate."""
        headers: dict[str, str] = {}
        self._client.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        return headers

    def _json(
        self, method: str, path: str, parameters: Mapping[str, str], body: Manifest | None = None, kind: str = _JSON
    ) -> Manifest:
        answer = self._request(method, path, parameters, body, kind, read_seconds=_ANSWER_SECONDS)
        try:
            found: Manifest = json.loads(answer.read())
        except urllib3.exceptions.HTTPError as error:
            raise unreachable(self.server, error) from error
        return found

    def _request(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        body: Manifest | None,
        kind: str,
        read_seconds: float | None,
    ) -> urllib3.BaseHTTPResponse:
        """The answer, if it is a good one, before its content is read."""
        headers = {"Accept": _JSON, "Content-Type": kind, "User-Agent": "spotune", **self.authorization()}
        url = f"{self.server}{path}" + (f"?{urlencode(parameters)}" if parameters else "")
        text = json.dumps(body).encode() if body is not None else None
        try:
            answer = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=text,
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=read_seconds),
                preload_content=False,
            )
            if answer.status < 400:
                return answer
            raise refusal(answer.status, answer.read().decode(errors="replace"), self.server)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unreachable(self.server, error) from error
