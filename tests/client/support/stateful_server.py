"""A real HTTP server in a thread that keeps custom resources: create, apply, merge patch, delete, get and list."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from tests.client.cluster.test_kubeconfig import kubeconfig

Manifest = dict[str, Any]
ROOT = "/apis/spotune.dev/v1alpha1"


class Store:
    """The objects, by path of the API; a change of one raises its ``resourceVersion``."""

    def __init__(self) -> None:
        self.objects: dict[str, Manifest] = {}
        self.requests: list[tuple[str, str, dict[str, str], str]] = []
        self.is_down = False
        self.after_get: Callable[[Manifest], None] = lambda _: None
        """Called with each object after it was read, to let it change."""
        self._lock = threading.Lock()
        self._version = 0

    def answer(self, method: str, url: str, body: Manifest | None, kind: str) -> tuple[int, Manifest]:
        """Status and content of the response."""
        parts = urlsplit(url)
        with self._lock:
            self.requests.append((method, parts.path, dict(parse_qsl(parts.query)), kind))
            if self.is_down:
                return 503, {"message": "the API server is down"}
            return getattr(self, f"_{method.lower()}")(parts.path, body)  # type: ignore[no-any-return]

    def put(self, path: str, content: Manifest) -> Manifest:
        """Keep an object."""
        self._version += 1
        metadata = {"uid": path, "generation": 1, **content["metadata"], "resourceVersion": str(self._version)}
        self.objects[path] = {**content, "metadata": metadata}
        return self.objects[path]

    def _get(self, path: str, _: Manifest | None) -> tuple[int, Manifest]:
        if path in self.objects:
            found = json.loads(json.dumps(self.objects[path]))
            self.after_get(self.objects[path])
            return 200, found
        plural = path.rpartition("/")[2]
        if plural in ("finetunejobs", "finetunesweeps", "modelservices"):
            prefix = path if "/namespaces/" in path else f"{ROOT}/namespaces/"
            items = [each for at, each in self.objects.items() if at.startswith(prefix) and f"/{plural}/" in at]
            return 200, {"items": items, "metadata": {}}
        return 404, {"message": f"{path} not found"}

    def _post(self, path: str, body: Manifest | None) -> tuple[int, Manifest]:
        assert body is not None
        at = f"{path}/{body['metadata']['name']}"
        if at in self.objects:
            return 409, {"message": f"{at.rpartition('/')[2]} already exists"}
        return 201, self.put(at, body)

    def _patch(self, path: str, body: Manifest | None) -> tuple[int, Manifest]:
        assert body is not None
        kept = self.objects.get(path, {"metadata": {}})
        merged = {**kept, **body, "metadata": {**kept["metadata"], **body.get("metadata", {})}}
        merged["spec"] = {**kept.get("spec", {}), **body.get("spec", {})}
        return 200, self.put(path, merged)

    def _delete(self, path: str, _: Manifest | None) -> tuple[int, Manifest]:
        return (200, self.objects.pop(path)) if path in self.objects else (404, {"message": f"{path} not found"})


@contextmanager
def serving_store(folder: Path) -> Iterator[tuple[Store, Path]]:
    """A server with a store, and a kubeconfig for it with namespace `team`."""
    store = Store()

    class Handler(BaseHTTPRequestHandler):
        def respond(self) -> None:
            text = self.rfile.read(int(self.headers["Content-Length"] or 0))
            body = json.loads(text) if text else None
            status, content = store.answer(self.command, self.path, body, self.headers["Content-Type"])
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def __getattr__(self, name: str) -> Any:
            if name.startswith("do_"):
                return self.respond
            raise AttributeError(name)

        def log_message(self, *_: Any) -> None:
            """Do not log requests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        file = kubeconfig(folder, test="team")
        file.write_text(file.read_text().replace("https://127.0.0.1:1", f"http://127.0.0.1:{http.server_port}"))
        try:
            yield store, file
        finally:
            http.shutdown()
            thread.join()
