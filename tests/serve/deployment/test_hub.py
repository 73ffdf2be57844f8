"""Models on the Hub: what is downloaded, where to, and the errors."""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import Any

import httpx
import pytest
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from spotune.errors import InfrastructureError, JobError, UsageError
from spotune_serve.deployment.hub import HubModel, model_folder

MODEL = HubModel("owner/name", "v2")
FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "spiece.model", "merges.txt", "chat_template.jinja",
    "spotune.json", "model.safetensors.index.json", "model-00001-of-00002.safetensors", "pytorch_model.bin",
    "modeling_custom.py", "README.md", "original/model.safetensors", "consolidated.safetensors", "onnx/config.json",
)  # fmt: skip


class FakeHub:
    """Stands for `snapshot_download`: makes the chosen files, or fails."""

    def __init__(self, folder: Path, files: tuple[str, ...] = FILES, error: Exception | None = None) -> None:
        self._folder = folder
        self._files = files
        self._error = error
        self.asked: dict[str, Any] = {}

    def __call__(
        self,
        repo_id: str,
        *,
        revision: str,
        cache_dir: str | None,
        allow_patterns: list[str],
        ignore_patterns: list[str],
    ) -> str:
        self.asked = {"repository": repo_id, "revision": revision, "cache": cache_dir}
        if self._error is not None:
            raise self._error

        def matches(name: str, patterns: list[str]) -> bool:
            return any(fnmatch.fnmatch(name, pattern) for pattern in patterns)

        for name in self._files:
            if matches(name, allow_patterns) and not matches(name, ignore_patterns):
                (self._folder / name).write_text("{}")
        return str(self._folder)

    @property
    def downloaded(self) -> set[str]:
        return {path.name for path in self._folder.iterdir()}


def http_error(kind: type[HfHubHTTPError], status: int, message: str) -> HfHubHTTPError:
    response: Any = httpx.Response(status, request=httpx.Request("GET", "https://hub.example/owner"))
    return kind(message, response=response)


def test_a_replica_downloads_weights_and_no_code(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    assert model_folder(MODEL, download=hub) == tmp_path
    assert (hub.asked["repository"], hub.asked["revision"]) == ("owner/name", "v2")
    assert hub.downloaded == set(FILES[:9])


def test_a_gateway_downloads_no_weights(tmp_path: Path) -> None:
    hub = FakeHub(tmp_path)
    model_folder(MODEL, weights=False, download=hub)
    assert hub.downloaded == set(FILES[:8])


@pytest.mark.parametrize(
    ("variables", "cache"),
    [
        ({}, None),
        ({"SPOTUNE_CACHE": "/cache/spotune"}, "/cache/spotune/hub"),
        ({"SPOTUNE_CACHE": "/cache/spotune", "HF_HOME": "/models"}, None),
    ],
)
def test_the_cache_is_that_of_the_environment(
    variables: dict[str, str], cache: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SPOTUNE_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    hub = FakeHub(tmp_path)
    model_folder(MODEL, download=hub)
    assert hub.asked["cache"] == cache


@pytest.mark.parametrize(
    ("error", "remedy"),
    [
        (http_error(RepositoryNotFoundError, 401, "Repository Not Found"), "token with access in HF_TOKEN"),
        (http_error(GatedRepoError, 403, "Access is restricted"), "token with access in HF_TOKEN"),
        (http_error(HfHubHTTPError, 403, "Forbidden"), "token with access in HF_TOKEN"),
        (http_error(RevisionNotFoundError, 404, "Revision Not Found"), "Name a branch, tag or commit"),
    ],
)
def test_a_model_that_the_hub_refuses_is_named_with_its_revision(error: Exception, remedy: str, tmp_path: Path) -> None:
    with pytest.raises(JobError, match=f"hf://owner/name at revision v2 cannot be downloaded: .*{remedy}"):
        model_folder(MODEL, download=FakeHub(tmp_path, error=error))


@pytest.mark.parametrize(
    "error",
    [
        LocalEntryNotFoundError("no connection and nothing in the cache"),
        http_error(HfHubHTTPError, 503, "Service Unavailable"),
        http_error(HfHubHTTPError, 429, "Too Many Requests"),
        OSError(28, "No space left on device"),
        httpx.ConnectError("no route to host"),
    ],
)
def test_an_outage_is_no_fault_of_the_model(error: Exception, tmp_path: Path) -> None:
    message = "hf://owner/name at revision v2 cannot be downloaded: .*can be reached from here.*HF_TOKEN"
    with pytest.raises(InfrastructureError, match=message):
        model_folder(MODEL, download=FakeHub(tmp_path, error=error))


def test_a_repository_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(JobError, match=r"hf://owner/name at revision v2 has no config\.json"):
        model_folder(MODEL, download=FakeHub(tmp_path, files=("README.md",)))


def test_a_folder_is_the_model_itself_or_the_export_of_a_job(tmp_path: Path) -> None:
    export = tmp_path / "export"
    export.mkdir()
    (export / "spotune.json").write_text("{}")
    (export / "config.json").write_text("{}")
    assert model_folder(export) == export
    assert model_folder(tmp_path) == export
    with pytest.raises(UsageError, match="there is no directory"):
        model_folder(tmp_path / "missing")
