"""Errors of the API server as messages for users: what failed, the likely cause, and what to do."""

from __future__ import annotations

import json
import ssl
import time
from collections.abc import Callable, Iterator
from http import HTTPStatus
from typing import Final, TypeVar

from spotune.errors import KubernetesError, NotFoundError, RefusedError

T = TypeVar("T")

_RETRIES: Final = 10
_MAX_RETRY_SECONDS: Final = 10.0
_DEFAULT_RETRY_SECONDS: Final = 1.0


class OverloadedError(KubernetesError):
    """The API server rejected a request before processing it (429), for example because of its priority and fairness.

    Args:
        message: Message for the user.
        retry_after: Value of the header ``Retry-After``; empty without it.
    """

    def __init__(self, message: str, retry_after: str) -> None:
        super().__init__(message, 429)
        seconds = float(retry_after) if retry_after.isascii() and retry_after.isdigit() else _DEFAULT_RETRY_SECONDS
        self.seconds = min(seconds, _MAX_RETRY_SECONDS)
        """Seconds to wait before the next attempt."""


class SilentError(KubernetesError):
    """A connection has sent nothing for so long that it may be lost without having been closed."""


def retried_if_overloaded(request: Callable[[], T], pause: Callable[[float], None] = time.sleep) -> T:
    """Send a request, and send it again while the API server is overloaded: 10 times at most, as client-go does.

    Args:
        request: Sends it and returns the response.
        pause: Sleeps for the given seconds.

    Raises:
        OverloadedError: The API server is still overloaded.
    """
    for _ in range(_RETRIES):
        try:
            return request()
        except OverloadedError as error:
            pause(error.seconds)
    return request()


def error_from_response(status: int, body: str, server: str, retry_after: str = "") -> KubernetesError:
    """The error for an HTTP response that is not a success.

    Args:
        status: HTTP status code.
        body: A ``v1.Status`` as JSON, or any text, for example from a proxy.
        server: URL of the API server.
        retry_after: Value of the header ``Retry-After``; empty without it.
    """
    message = status_message(body)
    match status:
        case 401:
            return RefusedError(
                f"{server} rejected your credentials (401): they have expired, or belong to another cluster. Log in "
                "again, or use another --context",
                status,
            )
        case 403:
            return RefusedError(
                f"{message}. Ask a cluster administrator for this permission; `spotune doctor` lists the ones needed",
                status,
            )
        case 404:
            return NotFoundError(message, status)
        case 400 | 409 | 413 | 422:
            return RefusedError(message, status)
        case 429:
            return OverloadedError(f"{server} is overloaded (429): {message}. Try again later", retry_after)
    return KubernetesError(f"{server} responded with status {status}: {message}", status)


def unreachable_error(server: str, error: BaseException) -> KubernetesError:
    """The error for a connection to the API server that failed; a wrong certificate is final: a ``RefusedError``."""
    reasons = list(_causes(error))
    if any(isinstance(reason, ssl.SSLCertVerificationError) for reason in reasons) or "VERIFY_FAILED" in str(error):
        return RefusedError(
            f"{server} has another certificate than the kubeconfig expects: the cluster was recreated, or there is a "
            "proxy in between. Fetch the cluster's credentials again"
        )
    if any(isinstance(reason, ssl.SSLError) for reason in reasons):
        return KubernetesError(
            f"no TLS connection to {server} ({reasons[-1]}). Check that it listens with HTTPS, and that the kubeconfig "
            "has a valid client certificate and key if the cluster needs them"
        )
    os_error = next((reason.strerror for reason in reasons if isinstance(reason, OSError) and reason.strerror), "")
    message = os_error or str(reasons[-1]).strip() or type(reasons[-1]).__name__
    return KubernetesError(
        f"{server} does not answer ({message}). Check that the cluster is up, that --context is right, and whether you "
        "need a VPN or a proxy"
    )


def is_final(error: KubernetesError) -> bool:
    """Whether the same request would fail again: access denied, a wrong certificate, or nothing there."""
    return isinstance(error, RefusedError) or error.status == HTTPStatus.NOT_FOUND


def status_message(body: str) -> str:
    """The message of a ``v1.Status`` in JSON, or the text itself (500 characters at most) if it is not one."""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError, RecursionError):
        message = " ".join(body.split())[:500]
    return str(message).rstrip(".") or "no reason is given"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error and its chain of causes, down to the first one."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
