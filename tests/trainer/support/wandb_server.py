"""A fake Weights & Biases server: as much as the client needs to create, resume and write to runs.

The GraphQL operations and the file stream are those of the client's own core (github.com/wandb/wandb, `core/internal`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tests.trainer.support.json_server import JsonHandler, served

KEY = "0123456789" * 4
"""An API key; the client requires 40 characters."""


@dataclass
class StoredRun:
    """A run as the server stores it."""

    project: str
    config: dict[str, Any]
    history: list[dict[str, Any]] = field(default_factory=list)
    summary: str = "{}"
    exit_codes: list[int] = field(default_factory=list)
    preempted: bool = False

    def curve(self, name: str, step: str = "step") -> list[tuple[int, float]]:
        """(step, value) of every point of a curve, in order of arrival."""
        return [(int(row[step]), row[name]) for row in self.history if name in row]


@dataclass
class Server:
    """The server's URL, its runs by id, and uploaded files by name."""

    url: str = ""
    runs: dict[str, StoredRun] = field(default_factory=dict)
    uploads: dict[str, bytes] = field(default_factory=dict)

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        """The data of the response to a GraphQL operation."""
        entity = {"id": "e", "name": "team"}
        project = {"id": "m", "name": "p", "entity": entity}
        name = variables.get("name", "")
        match operation:
            case "Viewer":
                viewer = {"id": "v", "entity": "team", "username": "me", "email": "me@example.com", "flags": "{}"}
                return {"viewer": viewer | {"teams": {"edges": []}}}
            case "RunResumeStatus":
                return {"model": project | {"bucket": self._bucket(name)}}
            case "UpsertBucket":
                config = json.loads(variables.get("config") or "{}")
                self.runs.setdefault(name, StoredRun(str(variables.get("project")), config))
                return {"upsertBucket": {"bucket": {"id": name, "name": name, "project": project}, "inserted": True}}
            case "CreateRunFiles":
                files = [{"name": each, "uploadUrl": f"{self.url}/upload/{each}"} for each in variables["files"]]
                return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
            case _:
                return {}

    def take(self, run: StoredRun, stream: dict[str, Any]) -> None:
        """Store a message of a run's file stream."""
        for name, chunk in stream.get("files", {}).items():
            if name == "wandb-summary.json":
                run.summary = chunk["content"][-1]
            elif name == "wandb-history.jsonl":
                run.history[chunk["offset"] :] = [json.loads(line) for line in chunk["content"]]
        run.preempted = run.preempted or bool(stream.get("preempting"))
        if stream.get("complete"):
            run.exit_codes.append(stream["exitcode"])

    def _bucket(self, name: str) -> dict[str, Any] | None:
        run = self.runs.get(name)
        if run is None:
            return None
        tails = {"historyTail": json.dumps([json.dumps(row) for row in run.history[-1:]]), "eventsTail": "[]"}
        lines = {"historyLineCount": len(run.history), "eventsLineCount": 0, "logLineCount": 0}
        more = {"config": "{}", "wandbConfig": '{"t": 1}', "summaryMetrics": run.summary, "tags": []}
        return {"id": name, "name": name, "displayName": name, **tails, **lines, **more}


@contextmanager
def serving() -> Iterator[Server]:
    """Run the server in a thread."""
    server = Server()

    class Handler(JsonHandler):
        def do_POST(self) -> None:  # noqa: N802 - http.server's name
            body = self.body()
            answer = {}
            if self.path == "/graphql":
                query = json.loads(body)
                answer = {"data": server.answer(query.get("operationName"), query.get("variables") or {})}
            elif self.path.endswith("/file_stream"):
                server.take(server.runs[self.path.split("/")[-2]], json.loads(body))
            self.reply(answer)

        def do_PUT(self) -> None:  # noqa: N802 - http.server's name
            server.uploads[self.path.removeprefix("/upload/")] = self.body()
            self.reply({})

    with served(Handler) as server.url:
        yield server
