"""A small client of the Kubernetes API: JSON objects in and out, and errors with messages for users."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import Any, Final
from urllib.parse import quote, urlencode

import urllib3
from kubernetes.client import ApiClient

from spotune.errors import KubernetesError, RefusedError
from spotune_client.cluster.api_errors import (
    SilentError,
    error_from_response,
    retried_if_overloaded,
    unreachable_error,
)
from spotune_client.cluster.credential_errors import logged_errors
from spotune_client.cluster.pod_stream import PodConnection, open_connection

Manifest = dict[str, Any]

_CONNECT_SECONDS: Final = 10.0
_RESPONSE_SECONDS: Final = 60.0
QUIET_SECONDS: Final = 60.0
"""Time without a byte after which a stream counts as lost: a machine or proxy in between may drop it silently."""
_PAGE: Final = 500
_JSON: Final = "application/json"
_MERGE: Final = "application/merge-patch+json"
_APPLY: Final = "application/apply-patch+yaml"
_HINT: Final = ". Check that the kubeconfig's server is an API server, and not a proxy or a page to log in"
_FIELD_MANAGER: Final = "spotune-client"


class Cluster:
    """An API server, and the namespace that commands act on.

    Args:
        client: The Kubernetes library's client, with server and credentials.
        namespace: Namespace of the jobs.
        quiet_seconds: Time without a byte after which a stream counts as lost.
    """

    def __init__(self, client: ApiClient, namespace: str, quiet_seconds: float = QUIET_SECONDS) -> None:
        self._client = client
        self.namespace = namespace
        self._quiet_seconds = quiet_seconds

    def in_namespace(self, namespace: str) -> Cluster:
        """The same cluster, with another namespace to act on."""
        found = copy.copy(self)
        found.namespace = namespace
        return found

    def close(self) -> None:
        """Close idle connections."""
        self._client.rest_client.pool_manager.clear()

    @property
    def server(self) -> str:
        """The API server's URL."""
        return str(self._client.configuration.host)

    def path(self, resource: str, name: str = "", group_version: str = "v1") -> str:
        """URL path of a resource collection in the namespace, or of one object in it."""
        root = "/api" if "/" not in group_version else "/apis"
        parts = (group_version, "namespaces", self.namespace, resource, *filter(None, [name]))
        return "/".join((root, *(quote(part) for part in parts)))

    def get(self, path: str, **parameters: str) -> Manifest:
        """Get an object.

        Raises:
            NotFoundError: The object or its kind does not exist.
            RefusedError: The user may not read it.
            KubernetesError: The API server does not answer.
        """
        return self._json("GET", path, parameters)

    def items(self, path: str, **parameters: str) -> list[Manifest]:
        """List all objects of a collection, page by page; raises as ``get`` does.

        The list begins again, once, if the API server no longer has the version of its first page.
        """
        try:
            return self._all_pages(path, parameters)
        except KubernetesError as error:
            if error.status != HTTPStatus.GONE:
                raise
            return self._all_pages(path, parameters)

    def _all_pages(self, path: str, parameters: Mapping[str, str]) -> list[Manifest]:
        found: list[Manifest] = []
        query = {"limit": str(_PAGE), **parameters}
        while True:
            page = self._json("GET", path, query)
            items, metadata = page.get("items") or [], page.get("metadata") or {}
            following = str(metadata.get("continue") or "") if isinstance(metadata, dict) else ""
            repeats = bool(following) and following == query.get("continue")
            if repeats or "items" not in page or not isinstance(items, list) or not isinstance(metadata, dict):
                raise KubernetesError(
                    f"{self.server}{path} responded with something else than a list of objects{_HINT}"
                )
            found += items
            if not following:
                return found
            query["continue"] = following

    def create(self, path: str, manifest: Manifest) -> Manifest:
        """Create an object; raises as ``get`` does."""
        return self._json("POST", path, {}, manifest)

    def patch(self, path: str, changes: Manifest) -> Manifest:
        """Apply a JSON merge patch to an object; raises as ``get`` does."""
        return self._json("PATCH", path, {}, changes, _MERGE)

    def apply(self, path: str, manifest: Manifest, *, force: bool = False) -> Manifest:
        """Apply an object on the server side: it is created, or gets these fields.

        Args:
            path: Path of the object.
            manifest: The object, with the fields to own.
            force: Take over fields that others have set to other values.

        Raises:
            RefusedError: Another owner has set a field to another value, or the object is invalid.
        """
        parameters = {"fieldManager": _FIELD_MANAGER, **({"force": "true"} if force else {})}
        return self._json("PATCH", path, parameters, manifest, _APPLY)

    def delete(self, path: str, grace_seconds: int | None = None) -> None:
        """Delete an object, and in the background what it owns; raises as ``get`` does."""
        grace = {} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}
        self._json("DELETE", path, {}, {**grace, "propagationPolicy": "Background"})

    def lines(self, path: str, **parameters: str) -> Iterator[str]:
        """Yield the lines of a streamed text, such as a container's log, until it ends; raises as ``get`` does.

        Raises:
            SilentError: Nothing has arrived for a while: nothing is printed, or the connection is lost.
        """
        response = self._request("GET", path, parameters, None, _JSON, read_seconds=self._quiet_seconds)
        remainder = b""
        try:
            for chunk in response.stream():
                *whole, remainder = (remainder + chunk).split(b"\n")
                yield from (line.decode(errors="replace") for line in whole)
        except urllib3.exceptions.ReadTimeoutError as error:
            raise SilentError(f"{self.server}{path} has sent nothing for {self._quiet_seconds:.0f} s") from error
        except urllib3.exceptions.HTTPError as error:
            raise unreachable_error(self.server, error) from error
        finally:
            response.close()
        if remainder:
            yield remainder.decode(errors="replace")

    def connect(self, pod: str, port: int) -> PodConnection:
        """Open a connection to a port of a pod, through the API server.

        Raises:
            RefusedError: The user may not forward ports.
            KubernetesError: The pod does not exist, or does not listen on the port.
        """
        url = f"{self.server}{self.path('pods', pod)}/portforward"
        configuration, seconds = self._client.configuration, self._quiet_seconds
        return retried_if_overloaded(lambda: open_connection(configuration, url, port, self.authorization(), seconds))

    def authorization(self) -> dict[str, str]:
        """The authorization header, with a refreshed token if tokens expire; empty with a client certificate.

        Raises:
            RefusedError: The token has characters that no token has.
            KubernetesError: The credential plugin fails.
        """
        headers: dict[str, str] = {}
        with logged_errors() as errors:
            self._client.update_params_for_auth(headers, [], ["BearerToken"], "", "", None)
        if errors:
            raise KubernetesError(f"the credential plugin for {self.server} failed: {'; '.join(errors)}")
        if not all(value.isascii() and value.isprintable() for value in headers.values()):
            raise RefusedError(f"the kubeconfig's token for {self.server} has a line break or special characters")
        return headers

    def _json(
        self, method: str, path: str, parameters: Mapping[str, str], body: Manifest | None = None, kind: str = _JSON
    ) -> Manifest:
        response = self._request(method, path, parameters, body, kind, read_seconds=_RESPONSE_SECONDS)
        try:
            found = json.loads(response.read())
        except urllib3.exceptions.HTTPError as error:
            raise unreachable_error(self.server, error) from error
        except (ValueError, RecursionError) as error:
            message = f"{self.server}{path} responded with something else than JSON ({error}){_HINT}"
            raise KubernetesError(message) from error
        if not isinstance(found, dict):
            raise KubernetesError(f"{self.server}{path} responded with something else than an object{_HINT}")
        return found

    def _request(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        body: Manifest | None,
        kind: str,
        read_seconds: float,
    ) -> urllib3.BaseHTTPResponse:
        """Send a request and return its response with unread content; raise if it is not a success."""
        headers = {"Accept": _JSON, "Content-Type": kind, "User-Agent": "spotune", **self.authorization()}
        url = f"{self.server}{path}" + (f"?{urlencode(parameters)}" if parameters else "")
        text = json.dumps(body).encode() if body is not None else None

        def send() -> urllib3.BaseHTTPResponse:
            response = self._client.rest_client.pool_manager.request(
                method,
                url,
                body=text,
                headers=headers,
                timeout=urllib3.Timeout(connect=_CONNECT_SECONDS, read=read_seconds),
                preload_content=False,
            )
            if response.status < 400:
                return response
            content, retry_after = response.read().decode(errors="replace"), response.headers.get("Retry-After", "")
            raise error_from_response(response.status, content, self.server, retry_after)

        try:
            return retried_if_overloaded(send)
        except (urllib3.exceptions.HTTPError, OSError) as error:
            raise unreachable_error(self.server, error) from error
