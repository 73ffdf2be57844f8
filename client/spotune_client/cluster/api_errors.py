"""Errors of the API server as messages for users: what failed, the likely cause, and what to do."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator

from spotune.errors import KubernetesError, NotFoundError, RefusedError


def error_from_response(status: int, body: str, server: str) -> KubernetesError:
    """The error for an HTTP response that is not a success.

    Args:
        status: HTTP status code.
        body: A ``v1.Status`` as JSON, or any text, for example from a proxy.
        server: URL of the API server.
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
        case 400 | 409 | 413 | 422 | 429:
            return RefusedError(message, status)
    return KubernetesError(f"{server} responded with status {status}: {message}", status)


def unreachable_error(server: str, error: BaseException) -> KubernetesError:
    """The error for a connection to the API server that failed."""
    reasons = list(_causes(error))
    if any(isinstance(reason, ssl.SSLCertVerificationError) for reason in reasons) or "CERTIFICATE" in str(error):
        return KubernetesError(
            f"{server} has another certificate than the kubeconfig expects: the cluster was recreated, or there is a "
            "proxy in between. Fetch the cluster's credentials again"
        )
    os_error = next((reason.strerror for reason in reasons if isinstance(reason, OSError) and reason.strerror), "")
    message = os_error or str(reasons[-1]).strip() or type(reasons[-1]).__name__
    return KubernetesError(
        f"{server} does not answer ({message}). Check that the cluster is up, that --context is right, and whether you "
        "need a VPN or a proxy"
    )


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
