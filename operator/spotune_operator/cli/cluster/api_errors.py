"""What the API server says no with, and its silence, as one sentence each: what, why it is likely, what to do."""

from __future__ import annotations

import json
import ssl
from collections.abc import Iterator

from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError


def refusal(status: int, body: str, server: str) -> KubernetesError:
    """The error for an answer of HTTP that is no success.

    Args:
        status: Of HTTP.
        body: A ``v1.Status`` in JSON, or whatever stands between us and the API server says.
        server: URL of the API server.
    """
    said = message_of(body)
    match status:
        case 401:
            return RefusedError(
                f"{server} does not know who you are (401): your login has expired, or is for another cluster. Log in "
                "again, or give another --context",
                status,
            )
        case 403:
            return RefusedError(
                f"{said}. Ask whoever looks after the cluster for this right; `spotune doctor` lists all that it takes",
                status,
            )
        case 404:
            return NotFoundError(said, status)
        case 400 | 409 | 413 | 422 | 429:
            return RefusedError(said, status)
    return KubernetesError(f"{server} says {status}: {said}", status)


def unreachable(server: str, error: BaseException) -> KubernetesError:
    """The error for an API server that does not answer."""
    reasons = list(_causes(error))
    if any(isinstance(reason, ssl.SSLCertVerificationError) for reason in reasons) or "CERTIFICATE" in str(error):
        return KubernetesError(
            f"{server} does not show the certificate that the kubeconfig expects: the cluster was made anew, or a "
            "proxy is in between. Get its credentials again"
        )
    words = next((reason.strerror for reason in reasons if isinstance(reason, OSError) and reason.strerror), "")
    said = words or str(reasons[-1]).strip() or type(reasons[-1]).__name__
    return KubernetesError(
        f"{server} does not answer ({said}): is the cluster up, is this the right --context, and does it take a VPN or "
        "a proxy to get there?"
    )


def message_of(body: str) -> str:
    """What a ``v1.Status`` says; the text itself where it is none."""
    try:
        message = json.loads(body)["message"]
    except (ValueError, KeyError, TypeError):
        message = " ".join(body.split())[:500]
    return str(message).rstrip(".") or "no reason is given"


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on to the first one."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        cause = cause.__cause__ or cause.__context__
