"""Server-sent events as OpenAI's clients read them, and what happens when the client leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeVar

from pydantic import BaseModel
from pydantic_core import to_json
from starlette.requests import ClientDisconnect
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from spotune_serve.protocol.errors import ApiError

DONE = b"data: [DONE]\n\n"
"""The last event of a complete stream."""

_PLACEHOLDER = "<text>"
_Result = TypeVar("_Result")
_Item = TypeVar("_Item")


def event(data: bytes) -> bytes:
    """An event with one line of JSON as its data."""
    return b"data: %b\n\n" % data


def json_of(body: BaseModel) -> bytes:
    """A body as JSON, without fields that were not set."""
    return body.model_dump_json(exclude_unset=True).encode()


class TextBodies:
    """The JSON of bodies that differ in their text only. All else is serialized once for each choice.

    Args:
        body: the body for the index of a choice and a text. No field after the text has the value of the text.
    """

    def __init__(self, body: Callable[[int, str], BaseModel]) -> None:
        self._body = body
        self._around: dict[int, tuple[bytes, bytes]] = {}

    def json(self, choice: int, text: str) -> bytes:
        """The body with this text, as `json_of` writes it."""
        if choice not in self._around:
            before, _, after = json_of(self._body(choice, _PLACEHOLDER)).rpartition(to_json(_PLACEHOLDER))
            self._around[choice] = before, after
        before, after = self._around[choice]
        return before + to_json(text) + after


class EventStream(StreamingResponse):
    """Server-sent events. When the client leaves, the events are closed, which aborts what generates them.

    Args:
        bodies: the events' bodies as JSON.
        error_of: how an exception is reported; it becomes the last event, without `[DONE]`.
    """

    media_type = "text/event-stream"

    def __init__(self, bodies: AsyncGenerator[bytes, None], error_of: Callable[[Exception], ApiError]) -> None:
        # X-Accel-Buffering: nginx would collect the events otherwise.
        headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}
        super().__init__(_encode(bodies, error_of), headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events until the last one, or until the client leaves."""
        try:
            await until_disconnected(receive, self.stream_response(send))
        except (ClientDisconnect, OSError):
            return  # nobody is left to send an answer to


async def until_disconnected(receive: Receive, work: Awaitable[_Result]) -> _Result:
    """The result of some work, which is cancelled when the client leaves. The request's body has been read before.

    Raises:
        ClientDisconnect: the client has left.
    """
    task = asyncio.ensure_future(work)
    watcher = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientDisconnect
    finally:
        task.cancel()
        watcher.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)


async def started(receive: Receive, items: AsyncGenerator[_Item, None]) -> AsyncGenerator[_Item, None]:
    """The same items, after the first one has arrived: an error before it can still become an HTTP status.

    Raises:
        ClientDisconnect: the client has left.
    """
    first = await until_disconnected(receive, anext(items))
    return _continued(first, items)


async def _continued(first: _Item, items: AsyncGenerator[_Item, None]) -> AsyncGenerator[_Item, None]:
    async with aclosing(items):
        yield first
        async for item in items:
            yield item


async def _encode(
    bodies: AsyncGenerator[bytes, None], error_of: Callable[[Exception], ApiError]
) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(bodies):
            async for body in bodies:
                yield event(body)
        yield DONE
    except Exception as error:  # noqa: BLE001 - the status is sent already; error_of logs what is unexpected
        yield event(json.dumps(error_of(error).body()).encode())


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
