"""The versions behind a gateway. A request is assigned to one of them by weight, and stays with it."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from spotune_serve.gateway.answers import Answerer
from spotune_serve.gateway.backend import VersionGoneError
from spotune_serve.gateway.metrics.gateway_metrics import GatewayMetrics
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from spotune_serve.gateway.version import Version, VersionSource
from spotune_serve.protocol.errors import ApiError

logger = logging.getLogger(__name__)

VERSION_HEADER = "x-spotune-version"
"""In a response: the version that answered. In a request: the version that shall answer."""
_RETIREMENT_POLL_SECONDS = 1.0
_HASH_BYTES = 8


@dataclass(frozen=True)
class _Listed:
    version: Version
    weight: float


@dataclass(frozen=True)
class _Snapshot:
    """What the gateway serves. It is replaced as a whole, so a request sees one consistent list.

    Attributes:
        listed: versions that get new requests; those with the largest weight first.
        unreadable: weight and error of versions that could not be read, by name.
    """

    listed: tuple[_Listed, ...] = ()
    unreadable: Mapping[str, tuple[float, str]] = field(default_factory=dict)


class Versions:
    """The versions of a model.

    Args:
        name: the model's id in the API.
        settings: limits and timeouts of requests.
        poll_seconds: how often a version that has left the list is asked whether it still has replicas.
        counts_folder: folder that the gateway processes of one port share; None: there is one process.

    Attributes:
        name: the model's id in the API.
        settings: limits and timeouts of requests.
        metrics: of all versions.
        process: random id of this gateway, or of all processes of its port; its counters began at zero.
        error: why the last list of versions was refused as a whole; empty if it was not.
    """

    def __init__(
        self,
        name: str,
        settings: GatewaySettings,
        *,
        poll_seconds: float = _RETIREMENT_POLL_SECONDS,
        counts_folder: Path | None = None,
    ) -> None:
        self.name = name
        self.settings = settings
        self.metrics = GatewayMetrics(name, folder=counts_folder)
        self.process = self.metrics.process
        self.error = ""
        self._poll_seconds = poll_seconds
        self._snapshot = _Snapshot()
        self._leaving: dict[Version, asyncio.Task[None]] = {}

    async def replace(self, sources: Sequence[VersionSource]) -> None:
        """Serve these versions, and no others, from now on. Running requests stay with their versions.

        A version that cannot be read is left out, and `unreadable` has its error. If none is left that gets requests,
        the versions so far stay.
        """
        loaded: list[_Listed] = []
        unreadable: dict[str, tuple[float, str]] = {}
        for source in sources:
            try:
                loaded.append(_Listed(await self._version(source), source.weight))
            except Exception as error:  # of any library that reads models; the gateway must go on  # noqa: BLE001
                logger.error("version %s cannot be served: %s", source.name, error)
                unreadable[source.name] = (source.weight, str(error) or type(error).__name__)
        if not any(each.weight > 0 for each in loaded):
            names = {each.version.name for each in loaded}
            loaded += [each for each in self._snapshot.listed if each.version.name not in names]
        loaded.sort(key=lambda each: -each.weight)
        previous, self._snapshot = self._snapshot, _Snapshot(tuple(loaded), unreadable)
        self.error = ""
        remaining = {each.version for each in loaded}
        for version in remaining & self._leaving.keys():
            self._leaving.pop(version).cancel()
        for each in previous.listed:
            if each.version not in remaining:
                self._leaving[each.version] = asyncio.create_task(self._retire(each.version))

    @property
    def listed(self) -> tuple[tuple[Version, float], ...]:
        """Versions that get new requests, and their weights; the one with the largest weight first."""
        return tuple((each.version, each.weight) for each in self._snapshot.listed)

    @property
    def leaving(self) -> tuple[Version, ...]:
        """Versions that get no new requests, and still have running ones."""
        return tuple(self._leaving)

    @property
    def unreadable(self) -> Mapping[str, tuple[float, str]]:
        """Weight and error of versions that could not be read, by name."""
        return self._snapshot.unreadable

    @property
    def main_model(self) -> ServedModel:
        """The model of the version with the largest weight.

        Raises:
            ApiError: no version is served.
        """
        if not self._snapshot.listed:
            raise ApiError(503, "This service has no model yet.", code="no_replica", headers=self._retry_later)
        return self._snapshot.listed[0].version.model

    def choose(
        self, request_id: str, model: str, requested: str | None = None, gone: Sequence[Version] = ()
    ) -> Version:
        """The version for a new request: at random with the weights, but always the same for the same id and weights.

        Args:
            request_id: decides between the versions.
            model: id of the model or adapter that is asked for; only versions that have it are possible.
            requested: the version that the request names, if it does.
            gone: versions that turned out to be gone.

        Raises:
            ApiError: there is no such version or model.
            VersionGoneError: no version is left.
        """
        listed = self._snapshot.listed
        main_model = self.main_model
        if requested is not None:
            version = self._named(requested)
            version.model.adapter(model)
            if version in gone:
                raise version.gone()
            return version
        possible = [each for each in listed if model == self.name or model in each.version.model.adapters]
        if not possible:
            main_model.adapter(model)
        possible = [each for each in possible if each.weight > 0 and each.version not in gone]
        if not possible:
            raise gone[-1].gone() if gone else VersionGoneError(f"no version with the model {model!r} gets requests")
        digest = hashlib.blake2b(request_id.encode(), digest_size=_HASH_BYTES).digest()
        point = int.from_bytes(digest) / 2 ** (8 * _HASH_BYTES) * sum(each.weight for each in possible)
        for each in possible:
            point -= each.weight
            if point < 0:
                return each.version
        return possible[-1].version  # the sum was rounded

    async def is_ready(self) -> bool:
        """Whether a version that gets requests has a replica, or would start one."""
        backends = [each.version.backend for each in self._snapshot.listed if each.weight > 0]
        return any(await asyncio.gather(*(backend.is_ready() for backend in backends)))

    async def _version(self, source: VersionSource) -> Version:
        """The version as it is served already, or read anew."""
        served = [*(each.version for each in self._snapshot.listed), *self._leaving]
        for version in served:
            if (version.name, version.identity) == (source.name, source.identity):
                return version
        model = await asyncio.to_thread(source.load)
        metrics = self.metrics.of(source.name)
        answerer = Answerer(model, source.backend, self.settings, metrics)
        return Version(source.name, source.identity, model, source.backend, answerer, metrics)

    def _named(self, name: str) -> Version:
        for each in self._snapshot.listed:
            if each.version.name == name:
                return each.version
        names = ", ".join(each.version.name for each in self._snapshot.listed)
        message = f"The version {name!r} does not exist. This service has {names}."
        raise ApiError(404, message, param=VERSION_HEADER, code="version_not_found")

    async def _retire(self, version: Version) -> None:
        """Wait for the last request of a version that left. Without replicas, those without a token move."""
        await asyncio.sleep(self._poll_seconds)  # a request may have been assigned just now
        while version.counts.running:
            if not await version.backend.is_ready():
                version.waiters.abandon()
            await asyncio.sleep(self._poll_seconds)
        del self._leaving[version]
        in_use = {*(each.version.name for each in self._snapshot.listed), *(each.name for each in self._leaving)}
        if version.name not in in_use:
            self.metrics.drop(version.name)

    @property
    def _retry_later(self) -> dict[str, str]:
        return {"Retry-After": str(self.settings.retry_after_seconds)}
