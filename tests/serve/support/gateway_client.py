"""Requests to a gateway in this process."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from starlette.testclient import TestClient

from spotune_serve.gateway.backend import Backend
from spotune_serve.gateway.routes.app import create_app
from spotune_serve.gateway.served_model import ServedModel
from spotune_serve.gateway.settings import GatewaySettings
from tests.serve.support.scripted_backend import ScriptedBackend
from tests.serve.support.versions import run_single_version


class GatewayClient(TestClient):
    """A client of a gateway.

    Args:
        model: what it serves.
        script: the backend, or the text or the tokens that a scripted one plays.
        settings: of the gateway.

    Attributes:
        backend: the backend.
    """

    def __init__(
        self, model: ServedModel, script: str | Sequence[int] | Backend, settings: GatewaySettings | None = None
    ) -> None:
        self.backend: Any = script
        if isinstance(script, str | Sequence):
            self.backend = ScriptedBackend(tokens_of(model, script) if isinstance(script, str) else script)
        versions = run_single_version(model, self.backend, settings or GatewaySettings())
        super().__init__(create_app(versions), raise_server_exceptions=False)

    def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """The body of a response with status 200."""
        response = self.post(path, json=body)
        assert response.status_code == 200, response.text
        value: dict[str, Any] = response.json()
        return value

    def refuse(self, path: str, body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of a response in OpenAI's error format."""
        response = self.post(path, json=body)
        value = response.json()
        assert set(value) == {"error"}, value
        assert set(value["error"]) == {"message", "type", "param", "code"}
        return response.status_code, value["error"]

    def stream(self, path: str, **body: Any) -> list[dict[str, Any]]:  # type: ignore[override]  # a stream as a whole
        """The events of a complete stream."""
        response = self.post(path, json={**body, "stream": True})
        assert response.status_code == 200, response.text
        assert response.headers["content-type"].startswith("text/event-stream")
        events = read_events(response.text)
        assert events[-1] == "[DONE]"
        return [json.loads(event) for event in events[:-1]]

    def metric(self, name: str, **labels: str) -> float:
        """The value of a metric, summed over labels that are not given."""
        samples = [line for line in self.get("/metrics").text.splitlines() if line.startswith(name + "{")]
        chosen = [line for line in samples if all(f'{key}="{value}"' in line for key, value in labels.items())]
        assert chosen, f"no {name} with {labels}"
        return sum(float(line.rsplit(" ", 1)[1]) for line in chosen)


def read_events(text: str) -> list[str]:
    """The data of server-sent events; each is one line, and an empty one follows."""
    assert text.endswith("\n\n")
    events = text.removesuffix("\n\n").split("\n\n")
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [event.removeprefix("data: ") for event in events]


def tokens_of(model: ServedModel, text: str) -> list[int]:
    """The tokens of an answer, without the end-of-text token."""
    tokens: list[int] = model.tokenizer(text)["input_ids"][:-1]
    return tokens
