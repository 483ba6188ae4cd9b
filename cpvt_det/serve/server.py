# SPDX-License-Identifier: Apache-2.0
"""The page and its two questions, ``/detect`` and ``/look``, over HTTP. Nothing is written, and no file is ever opened.

Every request carries the bytes of its image, so that there is nothing of it to store. The page of another site cannot ask: requests
that name another host, or come from another origin, are refused.
"""

import ipaddress
import json
import logging
import math
import sys
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from cpvt_det.data.find_images import SUFFIXES
from cpvt_det.errors import BadInputError, first_line
from cpvt_det.serve.model import Json, ServedModel
from cpvt_det.visualize.page import build_page, embed_image, hex_color

logger = logging.getLogger("cpvt_det")
NAMES_OF_LOOPBACK = {"localhost", "127.0.0.1", "[::1]"}
MEGABYTE = 1_000_000
MOST_LEVELS = 8
"""Number of feature levels that have a colour of their own, that of ``cpvt-det show attention``."""


class RefusedError(Exception):
    """A request that gets no answer.

    Args:
        status: HTTP status.
        message: reason, and the way out.
    """

    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class PageServer(ThreadingHTTPServer):
    """A server of the page for some models.

    Args:
        models: models that the page shows side by side.
        host: address or name to listen at.
        port: port to listen at; 0 for a free one.
        max_upload: largest image file in bytes.

    Raises:
        BadInputError: an address that cannot be listened at.
    """

    daemon_threads = True

    def __init__(self, models: Sequence[ServedModel], host: str, port: int, max_upload: int):
        self.models = models
        self.max_upload = max_upload
        self.page = build_page("serve.html", _describe(models, max_upload)).encode()
        self.allow_reuse_address = sys.platform != "win32"  # on Windows it would share the port of another server that runs
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError) as error:
            raise BadInputError(f"cannot listen at {host}:{port}: {first_line(error)}; --port 0 takes a free port") from error
        self.is_local = ipaddress.ip_address(self.server_address[0]).is_loopback

    @property
    def url(self) -> str:
        """The page's address on this machine."""
        host, port = self.server_address[:2]
        return f"http://{host}:{port}/"


class Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: PageServer
    timeout = 60  # seconds: of a client that sends nothing

    def do_GET(self) -> None:
        """The page; there is nothing else to get."""
        self._answer(self._get)

    def do_POST(self) -> None:
        """Detections of an image, or where a query looked in it, as JSON."""
        self._answer(self._post)

    def log_message(self, text: str, *arguments: Any) -> None:
        """Requests are no news."""
        logger.debug(text, *arguments)

    def _answer(self, method: Any) -> None:
        try:
            self._check_sender()
            method()
        except RefusedError as error:
            self._refuse(error)
        except (ConnectionError, TimeoutError):
            self.close_connection = True
        except BadInputError as error:
            self._send(422, {"error": first_line(error)})
        except Exception as error:
            logger.exception("A request failed")
            self._send(500, {"error": f"failed: {type(error).__name__}: {first_line(error)}"})

    def _get(self) -> None:
        if urlsplit(self.path).path != "/":
            raise RefusedError(404, "there is only the page /")
        self._send_bytes(200, "text/html; charset=utf-8", self.server.page)

    def _post(self) -> None:
        parts = urlsplit(self.path)
        if parts.path not in ("/detect", "/look"):
            raise RefusedError(404, "there are only /detect and /look")
        length, asked = self._check_body(), parse_qs(parts.query)
        model = self.server.models[_number(asked, "model", len(self.server.models))]
        name, content = asked.get("name", ["the image"])[0], self.rfile.read(length)
        if len(content) < length:
            raise RefusedError(400, f"{len(content)} of {length} bytes arrived")
        if parts.path == "/look":
            self._send(200, model.looks(content, name, _number(asked, "query", math.inf)))
        else:
            self._send(200, _detections(model, content, name, "pixels" in asked))

    def _check_sender(self) -> None:
        """Refuse the scripts of other sites, which reach this machine through its user's browser."""
        host = self.headers.get("Host", "")
        if self.server.is_local and host.rpartition(":")[0] not in NAMES_OF_LOOPBACK:
            raise RefusedError(403, f"the host {host!r} is not this machine")
        if self.headers.get("Origin", f"http://{host}") != f"http://{host}":
            raise RefusedError(403, "requests of other sites are refused")

    def _check_body(self) -> int:
        length = self.headers.get("Content-Length", "")
        if not length.isascii() or not length.isdecimal():
            raise RefusedError(411, "the length of the image is missing")
        if int(length) > self.server.max_upload:
            size, most = int(length) / MEGABYTE, self.server.max_upload / MEGABYTE
            raise RefusedError(413, f"{size:.1f} MB are too much: at most {most:g} MB are taken (--max-upload)")
        return int(length)

    def _refuse(self, error: RefusedError) -> None:
        self.close_connection = True  # its body is not read
        self._send(error.status, {"error": str(error)})

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


def _number(asked: dict[str, list[str]], name: str, end: float) -> int:
    text = asked.get(name, ["0"])[0]
    if not (text.isascii() and text.isdecimal() and int(text) < end):
        raise RefusedError(400, f"{name} {text!r} is not a number below {end}")
    return int(text)


def _describe(models: Sequence[ServedModel], max_upload: int) -> Json:
    """The data of the page."""
    described = []
    for model in models:
        predictor = model.predictor
        classes = zip(predictor.classes.ids, predictor.classes.names, strict=True)
        named = [{"id": key, "name": name, "color": hex_color(label)} for label, (key, name) in enumerate(classes)]
        described.append({"name": model.name, "threshold": predictor.threshold, "classes": named})
    levels = [hex_color(level) for level in range(MOST_LEVELS)]
    return {"models": described, "levels": levels, "maxUpload": max_upload, "suffixes": SUFFIXES}


def _detections(model: ServedModel, content: bytes, name: str, with_pixels: bool) -> Json:
    """Boxes are [x, y, w, h, score, label, query]; the pixels are those that the model was given, scaled down for the page."""
    found = model.detect(content, name)
    low, high = found.detections.boxes_xyxy.double().split(2, dim=1)
    parts = low.tolist(), (high - low).tolist(), found.detections.scores.tolist(), found.detections.labels.tolist(), found.queries
    boxes = [[*corner, *sides, *rest] for corner, sides, *rest in zip(*parts, strict=True)]
    height, width = found.image.shape[1:]
    answer = {"size": [width, height], "seconds": found.seconds, "boxes": boxes}
    return answer | ({"image": embed_image(found.image)} if with_pixels else {})
