"""The API server: server-side apply with our field manager, deletion, lists and watches of plain JSON objects.

kopf watches FinetuneJobs; everything else goes through here, over the credentials that kopf finds. The field manager
is the same at all times, so that what we no longer want is taken away by the next apply, and what others own stays.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import kopf

from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError

FIELD_MANAGER: Final = "spotune"
_APPLY: Final = "application/apply-patch+yaml"  # JSON is YAML
_MERGE: Final = "application/merge-patch+json"
_PAGE: Final = 500
_REQUEST_SECONDS: Final = 30.0
_SILENCE_SECONDS: Final = 150.0
"""Bookmarks come about every minute: a watch that is silent for longer is dead."""

Manifest = dict[str, Any]
Login = Callable[[], kopf.ConnectionInfo]


@dataclass(frozen=True)
class Resource:
    """A kind as the API server's paths name it.

    Attributes:
        group_version: ``v1``, or group and version.
        kind: In CamelCase.
        plural: As in paths.
        namespaced: Whether its objects live in namespaces.
    """

    group_version: str
    kind: str
    plural: str
    namespaced: bool = True

    def path(self, namespace: str = "", name: str = "", subresource: str = "") -> str:
        """Path of the collection, or of one object."""
        root = "/api" if "/" not in self.group_version else "/apis"
        place = f"/namespaces/{namespace}" if self.namespaced and namespace else ""
        return "/".join(filter(None, (f"{root}/{self.group_version}{place}/{self.plural}", name, subresource)))


JOBS = Resource("spotune.dev/v1alpha1", "FinetuneJob", "finetunejobs")
CLAIMS = Resource("v1", "PersistentVolumeClaim", "persistentvolumeclaims")
CONFIG_MAPS = Resource("v1", "ConfigMap", "configmaps")
NETWORK_POLICIES = Resource("networking.k8s.io/v1", "NetworkPolicy", "networkpolicies")
RAY_CLUSTERS = Resource("ray.io/v1", "RayCluster", "rayclusters")
POD_MONITORS = Resource("monitoring.coreos.com/v1", "PodMonitor", "podmonitors")
PODS = Resource("v1", "Pod", "pods")
NODES = Resource("v1", "Node", "nodes", namespaced=False)
STORAGE_CLASSES = Resource("storage.k8s.io/v1", "StorageClass", "storageclasses", namespaced=False)
EVENTS = Resource("v1", "Event", "events")
CHILDREN: Final = {
    resource.kind: resource for resource in (CLAIMS, CONFIG_MAPS, NETWORK_POLICIES, RAY_CLUSTERS, POD_MONITORS)
}


class GoneError(KubernetesError):
    """The version that a watch was to go on from is forgotten: list again."""


class Kube:
    """A client; an asynchronous context manager.

    Args:
        login: Finds credentials; asked again when the API server refuses them, for tokens of pods expire.
    """

    def __init__(self, login: Login) -> None:
        self.count: Callable[[str, str], None] = lambda _verb, _plural: None
        """Called with verb and plural of every request."""
        self._login = login
        self._session: aiohttp.ClientSession | None = None
        self._server = ""

    async def __aenter__(self) -> Self:
        self._open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._session is not None:
            await self._session.close()

    async def apply(self, manifest: Manifest) -> Manifest:
        """Apply a child, taking over fields of ours that others have changed; the object as it is then.

        Raises:
            RefusedError: The API server does not take it.
            KubernetesError: It does not answer.
        """
        metadata = manifest["metadata"]
        path = CHILDREN[manifest["kind"]].path(metadata["namespace"], metadata["name"])
        parameters = {"fieldManager": FIELD_MANAGER, "force": "true"}
        return await self._json("PATCH", path, parameters, manifest, _APPLY)

    async def patch(
        self, resource: Resource, namespace: str, name: str, changes: Manifest, subresource: str = ""
    ) -> Manifest:
        """Merge changes into an object; the object as it is then."""
        path = resource.path(namespace, name, subresource)
        return await self._json("PATCH", path, {"fieldManager": FIELD_MANAGER}, changes, _MERGE)

    async def create(self, resource: Resource, manifest: Manifest) -> bool:
        """Create an object; False if there is one of its name."""
        try:
            await self._json("POST", resource.path(manifest["metadata"]["namespace"]), {}, manifest)
        except RefusedError as error:
            if error.status == HTTPStatus.CONFLICT:
                return False
            raise
        return True

    async def delete(
        self, resource: Resource, namespace: str, name: str, uid: str, grace_seconds: int | None = None
    ) -> None:
        """Delete this very object, and what it owns in the background; nothing if it is gone.

        Args:
            resource: Its kind.
            namespace: Of the object; empty for objects of the cluster.
            name: Of the object.
            uid: Another object of the same name is left alone.
            grace_seconds: 0 also takes away a pod of whose node nobody hears; None: its own.
        """
        options: Manifest = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        if grace_seconds is not None:
            options["gracePeriodSeconds"] = grace_seconds
        try:
            await self._json("DELETE", resource.path(namespace, name), {}, options)
        except NotFoundError:
            return
        except RefusedError as error:
            if error.status != HTTPStatus.CONFLICT:
                raise

    async def evict(self, namespace: str, name: str) -> bool:
        """Ask for a pod to go, by the rules of its PodDisruptionBudget; False while these forbid it."""
        metadata = {"name": name, "namespace": namespace}
        body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": metadata}
        try:
            await self._json("POST", PODS.path(namespace, name, "eviction"), {}, body)
        except NotFoundError:
            return True
        except RefusedError as error:
            if error.status == HTTPStatus.TOO_MANY_REQUESTS:
                return False
            raise
        return True

    async def pods_of(self, *, namespace: str = "", labels: str = "", fields: str = "") -> list[Manifest]:
        """Pods by selectors, asked now; for what happens so seldom that no cache is kept of it."""
        parameters = {"labelSelector": labels, "fieldSelector": fields}
        found = await self._json("GET", PODS.path(namespace), {n: v for n, v in parameters.items() if v})
        items: list[Manifest] = found["items"]
        return items

    async def pages(self, resource: Resource, namespace: str, labels: str) -> AsyncIterator[tuple[list[Manifest], str]]:
        """All objects, in pages with the version of the list."""
        parameters = {"limit": str(_PAGE)} | ({"labelSelector": labels} if labels else {})
        while True:
            page = await self._json("GET", resource.path(namespace), parameters)
            yield page["items"], page["metadata"]["resourceVersion"]
            if not page["metadata"].get("continue"):
                return
            parameters["continue"] = page["metadata"]["continue"]

    async def watch(
        self, resource: Resource, namespace: str, labels: str, version: str, seconds: int
    ) -> AsyncIterator[tuple[str, Manifest]]:
        """Changes since a version, as (ADDED, MODIFIED, DELETED or BOOKMARK, object), for so many seconds.

        Raises:
            GoneError: The version is too old.
        """
        parameters = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        parameters |= {"timeoutSeconds": str(seconds)} | ({"labelSelector": labels} if labels else {})
        timeout = aiohttp.ClientTimeout(total=seconds + _REQUEST_SECONDS, sock_read=_SILENCE_SECONDS)
        try:
            async with self._request("GET", resource.path(namespace), parameters, None, "", timeout) as answer:
                await self._raise_for(answer)
                async for line in _lines(answer):
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise GoneError(str(event["object"].get("message")), event["object"].get("code", 0))
                    yield event["type"], event["object"]
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubernetesError(_unreachable(error)) from error

    async def _json(
        self, method: str, path: str, parameters: Mapping[str, str], body: Manifest | None = None, kind: str = ""
    ) -> Manifest:
        for last in (False, True):
            try:
                async with self._request(method, path, parameters, body, kind) as answer:
                    if answer.status == HTTPStatus.UNAUTHORIZED and not last:
                        await self._log_in_again()
                        continue
                    await self._raise_for(answer)
                    found: Manifest = await answer.json()
                    return found
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                raise KubernetesError(_unreachable(error)) from error
        raise AssertionError("the second answer is returned or raised")

    def _request(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        body: Manifest | None,
        kind: str,
        timeout: aiohttp.ClientTimeout | None = None,
    ) -> aiohttp.client._RequestContextManager:
        assert self._session is not None, "the client is used within its context"
        self.count("WATCH" if "watch" in parameters else method, _plural(path))
        return self._session.request(
            method,
            self._server + path,
            params=parameters,
            data=json.dumps(body) if body is not None else None,
            headers={"Content-Type": kind or "application/json"},
            timeout=timeout or aiohttp.ClientTimeout(total=_REQUEST_SECONDS),
        )

    async def _raise_for(self, answer: aiohttp.ClientResponse) -> None:
        """The error of an answer; none for a good one."""
        if answer.status < HTTPStatus.BAD_REQUEST:
            return
        text = await answer.text()
        try:
            message = json.loads(text)["message"]
        except (ValueError, KeyError, TypeError):
            message = text.strip() or answer.reason or "no reason given"
        match answer.status:
            case 404:
                raise NotFoundError(message, 404)
            case 410:
                raise GoneError(message, 410)
            case 400 | 403 | 409 | 413 | 422 | 429 as status:
                raise RefusedError(message, status)
        raise KubernetesError(f"the API server says {answer.status}: {message}", answer.status)

    async def _log_in_again(self) -> None:
        old = self._session
        self._open()
        if old is not None:
            await old.close()

    def _open(self) -> None:
        """Log in, and open connections with what was found."""
        access = self._login()
        self._server = access.server.rstrip("/")
        headers = {"Accept": "application/json", "User-Agent": "spotune-operator", **access.as_http_headers()}
        connector = aiohttp.TCPConnector(ssl=access.as_ssl_context(), limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=access.trust_env)


def _plural(path: str) -> str:
    """The kind in a path, as the path names it."""
    _, root, *parts = path.split("/")
    rest = parts[1:] if root == "api" else parts[2:]
    return rest[2] if rest[0] == "namespaces" and len(rest) > 2 else rest[0]


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length, which aiohttp's own reader does not give."""
    rest = b""
    async for chunk in answer.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line


def _unreachable(error: BaseException) -> str:
    return f"the API server cannot be reached ({str(error) or type(error).__name__}); trying again"
