"""Requests to a ModelService without a pause, and what came of them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from openai import OpenAI, OpenAIError

from tests.cluster.model_services import RunningService

_THREADS = 4


@dataclass
class Load:
    """Requests of several threads, one after the other in each.

    Attributes:
        model: The model that the requests name.
        versions: Number of answers by the version that gave them.
        failed: Messages of failed requests.
    """

    model: str
    versions: Counter[str] = field(default_factory=Counter)
    failed: list[str] = field(default_factory=list)

    def request(self, client: OpenAI, version: str = "") -> str:
        """One request; returns the version that answered it."""
        headers = {"x-spotune-version": version} if version else None
        answer = client.completions.with_raw_response.create(
            model=self.model, prompt="how many singers ?", max_tokens=16, extra_headers=headers
        )
        answer.parse()
        return answer.headers.get("x-spotune-version", "")

    def repeat(self, client: OpenAI, stop: threading.Event) -> None:
        """Requests until the load ends."""
        while not stop.is_set():
            try:
                self.versions[self.request(client)] += 1
            except OpenAIError as error:
                self.failed.append(f"{type(error).__name__}: {error}")


@contextmanager
def load_on(service: RunningService, threads: int = _THREADS) -> Iterator[Load]:
    """Requests of some threads without a pause during the block."""
    load, stop = Load(service.name), threading.Event()
    with service.client() as client:
        running = [threading.Thread(target=load.repeat, args=(client, stop)) for _ in range(threads)]
        for thread in running:
            thread.start()
        try:
            yield load
        finally:
            stop.set()
            for thread in running:
                thread.join()
