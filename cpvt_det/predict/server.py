# SPDX-License-Identifier: Apache-2.0
"""The page and its two requests, ``/detect`` and ``/look``, over HTTP. Nothing is written, and no file is ever opened.

Every request contains the bytes of its image. Pages of other sites cannot use the server: requests from another origin are
refused, and so are requests to a host name that was not allowed. The host name is checked because a site can make its own name
resolve to this machine (DNS rebinding). This cannot happen with IP addresses and ``localhost``.
"""

import contextlib
import ipaddress
import json
import logging
import math
import socket
import socketserver
import sys
from collections.abc import Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cpvt_det.common.errors import BadInputError, first_line
from cpvt_det.data.listing import readable
from cpvt_det.predict.served_model import Json, ServedModel
from cpvt_det.visualize.page import build_page
from cpvt_det.visualize.pictures import hex_color

logger = logging.getLogger("cpvt_det")
MEGABYTE = 1_000_000
MOST_DIGITS = 18
"""Largest number of digits that is read as a number, because Python raises an error of its own for thousands of digits."""
MOST_LEVELS = 8
"""Number of feature levels with their own colour, the same as in ``cpvt-det show attention``."""


class RefusedError(Exception):
    """A request that is refused.

    Args:
        status: HTTP status.
        message: the reason, and what to do about it.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class PageServer(ThreadingHTTPServer):
    """A server for the page. It listens as soon as it is created, and answers once it has models and is serving.

    Args:
        host: address or name to listen on.
        port: port to listen on; 0 for a free one.
        max_upload: size of the largest image file in bytes.
        names: further host names under which the page may be requested, such as the name of a proxy.

    Raises:
        BadInputError: an address that cannot be listened on, or an invalid host name.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, max_upload: int, names: Sequence[str] = ()):
        for name in names:
            if _host_of(f"//{name}") != name.lower():
                raise BadInputError(f"{name!r} is not a host name; --allow-host takes one without http:// and port")
        self.models: Sequence[ServedModel] = ()
        self.max_upload = max_upload
        self.page = b""
        self.names = {name.lower() for name in names}
        self._own_names = {"localhost", host.lower()}
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.allow_reuse_address = sys.platform != "win32"  # on Windows it would share the port of another server that runs
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise BadInputError(f"cannot listen on {host}:{port}: {first_line(error)}; --port 0 picks a free port") from error
        self.is_local = ipaddress.ip_address(self.server_address[0]).is_loopback

    def server_bind(self) -> None:
        """Bind without looking up the machine's full name, as :class:`http.server.HTTPServer` does, because this may take
        seconds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]

    def show(self, models: Sequence[ServedModel]) -> None:
        """Set the models that the page shows side by side."""
        self.models = models
        described = []
        for model in models:
            predictor = model.predictor
            classes = zip(predictor.classes.ids, predictor.classes.names, strict=True)
            named = [{"id": key, "name": name, "color": hex_color(label)} for label, (key, name) in enumerate(classes)]
            described.append({"name": model.name, "threshold": predictor.threshold, "classes": named})
        levels = [hex_color(level) for level in range(MOST_LEVELS)]
        data = {"models": described, "levels": levels, "maxUpload": self.max_upload, "suffixes": sorted(readable())}
        self.page = build_page("serve.html", data).encode()

    def knows(self, host: str) -> bool:
        """Whether the page may be requested under this name or address."""
        with contextlib.suppress(ValueError):
            return bool(ipaddress.ip_address(host))
        return host in self.names | self._own_names

    @property
    def url(self) -> str:
        """The page's address on this machine."""
        host, port = self.server_address[:2]
        return f"http://{f'[{host}]' if ':' in host else host}:{port}/"


class Handler(BaseHTTPRequestHandler):
    """A handler that answers the requests of one connection."""

    server: PageServer
    timeout = 60  # seconds to wait for a client that sends nothing

    def do_GET(self) -> None:
        """Send the page, the only thing that can be requested with GET."""
        with self._errors_sent():
            self._check_sender()
            if urlsplit(self.path).path != "/":
                raise RefusedError(404, "the only page is /")
            self._send_bytes(200, "text/html; charset=utf-8", self.server.page)

    def do_POST(self) -> None:
        """Send, as JSON, the detections of an image or the places where a query looked in it."""
        with self._errors_sent():
            self._check_sender()
            parts = urlsplit(self.path)
            if parts.path not in ("/detect", "/look"):
                raise RefusedError(404, "the only requests are /detect and /look")
            content, asked = self._read_body(), parse_qs(parts.query)
            model = self.server.models[_number(asked, "model", len(self.server.models))]
            name = asked.get("name", ["the image"])[0]
            if parts.path == "/look":
                self._send(200, model.looks(content, name, _number(asked, "query")))
            else:
                self._send(200, _detections(model, content, name, "pixels" in asked))

    def log_message(self, text: str, *arguments: Any) -> None:
        """Log requests at the debug level only."""
        logger.debug(text, *arguments)

    @contextlib.contextmanager
    def _errors_sent(self) -> Iterator[None]:
        try:
            yield
        except RefusedError as error:
            self.close_connection = True  # the request's body may not have been read
            self._send(error.status, {"error": str(error)})
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except BadInputError as error:
            self._send(422, {"error": first_line(error)})
        except Exception as error:
            logger.exception("A request failed")
            self._send(500, {"error": f"failed: {type(error).__name__}: {first_line(error)}"})

    def _check_sender(self) -> None:
        """Refuse scripts of other sites, which can reach this machine through the user's browser."""
        host, origin = _host_of(f"//{self.headers.get('Host', '')}"), self.headers.get("Origin")
        if not self.server.knows(host):
            raise RefusedError(403, f"the host {host!r} is not allowed here; cpvt-det serve --allow-host adds host names")
        if origin is not None and _host_of(origin) not in {host, *self.server.names}:
            raise RefusedError(403, "requests from other sites are refused")

    def _read_body(self) -> bytes:
        if (length := _whole(self.headers.get("Content-Length", ""))) is None:
            raise RefusedError(411, "the length of the image is missing")
        if length > self.server.max_upload:
            size, most = length / MEGABYTE, self.server.max_upload / MEGABYTE
            raise RefusedError(413, f"{size:.1f} MB are too much: at most {most:g} MB are accepted (--max-upload)")
        content = self.rfile.read(length)
        if len(content) < length:
            raise RefusedError(400, f"{len(content)} of {length} bytes arrived")
        return content

    def _send(self, status: int, content: Json) -> None:
        self._send_bytes(status, "application/json", json.dumps(content, allow_nan=False).encode())

    def _send_bytes(self, status: int, kind: str, content: bytes) -> None:
        self.send_response(status)
        headers = {"Content-Type": kind, "Content-Length": str(len(content)), "Cache-Control": "no-store"}
        headers |= {"X-Content-Type-Options": "nosniff", "X-Frame-Options": "DENY"}
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(content)


def _number(asked: dict[str, list[str]], name: str, end: float = math.inf) -> int:
    text = asked.get(name, ["0"])[0]
    number = _whole(text)
    if number is None or number >= end:
        raise RefusedError(400, f"{name} {text[:MOST_DIGITS]!r} is not a valid number")
    return number


def _whole(text: str) -> int | None:
    """The number in a text of digits; ``None`` for any other text and for a very long one."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= MOST_DIGITS else None


def _host_of(address: str) -> str:
    """The host name or IP address in an address, in lower case; empty if there is none."""
    with contextlib.suppress(ValueError):  # raised for brackets that do not close
        return urlsplit(address).hostname or ""
    return ""


def _detections(model: ServedModel, content: bytes, name: str, with_pixels: bool) -> Json:
    """The detections for the page, as [x, y, w, h, score, label, query]. The pixels are the model's input, scaled down."""
    found = model.detect(content, name)
    low, high = found.detections.boxes_xyxy.double().split(2, dim=1)
    parts = low.tolist(), (high - low).tolist(), found.detections.scores.tolist(), found.detections.labels.tolist(), found.queries
    boxes = [[*corner, *sides, *rest] for corner, sides, *rest in zip(*parts, strict=True)]
    height, width = found.size
    answer = {"size": [width, height], "seconds": found.seconds, "boxes": boxes}
    return answer | ({"image": found.picture} if with_pixels else {})
