"""The API server: server-side apply with our field manager, deletion, lists and watches of plain JSON objects.

kopf watches FinetuneJobs; everything else goes through here, over the credentials that kopf finds. The field manager
is the same at all times, so that what we no longer want is taken away by the next apply, and what others own stays.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from types import TracebackType
from typing import Any, Final, Self

import aiohttp
import kopf

from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError

FIELD_MANAGER: Final = "spotune"
_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"
_PAGE: Final = 500
_REQUEST_SECONDS: Final = 30.0
_SILENCE_SECONDS: Final = 150.0
"""Bookmarks come about every minute: a watch that is silent for longer is dead."""

_TWO_HALVES: Final = re.compile(r"\\u(d[89ab][0-9a-f]{2})\\u(d[c-f][0-9a-f]{2})")

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


class ConflictError(KubernetesError):
    """Somebody else was there first: there is one of this name, it is another one, or it has just been changed."""


class Kube:
    """A client; an asynchronous context manager.

    Args:
        login: Finds credentials; asked again when the API server refuses them, for tokens of pods expire.
        request_seconds: Patience with one request.
        silence_seconds: Patience with a watch on which nothing comes.
    """

    def __init__(
        self, login: Login, request_seconds: float = _REQUEST_SECONDS, silence_seconds: float = _SILENCE_SECONDS
    ) -> None:
        self.count: Callable[[str, str], None] = lambda _verb, _plural: None
        """Called with verb and plural of every request."""
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
        except ConflictError:
            return False
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
        except (NotFoundError, ConflictError):
            return

    async def evict(self, namespace: str, name: str) -> bool:
        """Ask for a pod to go, by the rules of its PodDisruptionBudget; False while these forbid it."""
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
        """Pods by selectors, asked now; for what happens so seldom that no cache is kept of it."""
        parameters = {"labelSelector": labels, "fieldSelector": fields}
        found = await self._json("GET", PODS.path(namespace), {n: v for n, v in parameters.items() if v})
        items: list[Manifest] = found["items"]
        return items

    async def serves(self, resource: Resource) -> bool:
        """Whether the API server says that it has a kind of a group; it does so a moment after it has learned of it."""
        group, _, version = resource.group_version.partition("/")
        groups = {found["name"] for found in (await self._json("GET", "/apis", {}))["groups"]}
        if group not in groups:
            return False
        try:
            known = await self._json("GET", f"/apis/{group}/{version}", {})
        except NotFoundError:
            return False
        return resource.plural in {found["name"] for found in known["resources"]}

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
            KubernetesError: It broke off.
        """
        parameters = {"watch": "true", "allowWatchBookmarks": "true", "resourceVersion": version}
        parameters |= {"timeoutSeconds": str(seconds)} | ({"labelSelector": labels} if labels else {})
        patience = aiohttp.ClientTimeout(total=seconds + self._request_seconds, sock_read=self._silence_seconds)
        async with self._answer("GET", resource.path(namespace), parameters, patience=patience) as answer:
            async for line in _lines(answer):
                event = json.loads(line)
                if event["type"] == "ERROR":
                    raise _error_of(int(event["object"].get("code", 0)), str(event["object"].get("message")))
                yield event["type"], event["object"]

    async def _json(
        self, method: str, path: str, parameters: Mapping[str, str], body: Manifest | None = None, kind: str = ""
    ) -> Manifest:
        patience = aiohttp.ClientTimeout(total=self._request_seconds)
        async with self._answer(method, path, parameters, body, kind, patience=patience) as answer:
            found: Manifest = json.loads(await answer.read())
            return found

    @asynccontextmanager
    async def _answer(
        self,
        method: str,
        path: str,
        parameters: Mapping[str, str],
        body: Manifest | None = None,
        kind: str = "",
        *,
        patience: aiohttp.ClientTimeout,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A good answer; credentials that are refused are looked for again, once.

        Raises:
            KubernetesError: There is no good one, or it breaks off, or it is not JSON (a proxy's own page).
        """
        assert self._session is not None, "the client is used within its context"
        text = json.dumps(body) if body is not None else None
        if text is not None and kind == _APPLY:
            text = _as_yaml(text)
        headers = {"Content-Type": kind or "application/json"}
        try:
            for is_last in (False, True):
                self.count("WATCH" if "watch" in parameters else method, _plural(path))
                session = self._session
                async with session.request(
                    method, self._server + path, params=parameters, data=text, headers=headers, timeout=patience
                ) as answer:
                    if answer.status < HTTPStatus.BAD_REQUEST:
                        yield answer
                        return
                    if answer.status != HTTPStatus.UNAUTHORIZED or is_last:
                        raise _error_of(answer.status, _message(await answer.text(errors="replace")))
                await self._log_in_again(session)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubernetesError(_unreachable(error)) from error
        except (ValueError, TypeError, KeyError) as error:
            raise KubernetesError(f"the API server does not answer in JSON as it should ({error})") from error

    async def _log_in_again(self, refused: aiohttp.ClientSession) -> None:
        """Find credentials anew, unless somebody else has since those of a session were refused.

        The session stays open for others who wait for an answer on it, until the next one is refused.
        """
        if self._session is refused:
            former, self._refused = self._refused, refused
            self._open()
            if former is not None:
                await former.close()

    def _open(self) -> None:
        """Log in, and open connections with what was found."""
        access = self._login()
        self._server = access.server.rstrip("/")
        headers = {"Accept": "application/json", "User-Agent": "spotune-operator", **access.as_http_headers()}
        connector = aiohttp.TCPConnector(ssl=access.as_ssl_context(), limit=0)
        self._session = aiohttp.ClientSession(connector=connector, headers=headers, trust_env=access.trust_env)


def _plural(path: str) -> str:
    """The kind in a path, as the path names it; of a path without one, its beginning."""
    _, root, *parts = path.split("/")
    rest = parts[1:] if root == "api" else parts[2:]
    if not rest:
        return root
    return rest[2] if rest[0] == "namespaces" and len(rest) > 2 else rest[0]


def _as_yaml(text: str) -> str:
    """JSON that is YAML, too: JSON escapes a character beyond 16 bits as two halves, which YAML does not take."""

    def in_one(halves: re.Match[str]) -> str:
        high, low = int(halves[1], 16) - 0xD800, int(halves[2], 16) - 0xDC00
        return f"\\U{0x10000 + (high << 10) + low:08x}"

    return _TWO_HALVES.sub(in_one, text)


def _error_of(status: int, message: str) -> KubernetesError:
    """The error of an answer.

    Only what the API server will say again to the same request is a refusal. That it has too much to do (429; also of
    a quota that many want at once) or that a webhook does not answer (500) passes.
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
    return KubernetesError(f"the API server says {status}: {message}", status)


def _message(text: str) -> str:
    """What an answer says in words: the message of a ``v1.Status``, or a proxy's text."""
    try:
        return str(json.loads(text)["message"])
    except (ValueError, KeyError, TypeError):
        return text.strip() or "no reason given"


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Lines of any length, which aiohttp's own reader does not give."""
    rest = b""
    async for chunk in answer.content.iter_any():
        *whole, rest = (rest + chunk).split(b"\n")
        for line in whole:
            yield line


def _unreachable(error: BaseException) -> str:
    return f"the API server cannot be reached ({str(error) or type(error).__name__}); trying again"
