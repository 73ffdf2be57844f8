"""Cached objects of our own kinds, and their newest versions: a write returns one before the watch reports it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Generic, Self, TypeVar

from spotune.custom_resource import API_VERSION


@dataclass(frozen=True)
class CachedResource:
    """An object of a kind of ours in the cache. Subclasses set the kind.

    Attributes:
        namespace: Its namespace.
        name: Its name.
        uid: Its uid.
        version: Its ``resourceVersion``.
        generation: Its ``metadata.generation``.
        deleting: Whether it is being deleted.
        spec: Its spec.
        status: Its status; empty before the first reconcile.
    """

    kind: ClassVar[str]

    namespace: str
    name: str
    uid: str
    version: int
    generation: int
    deleting: bool
    spec: Any
    status: Mapping[str, Any]

    @classmethod
    def of(cls, raw: Mapping[str, Any]) -> Self:
        """The cached form of an object of the API server."""
        metadata = raw["metadata"]
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            version=int(metadata["resourceVersion"]),
            generation=metadata["generation"],
            deleting="deletionTimestamp" in metadata,
            spec=raw.get("spec"),
            status=raw.get("status") or {},
        )

    @property
    def key(self) -> tuple[str, str]:
        """Namespace and name."""
        return self.namespace, self.name

    @property
    def body(self) -> dict[str, Any]:
        """The object without its status."""
        metadata = {"name": self.name, "namespace": self.namespace}
        return {"apiVersion": API_VERSION, "kind": self.kind, "metadata": metadata, "spec": self.spec}


R = TypeVar("R", bound=CachedResource)


class WrittenVersions(Generic[R]):
    """Objects as returned by writes, until the watch reports these versions."""

    def __init__(self) -> None:
        self._written: dict[tuple[str, str], R] = {}

    def put(self, written: R) -> None:
        """Store an object as returned by a write."""
        self._written[written.key] = written

    def newest(self, key: tuple[str, str], watched: R | None) -> R | None:
        """The newest version of an object.

        Args:
            key: Its namespace and name.
            watched: As the watch has reported it; None if there is none.
        """
        written = self._written.get(key)
        if watched and written and written.uid == watched.uid and written.version > watched.version:
            return written
        self._written.pop(key, None)
        return watched
