"""A server for one person on this machine: the report of a run, while it goes on.

It listens on the loopback address only, answers only GET and HEAD, and refuses requests whose Host
header names anything else than this machine: a web page elsewhere cannot read the report through a
name that it makes point here (DNS rebinding). It never writes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock

from fedcohort.exceptions import FedcohortError
from fedcohort.experiments.results import read, run_folders
from fedcohort.report.content import Content
from fedcohort.report.page import run_page

ADDRESS = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost")


def version(folders: Sequence[Path]) -> str:
    """Return a digest that changes when a run under `folders` has new rounds."""
    paths = [run / "rounds.jsonl" for folder in folders for run in run_folders(folder)]
    sizes = [(str(path), path.stat().st_size if path.exists() else 0) for path in paths]
    return hashlib.blake2b(ascii(sizes).encode(), digest_size=8).hexdigest()


def server(folders: Sequence[Path], port: int = 0) -> ThreadingHTTPServer:
    """Return a server of the report on `folders`; port 0 picks a free one."""
    lock, latest = Lock(), ("", b"")

    def page() -> bytes:
        nonlocal latest
        with lock:
            now = version(folders)
            if latest[0] != now:
                latest = now, run_page(Content(read(*folders)), live=True).encode()
            return latest[1]

    pages: dict[str, tuple[str, Callable[[], bytes]]] = {
        "/": ("text/html; charset=utf-8", page),
        "/version": ("text/plain; charset=utf-8", lambda: version(folders).encode()),
    }

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            host, _, port = self.headers.get("Host", "").partition(":")
            if host not in NAMES or port != str(self.server.server_port):  # type: ignore[attr-defined]
                self._answer(403, "text/plain", b"This server answers only to localhost.\n")
            elif self.path not in pages:
                self._answer(404, "text/plain", b"Not found.\n")
            else:
                kind, made = pages[self.path]
                try:
                    self._answer(200, kind, made())
                except FedcohortError as error:
                    self._answer(503, "text/plain; charset=utf-8", f"{error}\n".encode())

        do_HEAD = do_GET

        def _answer(self, status: int, kind: str, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Cache-Control", "no-store")
            self.send_header("X-Content-Type-Options", "nosniff")
            self.send_header("Cross-Origin-Resource-Policy", "same-origin")
            with suppress(ConnectionError):  # the reader has closed the page
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            """Keep the terminal quiet."""

    return ThreadingHTTPServer((ADDRESS, port), Handler)
