"""A new version replaces the old one on a real Ray Serve, while a client reads streams without a pause."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from spotune_serve.gateway.versions import VERSION_HEADER
from tests.serve.support.exported import export_tiny_model
from tests.serve.support.gateway_client import read_events
from tests.serve.support.ray_serve import RayServe

pytestmark = pytest.mark.ray

COMPLETIONS = "/v1/completions"
BODY = {"model": "tiny", "prompt": "how many", "max_tokens": 200, "temperature": 0, "ignore_eos": True}
PATIENCE_SECONDS = 120.0


def exports(folder: Path) -> dict[str, Path]:
    """The folders of two models that answer with different texts."""
    return {name: export_tiny_model(folder / name, "causal", seed=seed) for seed, name in enumerate(("old", "new"), 3)}


def gateway(folders: dict[str, Path], **weights: float) -> dict[str, Any]:
    """The application of a gateway with these versions."""
    versions = [
        {"application": f"model-{name}", "directory": str(folders[name]), "version": name, "weight": weight}
        for name, weight in weights.items()
    ]
    return {
        "name": "spotune",
        "import_path": "spotune_serve.deployment.cluster:build_gateway",
        "route_prefix": "/",
        "args": {"name": "tiny"},
        "deployments": [{"name": "Gateway", "num_replicas": 1, "user_config": {"versions": versions}}],
    }


def model(folders: dict[str, Path], name: str) -> dict[str, Any]:
    """The application of a version."""
    return {
        "name": f"model-{name}",
        "import_path": "spotune_serve.deployment.cluster:build_model",
        "route_prefix": None,
        "args": {"directory": str(folders[name]), "drainSeconds": 20},
        "deployments": [{"name": "Replica", "num_replicas": 1}],
    }


class Reader(threading.Thread):
    """Reads one stream after the other over one connection, and keeps the version and text of each."""

    def __init__(self, url: httpx.URL) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._stop_reading = threading.Event()
        self.streams: list[tuple[str, str]] = []
        self.errors: list[str] = []

    def run(self) -> None:
        with httpx.Client(base_url=self._url, timeout=PATIENCE_SECONDS) as client:
            while not self._stop_reading.is_set():
                try:
                    self.streams.append(read_stream(client))
                except Exception as error:  # noqa: BLE001 - the test fails with it
                    self.errors.append(repr(error))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert not self.errors
            assert time.monotonic() < deadline, f"last streams: {self.streams[-3:]}"
            time.sleep(0.05)

    def read_more(self, version: str, count: int = 3) -> None:
        """Wait until as many further streams came from a version."""
        start = len(self.streams)
        self.wait_until(lambda: [name for name, _ in self.streams[start:]].count(version) >= count)

    def finish(self) -> None:
        self._stop_reading.set()
        self.join(PATIENCE_SECONDS)


def read_stream(client: httpx.Client, **headers: str) -> tuple[str, str]:
    """Version and text of one complete stream."""
    response = client.post(COMPLETIONS, json={**BODY, "stream": True}, headers=headers)
    events = read_events(response.raise_for_status().text)
    assert events[-1] == "[DONE]", events[-1]
    text = "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1])
    return response.headers[VERSION_HEADER], text


def reads_only(reader: Reader, version: str) -> bool:
    """Whether the reader's latest streams all came from this version."""
    return {name for name, _text in reader.streams[-3:]} == {version}


def listed(service: RayServe) -> dict[str, float]:
    versions = service.client.get("/stats").json()["versions"]
    return {name: stats["weight"] for name, stats in versions.items()}


def assert_gone(service: RayServe, version: str) -> None:
    """A request that names a version without an application is refused at once."""
    assert_refused(service.client.post(COMPLETIONS, json=BODY, headers={VERSION_HEADER: version}), version)


def assert_refused(response: httpx.Response, version: str) -> None:
    assert (response.status_code, response.json()["error"]["code"]) == (503, "no_replica")
    assert f"version {version}" in response.json()["error"]["message"]


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_new_version_takes_over_without_a_broken_stream(tmp_path: Path) -> None:
    folders = exports(tmp_path)
    old, new = model(folders, "old"), model(folders, "new")
    with RayServe() as service:
        service.deploy(gateway(folders, old=100), old)
        service.wait_for("/healthz")
        process = service.client.get("/stats").json()["process"]
        texts = dict([read_stream(service.client)])
        reader = Reader(service.client.base_url)
        reader.start()
        service.deploy(gateway(folders, old=1, new=99), old)
        reader.wait_until(lambda: listed(service) == {"new": 99, "old": 1})
        assert_gone(service, "new")
        reader.read_more("old")
        service.deploy(gateway(folders, old=100, new=0), old, new)
        service.wait_for(COMPLETIONS, headers={VERSION_HEADER: "new"}, body=BODY)
        texts |= dict([read_stream(service.client, **{VERSION_HEADER: "new"})])
        assert len(set(texts.values())) == 2
        assert {version for version, _text in reader.streams} == {"old"}
        service.deploy(gateway(folders, old=50, new=50), old, new)
        reader.read_more("new")
        service.deploy(gateway(folders, new=100), old, new)
        reader.wait_until(lambda: listed(service) == {"new": 100})
        service.deploy(gateway(folders, new=100), new)
        reader.read_more("new")
        service.deploy(gateway(folders, new=100, old=0), new)
        reader.wait_until(lambda: listed(service) == {"new": 100, "old": 0})
        assert_gone(service, "old")
        reader.finish()
        assert reader.errors == []
        assert set(reader.streams) == set(texts.items())
        assert service.client.get("/stats").json()["process"] == process, "the gateway never restarted"


@pytest.mark.long
@pytest.mark.timeout(600)
def test_requests_leave_a_version_whose_application_is_deleted_while_it_is_listed(tmp_path: Path) -> None:
    """A stream keeps the deleted replica busy: meanwhile Ray Serve neither gives the others a replica nor refuses."""
    folders = exports(tmp_path)
    old, new = model(folders, "old"), model(folders, "new")
    with RayServe() as service:
        service.deploy(gateway(folders, old=99, new=1), old, new)
        for name in ("old", "new"):
            service.wait_for(COMPLETIONS, headers={VERSION_HEADER: name}, body=BODY)
        readers = [Reader(service.client.base_url) for _ in range(8)]
        for reader in readers:
            reader.start()
            reader.read_more("old", 1)
        service.deploy(gateway(folders, old=99, new=1), new)
        for reader in readers:
            reader.wait_until(partial(reads_only, reader, "new"))
            reader.finish()
        assert [reader.errors for reader in readers] == [[]] * len(readers)
        assert len({stream for reader in readers for stream in reader.streams}) == 2, "one text for each version"
        assert_gone(service, "old")
        assert listed(service) == {"old": 99, "new": 1}
        service.deploy(gateway(folders, old=99, new=1))
        while service.client.post(COMPLETIONS, json=BODY).status_code == 200:
            pass
        assert_gone(service, "new")
        assert_refused(service.client.post(COMPLETIONS, json=BODY), "")
