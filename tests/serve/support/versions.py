"""A gateway whose versions play scripts."""

from __future__ import annotations

import asyncio

from spotune_serve.gateway.backend import Backend
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from spotune_serve.gateway.version import VersionSource
from spotune_serve.gateway.versions import Versions

ONLY_VERSION = "tiny-1"


def source(
    name: str, weight: float, model: ServedModel, backend: Backend, *, identity: object = "", error: str = ""
) -> VersionSource:
    """A version that plays the script of its backend, or that cannot be read."""

    def load() -> ServedModel:
        if error:
            raise ValueError(error)
        return model

    return VersionSource(name, weight, identity, load, backend)


async def single_version(model: ServedModel, backend: Backend, settings: GatewaySettings) -> Versions:
    """The versions of a gateway that has one."""
    versions = Versions(model.name, settings)
    await versions.replace([source(ONLY_VERSION, 1, model, backend)])
    return versions


def run_single_version(model: ServedModel, backend: Backend, settings: GatewaySettings) -> Versions:
    """`single_version` for tests without an event loop."""
    return asyncio.run(single_version(model, backend, settings))
