"""A real HTTP server in a thread that plays the API server for the synchronous client of the CLI."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from spotune_client.cluster.client import Cluster
from spotune_client.cluster.kubeconfig import ClusterOptions, open_cluster
from tests.client.cluster.test_kubeconfig import kubeconfig

Answer = Callable[[str, dict[str, str], Message], tuple[int, str]]
"""Status and body of the response, by path, query and headers of a GET request."""


@contextmanager
def serving_cluster(answer: Answer, folder: Path) -> Iterator[Cluster]:
    """A client in namespace `team` of a server that answers like this; after 429 it may retry at once."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            status, text = answer(url.path, dict(parse_qsl(url.query)), self.headers)
            self.send_response(status)
            if status == 429:
                self.send_header("Retry-After", "0")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *_: Any) -> None:
            """Do not log requests."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, args=(0.05,))
        thread.start()
        file = kubeconfig(folder, test="team")
        file.write_text(file.read_text().replace("https://127.0.0.1:1", f"http://127.0.0.1:{http.server_port}"))
        try:
            yield open_cluster(ClusterOptions(kubeconfig=file))
        finally:
            http.shutdown()
            thread.join()
