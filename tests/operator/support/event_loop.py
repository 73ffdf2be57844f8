"""An event loop of a test whose connections end with it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine as ``asyncio.run`` does, and abort the connections that it leaves open.

    A TLS connection of a request that was cancelled waits for the server's close in the background. A busy server sends
    that after the loop has ended; the socket then warns of itself wherever Python collects it, also in another test.
    """

    async def then_abort() -> T:
        try:
            return await main
        finally:
            loop = asyncio.get_running_loop()  # it has no public list of its transports
            for transport in list(loop._transports.values()):  # type: ignore[attr-defined]
                transport.abort()
            await asyncio.sleep(0)  # sockets are closed in the next round

    return asyncio.run(then_abort())
