"""A fake Hugging Face Hub: repositories, large files and atomic commits, as far as its client needs them."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.trainer.support.json_server import JsonHandler, served

TOKEN = "hf_writer"


@dataclass
class Repository:
    """The committed files and commit messages of a repository."""

    private: bool
    files: dict[str, bytes] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def download(self, prefix: str, target: Path) -> None:
        """Write the files below `prefix` to `target`."""
        for name, content in self.files.items():
            if name.startswith(prefix):
                path = target / name.removeprefix(prefix)
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(content)


@dataclass
class Server:
    """The state of a Hub on this machine.

    Attributes:
        url: value for `HF_ENDPOINT`.
        repositories: by name.
        large: uploaded large files, by SHA-256.
        refusals: number of commits that fail before one succeeds.
    """

    url: str = ""
    repositories: dict[str, Repository] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    refusals: int = 0

    def create(self, body: dict[str, Any]) -> dict[str, Any]:
        name = f"{body['organization']}/{body['name']}"
        self.repositories.setdefault(name, Repository(body.get("visibility") == "private" or bool(body.get("private"))))
        return {"url": f"{self.url}/{name}", "id": name, "name": name}

    def batch(self, objects: list[dict[str, Any]]) -> dict[str, Any]:
        """Upload addresses of large files, for those that are not uploaded yet."""
        found = []
        for each in objects:
            missing = each["oid"] not in self.large
            actions = {"actions": {"upload": {"href": f"{self.url}/large/{each['oid']}"}}} if missing else {}
            found.append({"oid": each["oid"], "size": each["size"], **actions})
        return {"transfer": "basic", "objects": found}

    def commit(self, name: str, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Apply all changes of a commit at once."""
        repository = self.repositories[name]
        files = dict(repository.files)
        for line in lines:
            value = line["value"]
            match line["key"]:
                case "header":
                    repository.messages.append(value["summary"])
                case "file":
                    files[value["path"]] = base64.b64decode(value["content"])
                case "lfsFile":
                    files[value["path"]] = self.large[value["oid"]]
                case "deletedFile":
                    del files[value["path"]]
        repository.files = files
        oid = f"{len(repository.messages):040x}"
        return {"success": True, "commitOid": oid, "commitUrl": f"{self.url}/{name}/commit/{oid}"}


class Handler(JsonHandler):
    """The HTTP interface of a `Server`, which subclasses have as the class attribute `server_state`."""

    server_state: Server

    def do_GET(self) -> None:  # noqa: N802 - http.server calls it so
        """The files of a repository, or whether it may be written to."""
        if "/auth-check" in self.path:
            self.reply({}, 200 if self._may_write() else 403)
            return
        if self._repository() not in self.server_state.repositories:
            self.reply({"error": "Repository not found"}, 404)
            return
        files = self.server_state.repositories[self._repository()].files
        self.reply([{"type": "file", "path": path, "oid": "0" * 40, "size": len(files[path])} for path in files])

    def do_PUT(self) -> None:  # noqa: N802 - http.server calls it so
        """Upload of a large file."""
        self.server_state.large[self.path.rsplit("/", 1)[1]] = self.body()
        self.reply({})

    def do_POST(self) -> None:  # noqa: N802 - http.server calls it so
        """Actions that need write access."""
        body = self.body()
        if not self._may_write():
            self.reply({"error": "You do not have write access"}, 403)
        elif "/commit/" in self.path and self.server_state.refusals:
            self.server_state.refusals -= 1
            self.reply({"error": "The Hub is being moved"}, 400)
        else:
            self.reply(self._answer(body))

    def _answer(self, body: bytes) -> dict[str, Any]:
        state = self.server_state
        if self.path == "/api/repos/create":
            return state.create(json.loads(body))
        if "/preupload/" in self.path:
            return {"files": [_mode(each) for each in json.loads(body)["files"]]}
        if self.path.endswith("/objects/batch"):
            return state.batch(json.loads(body)["objects"])
        if "/commit/" in self.path:
            return state.commit(self._repository(), [json.loads(line) for line in body.splitlines()])
        return {}

    def _may_write(self) -> bool:
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def _repository(self) -> str:
        return "/".join(self.path.split("/")[3:5])


@contextmanager
def serving() -> Iterator[Server]:
    """Run a Hub during the `with` block."""
    server = Server()
    with served(type("OfServer", (Handler,), {"server_state": server})) as server.url:
        yield server


def _mode(file: dict[str, Any]) -> dict[str, Any]:
    mode = "lfs" if file["path"].endswith(".safetensors") else "regular"
    return {"path": file["path"], "uploadMode": mode, "shouldIgnore": False, "oid": None}
