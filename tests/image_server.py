# SPDX-License-Identifier: Apache-2.0
"""A local HTTP server of a folder that sends parts of files, and can fail."""

import contextlib
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote


class Server:
    """A folder behind a URL.

    Args:
        folder: the folder.

    Attributes:
        failures: number of the next requests that are answered with ``failure``.
        failure: HTTP's status of a failure.
    """

    def __init__(self, folder: Path):
        self.folder, self.failures, self.failure = folder, 0, 503
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.answer(self)

            def log_message(self, *words: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler) -> None:
        """Send a file, a part of it, or an error."""
        path = self.folder / unquote(request.path).lstrip("/")
        status, content = 200, b""
        if self.failures:
            self.failures -= 1
            status = self.failure
        elif not path.is_file():
            status = 404
        else:
            content = path.read_bytes()
            wanted = re.fullmatch(r"bytes=(\d+)-(\d+)", request.headers.get("Range", ""))
            if wanted:
                status, content = 206, content[int(wanted[1]) : int(wanted[2]) + 1]
        request.send_response(status)
        request.send_header("Content-Length", str(len(content)))
        request.end_headers()
        request.wfile.write(content)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    """A server within the block."""
    found = Server(folder)
    thread = threading.Thread(target=found.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield found
    finally:
        found.server.shutdown()
        found.server.server_close()
        thread.join()
