"""The client of the API server: server-side apply, patch, delete, evict, list and watch of plain JSON objects.

kopf watches FinetuneJobs; all other requests use this client, with the credentials that kopf finds. The field manager
never changes: an apply removes fields that the operator no longer sets, and keeps those of other managers.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import kopf

from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError
from spotune_operator.kube.json_as_yaml import as_yaml

FIELD_MANAGER: Final = "spotune"
_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"
_JSON_PATCH: Final = "application/json-patch+json"
_PAGE: Final = 500
_REQUEST_SECONDS: Final = 30.0
_SILENCE_SECONDS: Final = 150.0
"""The API server sends a bookmark about every minute, so a watch without any event for longer is dead."""

Manifest = dict[str, Any]
Login = Callable[[], kopf.ConnectionInfo]


@dataclass(frozen=True)
class Resource:
    """A kind of objects, with its paths in the API.

    Attributes:
        group_version: ``v1``, or ``group/version``.
        kind: Name in CamelCase.
        plural: Name in paths.
        namespaced: Whether its objects are in namespaces.
    """

    group_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Path of the collection, or of one object."""
        root = "/api" if "/" not in self.group_version else "/apis"
        scope = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join(filter(None, (f"{root}/{self.group_version}{scope}/{self.plural}", name, subresource)))


FINETUNE_JOBS = Resource("spotune.dev/v1alpha1", "FinetuneJob", "finetunejobs")
MODEL_SERVICES = Resource("spotune.dev/v1alpha1", "ModelService", "modelservices")
FINETUNE_SWEEPS = Resource("spotune.dev/v1alpha1", "FinetuneSweep", "finetunesweeps")
CLAIMS = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
RAY_CLUSTERS = Resource("ray.io/v1", "RayCluster", "rayclusters")
POD_MONITORS = Resource("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
RAY_SERVICES = Resource("ray.io/v1", "RayService", "rayservices")
CORE_SERVICES = Resource("v1", "Service", "services")
BUDGETS = Resource("policy/v1", "PodDisruptionBudget", "poddisruptionbudgets")
INGRESSES = Resource("networking.k8s.io/v1", "Ingress", "ingresses")
HTTP_ROUTES = Resource("gateway.networking.k8s.io/v1", "HTTPRoute", "httproutes")
PODS = Resource("v1", "Pod", "pods")
NODES = Resource("v1", "Node", "nodes", namespaced=False)
STORAGE_CLASSES = Resource("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False)
EVENTS = Resource("v1", "Event", "events")
CHILDREN: Final = {
    resource.kind: resource for resource in (CLAIMS, CONFIG_MAPS, NETWORK_POLICIES, RAY_CLUSTERS, POD_MONITORS)
}
"""The children of FinetuneJobs, by kind."""
SERVICE_CHILDREN: Final = {
    resource.kind: resource
    for resource in (RAY_SERVICES, CORE_SERVICES, NETWORK_POLICIES, BUDGETS, INGRESSES, HTTP_ROUTES, POD_MONITORS)
}
"""The children of ModelServices, by kind."""
_APPLIED: Final = CHILDREN | SERVICE_CHILDREN | {MODEL_SERVICES.kind: MODEL_SERVICES}


class GoneError(KubernetesError):
    """The API server no longer has the version from which a watch should continue: list again."""


class ConflictError(KubernetesError):
    """The object exists already, is another one of the same name, or has changed in the meantime."""


class Kube:
    """A client of the API server; an asynchronous context manager.

    Args:
        login: Finds credentials; called again when the API server rejects them, because tokens of pods expire.
        request_seconds: Timeout of a request.
        silence_seconds: Timeout of a watch that gets no event.
    """

    def __init__(
        self, login: Login, request_seconds: float = _REQUEST_SECONDS, silence_seconds: float = _SILENCE_SECONDS
    ) -> None:
        self.count: Callable[[str, str], None] = lambda _verb, _plural: None
        """Called with the verb and the plural of every request."""
        self._login = login
        self._request_seconds = request_seconds
        self._silence_seconds = silence_seconds
        self._session: aiohttp.ClientSession | None = None
        self._refused: aiohttp.ClientSession | None = None
        self._server = ""

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for session in (self._session, self._refused):
            if session is not None:
                await session.close()

    async def apply(self, manifest: Manifest) -> Manifest:
        """Apply a child with force, which takes over fields that other managers have changed.

        Returns:
            The object after the apply.

        Raises:
            RefusedError: The API server rejected it.
            KubernetesError: The API server failed.
        """
        metadata = manifest["metadata"]
        path = _APPLIED[manifest["kind"]].path(metadata["namespace"], metadata["name"])
        parameters = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._json("PATCH", path, parameters, manifest, _APPLY)

    async def patch(
        self, resource: Resource, namespace: str, name: str, changes: Manifest, subresource: str = ""
    ) -> Manifest:
        """Merge changes into an object; returns the object afterwards."""
        path = resource.path(namespace, name, subresource)
        return await self._json("PATCH", path, {"fieldManager": FIELD_MANAGER}, changes, _MERGE)

    async def json_patch(
        self, resource: Resource, namespace: str, name: str, operations: Sequence[Mapping[str, Any]]
    ) -> Manifest:
        """Apply the operations of a JSON patch (RFC 6902) to an object; returns the object afterwards.

        Raises:
            RefusedError: An operation does not fit the object.
        """
        path = resource.path(namespace, name)
        return await self._json("PATCH", path, {"fieldManager": FIELD_MANAGER}, list(operations), _JSON_PATCH)

    async def create(self, resource: Resource, manifest: Manifest) -> bool:
        """Create an object; returns False if one of this name exists."""
        try:
            await self._json("POST", resource.path(manifest["metadata"]["namespace"]), {}, manifest)
        except ConflictError:
            return False
        return True

    async def find(self, resource: Resource, namespace: str, name: str) -> Manifest | None:
        """An object, without a cache; None if there is none of this name. For rare requests."""
        try:
            return await self._json("GET", resource.path(namespace, name), {})
        except NotFoundError:
            return None

    async def delete(
        self,
        resource: Resource,
        namespace: str,
        name: str,
        uid: str,
        grace_seconds: int | None = None,
        version: str = "",
    ) -> None:
        """Delete this object, and in the background what it owns; does nothing if it no longer exists.

        Args:
            resource: Its kind.
            namespace: Its namespace; empty for objects without one.
            name: Its name.
            uid: Its uid: another object of the same name is left alone.
            grace_seconds: Grace period; 0 also removes a pod on a dead node. None: the pod's own.
            version: Its ``resourceVersion``: a version that was changed since is left alone. Empty: any.
        """
        preconditions = {"uid": uid} | ({"resourceVersion": version} if version else {})
        options: Manifest = {"preconditions": preconditions, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            await self._json("DELETE", resource.path(namespace, name), {}, options)
        except (NotFoundError, ConflictError):
            return

    async def evict(self, namespace: str, name: str) -> bool:
        """Evict a pod; returns False while its PodDisruptionBudget forbids it."""
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        try:
            await self._json("POST", PODS.path(namespace, name, "eviction"), {}, body)
        except NotFoundError:
            return True
        except KubernetesError as error:
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                return False
            raise
        return True

    async def pods_of(self, *, namespace: str = "", labels: str = "", fields: str = "") -> list[Manifest]:
        """List pods by selectors, without a cache; for rare requests."""
        parameters = {"labelSelector": labels, "fieldSelector": fields}
        found = await self._json("GET", PODS.path(namespace), {n: v for n, v in parameters.items() if v})
        return list(found["items"])

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server serves a kind; a new CRD is served after a moment."""
        group, _, version = resource.group_version.partition("/")
        groups = {found["name"] for found in (await self._json("GET", "/apis", {}))["groups"]}
        if group not in groups:
            return False
        known = await self.document(f"/apis/{group}/{version}")
        return known is not None and resource.plural in {found["name"] for found in known["resources"]}

    async def document(self, path: str) -> Manifest | None:
        """A document such as ``/version``; None if the API server has none at this path."""
        try:
            return await self._json("GET", path, {})
        except NotFoundError:
            return None

    async def pages(self, resource: Resource, namespace: str, labels: str) -> AsyncIterator[tuple[list[Manifest], str]]:
        """List all objects, as pages with the version of the list."""
        parameters = {"limit": str(_PAGE)} | ({"labelSelector": labels} if labels else {})
        while True:
            page = await self._json("GET", resource.path(namespace), parameters)
            yield page["items"], page["metadata"]["resourceVersion"]
            if not page["metadata"].get("continue"):
                return
            parameters["continue"] = page["metadata"]["continue"]

    async def watch(
        self, resource: Resource, namespace: str, labels: str, version: str, seconds: int
    ) -> AsyncGenerator[tuple[str, Manifest], None]:
        """Watch changes since a version for a number of seconds, as pairs of event type and object.

        The event type is ``ADDED``, ``MODIFIED``, ``DELETED`` or ``BOOKMARK``.

        Raises:
            GoneError: The version is too old.
            KubernetesError: The watch failed.
        """
        parameters = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        parameters |= {"timeoutSeconds": str(seconds)} | ({"labelSelector": labels} if labels else {})
        timeout = aiohttp.ClientTimeout(total=seconds + self._request_seconds, sock_read=self._silence_seconds)
        async with self._request("GET", resource.path(namespace), parameters, client_timeout=timeout) as response:
            try:
                async for line in _lines(response):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise _error_of(int(event["object"].get("code", 0)), str(event["object"].get("message")))
                    yield event["type"], event["object"]
            finally:
                _abort(response)

    async def _json(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        body: Manifest | list[Any] | None = None,
        content_type: str = "",
    ) -> Manifest:
        timeout = aiohttp.ClientTimeout(total=self._request_seconds)
        async with self._request(method, path, parameters, body, content_type, client_timeout=timeout) as response:
            found: Manifest = json.loads(await response.read())
            return found

    @asynccontextmanager
    async def _request(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        body: Manifest | list[Any] | None = None,
        content_type: str = "",
        *,
        client_timeout: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """The response of a successful request; retried once with new credentials if these are rejected.

        Raises:
            KubernetesError: The request failed, or the response is not JSON (such as the page of a proxy).
        """
        assert self._session is not None, "the client is used within its context"
        text = json.dumps(body) if body is not None else None
        if text is not None and content_type == _APPLY:
            text = as_yaml(text)
        headers = {"Content-Type": content_type or "application/json"}
        try:
            for is_retry in (False, True):
                self.count("WATCH" if "watch" in parameters else method, _plural(path))
                session = self._session
                async with session.request(
                    method, self._server + path, params=parameters, data=text, headers=headers, timeout=client_timeout
                ) as response:
                    if response.status < HTTPStatus.BAD_REQUEST:
                        yield response
                        return
                    if response.status != HTTPStatus.UNAUTHORIZED or is_retry:
                        raise _error_of(response.status, _message(await response.text(errors="replace")))
                await self._renew_login(session)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubernetesError(_unreachable(error)) from error
        except (ValueError, TypeError, KeyError) as error:
            raise KubernetesError(f"the API server did not respond with valid JSON ({error})") from error

    async def _renew_login(self, refused: aiohttp.ClientSession) -> None:
        """Log in again, unless another request has done so since this session's credentials were rejected.

        The old session stays open for requests that still wait on it, until the next session is rejected.
        """
        if self._session is refused:
            former, self._refused = self._refused, refused
            self._open()
            if former is not None:
                await former.close()

    def _open(self) -> None:
        """Log in and open a session with the credentials."""
        connection = self._login()
        self._server = connection.server.rstrip("/")
        headers = {"Accept": "application/json", "User-Agent": "spotune-operator", **connection.as_http_headers()}
        connector = aiohttp.TCPConnector(ssl=connection.as_ssl_context(), limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=connection.trust_env)


def _abort(response: aiohttp.ClientResponse) -> None:
    """Drop the connection of a response that was not read to its end.

    An ordinary close waits in the background for the server's TLS close, beyond the end of its session.
    """
    if response.connection is not None and response.connection.transport is not None:
        response.connection.transport.abort()


def _plural(path: str) -> str:
    """The plural in a path; of a path without one, its first part."""
    _, root, *parts = path.split("/")
    parts = parts[1:] if root == "api" else parts[2:]
    if not parts:
        return root
    return parts[2] if parts[0] == "namespaces" and len(parts) > 2 else parts[0]


def _error_of(status: int, message: str) -> KubernetesError:
    """The error for an HTTP status.

    A status is a ``RefusedError`` only if the same request would be rejected again. An overloaded API server (429, also
    for a contended quota) and a webhook that does not respond (500) are temporary.
    """
    match status:
        case 404:
            return NotFoundError(message, status)
        case 409:
            return ConflictError(message, status)
        case 410:
            return GoneError(message, status)
        case 400 | 403 | 413 | 415 | 422:
            return RefusedError(message, status)
    return KubernetesError(f"the API server responded with HTTP {status}: {message}", status)


def _message(text: str) -> str:
    """The message of an error response: that of a ``v1.Status``, or the text of a proxy."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or "no reason given"


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length; aiohttp's own reader limits it."""
    remainder = b""
    async for chunk in response.content.iter_any():
        *lines, remainder = (remainder + chunk).split(b"\n")
        for line in lines:
            yield line


def _unreachable(error: BaseException) -> str:
    return f"the API server cannot be reached ({str(error) or type(error).__name__})"
