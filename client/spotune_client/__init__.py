"""A Python client for FinetuneJobs, FinetuneSweeps and ModelServices on a Kubernetes cluster.

::

    from spotune_client import Client

    with Client(namespace="team") as client:
        client.jobs.apply("finetunejob.yaml")
        job = client.jobs.wait("t5-sql", progress=lambda job: print(job.phase, job.status.step))
        print(job.status.output)

``AsyncClient`` has the same methods as coroutines. Errors are those of ``spotune.errors``. The first use of a class
imports the Kubernetes library of the extra ``client``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spotune_client.async_client import AsyncClient
    from spotune_client.client import Client
    from spotune_client.objects import Stored, StoredJob, StoredService, StoredSweep

__all__ = ["AsyncClient", "Client", "Stored", "StoredJob", "StoredService", "StoredSweep"]

_MODULES = {"AsyncClient": "async_client", "Client": "client"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES.get(name, 'objects')}"), name)
