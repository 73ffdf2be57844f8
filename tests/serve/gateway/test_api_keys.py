"""API keys in a mounted Secret: the gateway takes a change without a restart."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from starlette.testclient import TestClient

from spotune_serve.gateway.api_keys import ApiKeyFile
from spotune_serve.gateway.routes.app import create_app
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from tests.serve.support.scripted_backend import ScriptedBackend
from tests.serve.support.versions import run_single_version


@dataclass
class MountedSecret:
    """A volume with a Secret, written as the kubelet does: a new folder, and a symbolic link that is replaced at once.

    Attributes:
        folder: where it is mounted.
        now: monotonic seconds.
    """

    folder: Path
    now: float = 100.0
    _updates: int = field(default=0)

    @property
    def path(self) -> Path:
        return self.folder / "keys"

    def update(self, content: bytes) -> None:
        self._updates += 1
        data = self.folder / f"..{self._updates}"
        data.mkdir()
        (data / "keys").write_bytes(content)
        (self.folder / "..data_tmp").symlink_to(data.name)
        (self.folder / "..data_tmp").replace(self.folder / "..data")
        if not self.path.is_symlink():
            self.path.symlink_to("..data/keys")

    def status_of(self, client: TestClient, key: str = "") -> int:
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        return client.get("/v1/models", headers=headers).status_code


@pytest.fixture
def secret(tmp_path: Path) -> MountedSecret:
    mounted = MountedSecret(tmp_path)
    mounted.update(b"first\n")
    return mounted


@pytest.fixture
def client(secret: MountedSecret, chat_model: ServedModel) -> TestClient:
    keys = ApiKeyFile(secret.path, check_seconds=5.0, clock=lambda: secret.now)
    versions = run_single_version(chat_model, ScriptedBackend([]), GatewaySettings())
    return TestClient(create_app(versions, keys=keys))


def test_changed_secret_is_taken_without_a_restart(secret: MountedSecret, client: TestClient) -> None:
    secret.update(b"first\nsecond\n")
    secret.now += 5
    assert [secret.status_of(client, key) for key in ("first", "second", "third", "")] == [200, 200, 401, 401]
    secret.update(b"second\n")
    secret.now += 5
    assert [secret.status_of(client, key) for key in ("first", "second")] == [401, 200]


def test_file_is_read_every_few_seconds_at_most(secret: MountedSecret, client: TestClient) -> None:
    secret.now += 5
    assert secret.status_of(client, "first") == 200
    secret.update(b"second\n")
    secret.now += 4.9
    assert secret.status_of(client, "second") == 401
    secret.now += 0.1
    assert secret.status_of(client, "second") == 200


@pytest.mark.parametrize("content", [b"", b"\n \r\n"])
def test_removing_all_keys_does_not_open_the_endpoint(
    content: bytes, secret: MountedSecret, client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    secret.update(content)
    with caplog.at_level(logging.ERROR, "spotune_serve"):
        for _ in range(3):
            secret.now += 5
            assert [secret.status_of(client, key) for key in ("", "first", " ")] == [401, 401, 401]
    assert [record.getMessage() for record in caplog.records] == [
        f"all requests are refused: the file with API keys {secret.path} is empty"
    ]
    secret.update(b"third\n")
    secret.now += 5
    assert [secret.status_of(client, key) for key in ("", "first", "third")] == [401, 401, 200]


@pytest.mark.parametrize("broken", ["missing", "no text"])
def test_keys_stay_while_their_file_cannot_be_read(
    broken: str, secret: MountedSecret, client: TestClient, caplog: pytest.LogCaptureFixture
) -> None:
    if broken == "missing":
        secret.path.unlink()
    else:
        secret.update(b"\xff\xfe")
    with caplog.at_level(logging.ERROR, "spotune_serve"):
        for _ in range(3):
            secret.now += 5
            assert [secret.status_of(client, key) for key in ("", "first")] == [401, 200]
    assert len(caplog.records) == 1
    assert "the API keys stay as they are" in caplog.records[0].getMessage()
