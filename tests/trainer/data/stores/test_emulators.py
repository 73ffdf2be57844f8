"""The stores of Google and Azure, by emulators of them: fake-gcs-server and Azurite."""

from __future__ import annotations

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from spotune.errors import InfrastructureError, JobError
from spotune_trainer.data.stores import find
from spotune_trainer.data.stores.azure import AzureStore
from spotune_trainer.data.stores.find import find_stored_files, local_copy

# google-api-core warns of a package for gRPC, which the client of the store does not use.
pytestmark = pytest.mark.filterwarnings("ignore:Please install grpcio-status:ImportWarning")

Put = Callable[[str, bytes], object]

_GOOGLE, _AZURE = "fake-gcs-server", "azurite-blob"
_KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="  # Azurite's own


@contextmanager
def emulator(*command: str, port_option: str) -> Iterator[int]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = int(free.getsockname()[1])
    with subprocess.Popen([*command, port_option, str(port)], stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while True:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
        yield port
        process.kill()


@pytest.fixture
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    from google.cloud.storage import Client  # type: ignore[import-untyped]

    with emulator(_GOOGLE, "-scheme", "http", "-backend", "memory", "-log-level", "error", port_option="-port") as port:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        monkeypatch.setenv("GOOGLE_CLOUD_PROJECT", "project")
        find._store.cache_clear()
        bucket = Client().create_bucket("bucket")
        yield lambda key, content: bucket.blob(key).upload_from_string(content)
        find._store.cache_clear()


@pytest.fixture
def azure(monkeypatch: pytest.MonkeyPatch) -> Iterator[Put]:
    from azure.storage.blob import BlobServiceClient

    options = ("--inMemoryPersistence", "--skipApiVersionCheck", "--silent")
    with emulator(_AZURE, *options, port_option="--blobPort") as port:
        url = f"http://127.0.0.1:{port}/devstoreaccount1"
        client = BlobServiceClient(url, credential={"account_name": "devstoreaccount1", "account_key": _KEY})
        monkeypatch.setattr(find, "_store", lambda _: AzureStore(client))
        container = client.create_container("bucket")
        yield lambda key, content: container.upload_blob(key, content, overwrite=True)
        client.close()


@pytest.mark.parametrize(
    ("scheme", "fixture"),
    [
        pytest.param("gs", "google", marks=pytest.mark.skipif(not shutil.which(_GOOGLE), reason=f"needs {_GOOGLE}")),
        pytest.param("az", "azure", marks=pytest.mark.skipif(not shutil.which(_AZURE), reason=f"needs {_AZURE}")),
    ],
)
def test_files_are_listed_read_in_their_version_and_missing_ones_named(
    scheme: str, fixture: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    put: Put = request.getfixturevalue(fixture)
    root = f"{scheme}://bucket/rows"
    for key in ("rows/a.jsonl", "rows/b.jsonl", "rows/sub/c.jsonl", "rows-of-others/d.jsonl"):
        put(key, b"old")
    everything = [f"{root}/a.jsonl", f"{root}/b.jsonl", f"{root}/sub/c.jsonl"]
    assert [file.url for file in find_stored_files(root)] == everything
    assert [file.url for file in find_stored_files(f"{root}/*.jsonl")] == everything[:2]
    (file,) = find_stored_files(f"{root}/a.jsonl")
    with local_copy(file, tmp_path) as path:
        assert path.read_bytes() == b"old"
    put("rows/a.jsonl", b"new")
    with pytest.raises(InfrastructureError, match="was replaced while"), local_copy(file, tmp_path):
        pass
    with pytest.raises(JobError, match=f"no file or folder at {scheme}://bucket/none"):
        find_stored_files(f"{scheme}://bucket/none")
    with pytest.raises(JobError, match=f"{scheme}://absent/rows is missing, or access is denied"):
        find_stored_files(f"{scheme}://absent/rows")
