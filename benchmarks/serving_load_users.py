"""Users of benchmarks/serving_load.py, for locust: each asks for one streamed completion after the other.

Usage (serving_load.py runs it):
    locust --locustfile benchmarks/serving_load_users.py --headless ...
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from locust import HttpUser, events, task

PROMPT = "how many singers are there ?"
TOKENS = 32
_answers: list[dict[str, float]] = []


@events.quitting.add_listener  # type: ignore[untyped-decorator]
def write(environment: Any, **_event: Any) -> None:
    """Write all answers and the number of failures to the file that SERVING_LOAD_OUTPUT names."""
    found = {"failures": environment.stats.total.num_failures, "answers": _answers}
    Path(os.environ["SERVING_LOAD_OUTPUT"]).write_text(json.dumps(found), encoding="utf-8")


class Reader(HttpUser):  # type: ignore[misc]  # locust is not installed beside spotune
    """Reads one stream after the other."""

    @task  # type: ignore[untyped-decorator]
    def read_stream(self) -> None:
        """Ask once. An answer has the times, in seconds, of its question, its first token and its last one."""
        body = {"model": os.environ["SERVING_LOAD_MODEL"], "prompt": PROMPT, "max_tokens": TOKENS, "ignore_eos": True}
        asked, first, tokens = time.perf_counter(), 0.0, 0
        with self.client.post(
            "/v1/completions",
            json={**body, "stream": True, "stream_options": {"include_usage": True}},
            stream=True,
            catch_response=True,
        ) as response:
            for line in response.iter_lines(chunk_size=None):
                data = line.removeprefix(b"data: ")
                if not data or data == b"[DONE]":
                    continue
                first = first or time.perf_counter()
                tokens = (json.loads(data).get("usage") or {}).get("completion_tokens", tokens)
            if tokens != TOKENS:
                response.failure(f"status {response.status_code} and {tokens} tokens")
                return
            response.success()
        _answers.append({"asked": asked, "first": first, "last": time.perf_counter()})
