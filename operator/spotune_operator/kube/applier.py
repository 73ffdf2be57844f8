"""Applies children by server-side apply, and skips an apply that would change nothing."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Protocol

from spotune_operator.errors import NotFoundError, RefusedError
from spotune_operator.kube.digest import content_digest, digest

logger = logging.getLogger(__name__)

Manifest = dict[str, Any]
ChildKey = tuple[str, str]
"""Kind and name of a child."""


class Server(Protocol):
    """Applies manifests; implemented by ``Kube``."""

    async def apply(self, manifest: Manifest) -> Manifest:
        """Apply a manifest; returns the object afterwards."""


@dataclass(frozen=True, slots=True)
class _Applied:
    """The last apply of a child.

    Attributes:
        manifest_digest: Hash of the manifest.
        object_digest: Hash of the object that the API server returned.
        version: ``resourceVersion`` of that object.
    """

    manifest_digest: str
    object_digest: str
    version: int


class ChildApplier:
    """Applies the children of owners: of FinetuneJobs, or of ModelServices.

    Args:
        server: The API server.
        version_of: The ``resourceVersion`` that the cache of a kind has reached, for an owner.
    """

    def __init__(self, server: Server, version_of: Callable[[Any, str], int]) -> None:
        self._server = server
        self._version_of = version_of
        self._applied: dict[Hashable, dict[ChildKey, _Applied]] = {}

    async def apply(self, owner: Hashable, manifest: Manifest, live_digest: str | None, *, again: bool) -> str:
        """Apply a child, unless both its manifest and the object are unchanged since the last apply.

        Args:
            owner: Key of the owner.
            manifest: The child.
            live_digest: ``content_digest`` of the object in the cache; None if the cache has none.
            again: Apply it in any case: the API server rejected it before.

        Returns:
            Why the API server rejected it; empty if it did not.

        Raises:
            KubernetesError: The API server failed.
        """
        kind, manifest_digest = manifest["kind"], digest(manifest)
        child = kind, manifest["metadata"]["name"]
        if not again and self._is_up_to_date(owner, child, manifest_digest, live_digest):
            return ""
        try:
            applied = await self._server.apply(manifest)
        except (RefusedError, NotFoundError) as error:  # NotFoundError: the kind is not installed
            message = str(error).partition("\n")[0]  # the lines below are a dump of Go structs
            logger.warning("applying %s failed: %s", kind, message)
            return message
        version = int(applied["metadata"]["resourceVersion"])
        self._applied.setdefault(owner, {})[child] = _Applied(manifest_digest, content_digest(applied), version)
        return ""

    def forget(self, owner: Hashable) -> None:
        """Forget a deleted owner."""
        self._applied.pop(owner, None)

    def _is_up_to_date(self, owner: Hashable, child: ChildKey, manifest_digest: str, live_digest: str | None) -> bool:
        """Whether a child still equals the result of the last apply, as far as the cache can tell.

        A cache that has not reached the version of that apply proves nothing yet: a child that is missing or different
        there is only old.
        """
        applied = self._applied.get(owner, {}).get(child)
        if applied is None or applied.manifest_digest != manifest_digest:
            return False
        is_cache_behind = self._version_of(owner, child[0]) < applied.version
        return is_cache_behind or live_digest == applied.object_digest
