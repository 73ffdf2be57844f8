"""What the API server says no with becomes a sentence that says what to do."""

import json
import ssl

import pytest

from spotune.errors import InfrastructureError
from spotune_operator.cli.cluster.api_errors import message_of, refusal, unreachable
from spotune_operator.errors import KubernetesError, NotFoundError, RefusedError

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
        (403, status(FORBIDDEN, 403), RefusedError, f"{FORBIDDEN}. Ask whoever looks after the cluster"),
        (401, status("Unauthorized", 401), RefusedError, f"{SERVER} does not know who you are (401)"),
        (404, "404 page not found\n", NotFoundError, "404 page not found"),
        (422, status("spec.training: Forbidden: may only grow", 422), RefusedError, "spec.training: Forbidden"),
        (503, "<html>Bad   gateway</html>", KubernetesError, f"{SERVER} says 503: <html>Bad gateway</html>"),
        (500, "", KubernetesError, f"{SERVER} says 500: no reason is given"),
    ],
)
def test_refusal_is_in_the_servers_words(code: int, body: str, kind: type[KubernetesError], words: str) -> None:
    error = refusal(code, body, SERVER)
    assert type(error) is kind
    assert str(error).startswith(words)
    assert (error.status, error.exit_code) == (code, InfrastructureError.exit_code)


def test_silence_has_the_reason_of_the_operating_system() -> None:
    error = TimeoutError("wrapped")
    error.__cause__ = ConnectionRefusedError(111, "Connection refused")
    assert str(unreachable(SERVER, error)).startswith(
        f"{SERVER} does not answer (Connection refused): is the cluster up"
    )
    assert "does not answer (timed out)" in str(unreachable(SERVER, TimeoutError("timed out")))
    assert "does not answer (TimeoutError)" in str(unreachable(SERVER, TimeoutError()))


def test_wrong_certificate_is_called_that() -> None:
    error = ssl.SSLCertVerificationError(1, "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed")
    assert "does not show the certificate that the kubeconfig expects" in str(unreachable(SERVER, error))


def test_long_pages_of_proxies_are_cut() -> None:
    assert len(message_of("x" * 10_000)) == 500
