"""Errors of the API server become messages that say what to do."""

import json
import ssl

import pytest

from spotune.errors import InfrastructureError, KubernetesError, NotFoundError, RefusedError
from spotune_client.cluster.api_errors import (
    OverloadedError,
    error_from_response,
    is_final,
    retried_if_overloaded,
    status_message,
    unreachable_error,
)

SERVER = "https://10.0.0.1:6443"
FORBIDDEN = (
    'finetunejobs.spotune.dev is forbidden: User "ana" cannot list resource "finetunejobs" in API group "spotune.dev" '
    'in the namespace "team"'
)


def status(message: str, code: int) -> str:
    return json.dumps({"kind": "Status", "apiVersion": "v1", "status": "Failure", "message": message, "code": code})


@pytest.mark.parametrize(
    ("code", "body", "kind", "words"),
    [
        (403, status(FORBIDDEN, 403), RefusedError, f"{FORBIDDEN}. Ask a cluster administrator"),
        (401, status("Unauthorized", 401), RefusedError, f"{SERVER} rejected your credentials (401)"),
        (404, "404 page not found\n", NotFoundError, "404 page not found"),
        (422, status("spec.training: Forbidden: may only grow", 422), RefusedError, "spec.training: Forbidden"),
        (
            503,
            "<html>Bad   gateway</html>",
            KubernetesError,
            f"{SERVER} responded with status 503: <html>Bad gateway</html>",
        ),
        (
            429,
            status("too many requests", 429),
            OverloadedError,
            f"{SERVER} is overloaded (429): too many requests. Try",
        ),
        (500, "", KubernetesError, f"{SERVER} responded with status 500: no reason is given"),
    ],
)
def test_error_contains_the_servers_message(code: int, body: str, kind: type[KubernetesError], words: str) -> None:
    error = error_from_response(code, body, SERVER)
    assert type(error) is kind
    assert str(error).startswith(words)
    assert (error.status, error.exit_code) == (code, InfrastructureError.exit_code)


def test_connection_error_contains_the_operating_systems_reason() -> None:
    error = TimeoutError("wrapped")
    error.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert str(unreachable_error(SERVER, error)).startswith(
        f"{SERVER} does not answer (Connection refused). Check that the cluster is up"
    )
    assert "does not answer (timed out)" in str(unreachable_error(SERVER, TimeoutError("timed out")))
    assert "does not answer (TimeoutError)" in str(unreachable_error(SERVER, TimeoutError()))


def test_certificate_errors_are_explained() -> None:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    found = unreachable_error(SERVER, error)
    assert "has another certificate than the kubeconfig expects" in str(found)
    assert is_final(found)
    assert not is_final(unreachable_error(SERVER, TimeoutError()))


def test_other_errors_of_tls_name_its_likely_causes() -> None:
    error = TimeoutError("wrapped")
    error.__cause__ = ssl.SSLError(1, "[SSL: WRONG_VERSION_NUMBER] wrong version number")
    found = str(unreachable_error(SERVER, error))
    assert found.startswith(f"no TLS connection to {SERVER} ([SSL: WRONG_VERSION_NUMBER] wrong version number). Check")


def test_long_proxy_pages_are_truncated() -> None:
    assert len(status_message("x" * 10_000)) == 500


@pytest.mark.parametrize(
    ("header", "seconds"),
    [("0", 0), ("3", 3), ("3600", 10), ("", 1), ("Wed, 21 Oct 2015 07:28:00 GMT", 1), ("-1", 1), ("9" * 5000, 10)],
)
def test_an_overloaded_server_says_when_to_retry_within_a_bound(header: str, seconds: float) -> None:
    pauses: list[float] = []
    answers = iter([error_from_response(429, "", SERVER, header), "done"])

    def request() -> str:
        answer = next(answers)
        if isinstance(answer, KubernetesError):
            raise answer
        return str(answer)

    assert retried_if_overloaded(request, pauses.append) == "done"
    assert pauses == [seconds]


def test_a_server_that_stays_overloaded_is_an_error_that_is_not_final() -> None:
    pauses: list[float] = []

    def request() -> None:
        raise error_from_response(429, "", SERVER, "2")

    with pytest.raises(OverloadedError):
        retried_if_overloaded(request, pauses.append)
    assert pauses == [2.0] * 10
    assert not issubclass(OverloadedError, RefusedError)
