"""The whole operator in this process, as `spotune operator` starts it in its pod, and its metrics."""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp
import kopf

from spotune_operator.main import build_registry
from spotune_operator.settings import Settings
from spotune_testcluster.cluster import free_port

_SAMPLE = re.compile(r"^(?P<name>spotune_\w+)(\{(?P<labels>[^}]*)\})? (?P<value>\S+)$", re.MULTILINE)


@dataclass(frozen=True)
class WholeOperator:
    """A running operator with the credentials of KUBECONFIG."""

    port: int

    async def _samples(self, name: str) -> Counter[str]:
        """Values of a metric by its labels, in the text format."""
        url = f"http://127.0.0.1:{self.port}/metrics"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            text = await answer.text()
        found = [match for match in _SAMPLE.finditer(text) if match["name"] == name]
        return Counter({match["labels"] or "": int(float(match["value"])) for match in found})

    async def calls(self) -> Counter[str]:
        """Number of requests to the API server so far, without watches, by kind and verb."""
        counted = await self._samples("spotune_operator_api_calls_total")
        return Counter({labels: number for labels, number in counted.items() if 'verb="WATCH"' not in labels})

    async def passes(self) -> Counter[str]:
        """Number of passes so far, by result."""
        return await self._samples("spotune_operator_reconciles_total")


@asynccontextmanager
async def whole_operator(namespace: str, **settings: Any) -> AsyncIterator[WholeOperator]:
    """Run an operator for one namespace until the block ends."""
    port = free_port()
    chosen = Settings(
        host="127.0.0.1", port=port, image="registry.example/trainer:1", watch_namespaces=namespace, **settings
    )
    stop = asyncio.Event()
    running = asyncio.create_task(
        kopf.operator(registry=build_registry(chosen), standalone=True, namespaces=[namespace], stop_flag=stop)
    )
    try:
        yield WholeOperator(port)
    finally:
        stop.set()
        await running
