"""Addresses of pods, and JSON objects in their responses: they may be broken or of other programs at that address."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Final

import aiohttp

_MAX_RESPONSE_BYTES: Final = 1 << 20


def base_url(ip: str, port: int) -> str:
    """The URL of a pod, without a path."""
    return f"http://{f'[{ip}]' if ':' in ip else ip}:{port}"


async def json_object(response: aiohttp.ClientResponse) -> dict[str, Any]:
    """The JSON object of a response.

    Raises:
        ValueError: The status is not 2xx, or the body is not a JSON object or is larger than 1 MiB.
    """
    if not HTTPStatus.OK <= response.status < HTTPStatus.MULTIPLE_CHOICES:
        raise ValueError(f"HTTP {response.status} {response.reason}")
    text = bytearray()
    async for part in response.content.iter_any():
        text += part
        if len(text) > _MAX_RESPONSE_BYTES:
            raise ValueError("its response is larger than 1 MiB")
    try:
        found = json.loads(text)
    except RecursionError as error:
        raise ValueError("its response is nested too deeply") from error
    if not isinstance(found, dict):
        raise ValueError("its response is not a JSON object")
    return found
