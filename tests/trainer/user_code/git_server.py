"""A web server for one git repository, by git's own `http-backend`, that asks for a token."""

from __future__ import annotations

import base64
import os
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

REPOSITORY = "training.git"


def make_repository(folder: Path, *versions: dict[str, str]) -> list[str]:
    """A bare repository with one commit for each mapping of file names to texts; returns the commits."""
    work, bare = folder / "work", folder / REPOSITORY
    _git("init", "--quiet", "--initial-branch=main", str(work))
    commits = [commit(work, version) for version in versions]
    _git("clone", "--quiet", "--bare", str(work), str(bare))
    _git("-C", str(bare), "config", "http.receivepack", "false")
    return commits


def commit(work: Path, content: dict[str, str]) -> str:
    """Commit files in a work tree; returns the commit."""
    for name, text in content.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    _git("-C", str(work), "add", "--all")
    _git("-C", str(work), "-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "--quiet", "--message=code")
    return _git("-C", str(work), "rev-parse", "HEAD").strip()


def push(folder: Path, content: dict[str, str]) -> str:
    """Add a commit to the main branch of a repository; returns it."""
    added = commit(folder / "work", content)
    _git("-C", str(folder / "work"), "push", "--quiet", str(folder / REPOSITORY), "main")
    return added


@contextmanager
def served(folder: Path, token: str) -> Iterator[str]:
    """Serve the repository to those who have a token; yields its URL."""
    expected = "Basic " + base64.b64encode(f"x-access-token:{token}".encode()).decode()

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

        def do_GET(self) -> None:
            if self.headers.get("Authorization") != expected:
                self.send_response(401)
                self.send_header("WWW-Authenticate", 'Basic realm="git"')
                self.end_headers()
                return
            path, _, query = self.path.partition("?")
            environment = {
                **os.environ,
                "GIT_PROJECT_ROOT": str(folder),
                "GIT_HTTP_EXPORT_ALL": "1",
                "PATH_INFO": path,
                "QUERY_STRING": query,
                "REQUEST_METHOD": self.command,
                "CONTENT_TYPE": self.headers.get("Content-Type", ""),
                "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
                "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            }
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            answer = subprocess.run(
                ["git", "http-backend"], env=environment, input=body, capture_output=True, check=True
            ).stdout
            head, _, content = answer.partition(b"\r\n\r\n")
            fields = dict(line.split(": ", 1) for line in head.decode().splitlines())
            self.send_response(int(fields.pop("Status", "200").split()[0]))
            for name, value in fields.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        do_POST = do_GET  # noqa: N815 - the base class's way

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}/{REPOSITORY}"
        server.shutdown()


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], check=True, capture_output=True, text=True).stdout
