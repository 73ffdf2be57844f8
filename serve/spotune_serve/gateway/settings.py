"""Keys, limits and timeouts of the gateway."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class GatewaySettings:
    """Keys, limits and timeouts of the gateway.

    Attributes:
        api_keys: SHA-256 hex digests of the valid keys (`hash_key`); empty: no key is needed.
        max_body_bytes: maximum size of a request body.
        max_waiting_requests: sequences of a version that may wait for their first token; more are refused with status
            429.
        max_sequences_per_request: maximum of prompts times `n` in one request.
        request_timeout_seconds: maximum duration of a request, from its arrival to its last token.
        replica_timeout_seconds: time without a new token after which a request that lost its replica fails. It covers
            the start of a replacement.
        retry_seconds: wait between attempts to continue a request.
        retry_after_seconds: `Retry-After` of the statuses 429 and 503.
    """

    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 2 * 1024 * 1024
    max_waiting_requests: int = 256
    max_sequences_per_request: int = 128
    request_timeout_seconds: float = 600.0
    replica_timeout_seconds: float = 120.0
    retry_seconds: float = 0.1
    retry_after_seconds: int = 2


def hash_key(key: str) -> str:
    """The SHA-256 hex digest of an API key, for `GatewaySettings.api_keys`."""
    return hashlib.sha256(key.encode("utf-8")).hexdigest()
