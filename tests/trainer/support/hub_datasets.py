"""The part of the Hugging Face Hub's API that its client needs to list and download files of one dataset."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from hashlib import sha1
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

Files = Mapping[str, bytes]


class DatasetHandler(BaseHTTPRequestHandler):
    """Serves the dataset `me/rows`: files by revision, each revision with a commit of its own."""

    protocol_version = "HTTP/1.1"
    revisions: Mapping[str, Files]

    def do_GET(self) -> None:
        commits = {commit_of(revision): files for revision, files in self.revisions.items()}
        path = unquote(urlsplit(self.path).path)
        kind, _, rest = path.removeprefix("/api").removeprefix("/datasets/me/rows/").partition("/")
        commit, _, name = rest.partition("/")
        if kind == "revision" and rest in self.revisions:
            self._send(json.dumps({"id": "me/rows", "sha": commit_of(rest)}).encode())
        elif kind == "tree" and commit in commits:
            files = commits[commit]
            found = [path for path in sorted(files) if path.startswith(f"{name}/" if name else "")]
            listed = [{"type": "file", "path": path, "size": len(files[path]), "oid": path} for path in found]
            self._send(json.dumps(listed or {}).encode(), 200 if found else 404, "EntryNotFound")
        elif kind == "resolve" and name in commits.get(commit, {}):
            self._send(commits[commit][name], commit=commit)
        else:
            self._send(b"", 404, "RevisionNotFound" if "/me/rows/" in path else "RepoNotFound")

    do_HEAD = do_GET  # noqa: N815 - the base class's way

    def _send(self, content: bytes, status: int = 200, code: str = "", commit: str = "") -> None:
        self.send_response(status)
        headers = {"ETag": f'"{len(content)}"', "X-Repo-Commit": commit, "Content-Length": str(len(content))}
        for name, value in (headers | ({"X-Error-Code": code} if status == 404 else {})).items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None: ...


def commit_of(revision: str) -> str:
    """The commit of a revision."""
    return sha1(revision.encode(), usedforsecurity=False).hexdigest()


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The URL of a server on this machine."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def serving_dataset(given: Mapping[str, Files]) -> Iterator[str]:
    """The URL of a Hub with the dataset `me/rows`, whose files are given by revision."""

    class Handler(DatasetHandler):
        revisions = given

    with serving(Handler) as url:
        yield url


@contextmanager
def hub_of_this_process(files: Files, folder: Path) -> Iterator[None]:
    """Let the Hub's client in this process read the dataset `me/rows` with these files.

    The client reads its settings from the environment when it is imported, which other tests have done already.
    """
    with serving_dataset({"main": files}) as url, pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setenv("SPOTUNE_CACHE", str(folder / "cache"))
        yield
