# SPDX-License-Identifier: Apache-2.0
"""Fetching public weights.

A file gets its name in the weights folder only after it was checked: against the hash in the table or, where none is published,
by reading it whole. Whatever happens to a connection, a disk or a process, half a file is therefore never
loaded. huggingface_hub and torch.hub transfer the files; `test_hub.py` tests downloads from the hub. After a failure, the next
attempt starts afresh.
"""

import contextlib
import errno
import hashlib
import os
import signal
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from unittest import mock

import torch
from forked import Forked
from nodes import wait_for

from cpvt_det.checkpoint import fetch
from cpvt_det.checkpoint.fetch import Place, Start, starts
from faults.case import Case, Cut, Ending, call

HOLD_ON = 20.0
"""Seconds that a server keeps silent for, unless it is stopped."""
FETCH = """
import os
from cpvt_det.checkpoint import fetch
from cpvt_det.checkpoint.fetch import Place, Start
os.environ[fetch.HOME] = {home!r}
print("begun", flush=True)
fetch.fetch(Start("tiny", places=(Place({url!r}),)))
raise SystemExit(0)
"""


class Server:
    """One file at several addresses, all of which but the first have something wrong.

    Attributes:
        content: the file.
        asked: paths that were asked for.
        done: event that ends the silence of a server.
    """

    def __init__(self, folder: Path):
        torch.save({"model": {"weight": torch.arange(50_000.0)}}, folder / "whole.pth")
        self.content, self.asked, self.done = (folder / "whole.pth").read_bytes(), [], threading.Event()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.asked.append(self.path)
                outer.answer(self, self.path.removeprefix("http://weights.invalid").split("/")[1])

            def log_message(self, *words: object) -> None:
                """Nothing."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, request: BaseHTTPRequestHandler, kind: str) -> None:
        content = b"<html>Please log in</html>" if kind == "page" else self.content
        request.send_response({"missing": 404, "moved": 302}.get(kind, 200))
        request.send_header("Content-Length", str(0 if kind in ("missing", "moved") else len(content)))
        if kind == "moved":
            request.send_header("Location", f"{self.url}/good/tiny.pth")
        request.end_headers()
        if kind in ("cut", "silent"):
            request.wfile.write(content[: len(content) // 2])
            request.wfile.flush()
            if kind == "silent":
                self.done.wait(HOLD_ON)
        elif kind not in ("missing", "moved"):
            request.wfile.write(content)


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Server]:
    server = Server(folder)
    threading.Thread(target=server.server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    with mock.patch.dict(os.environ, {fetch.HOME: str(folder / "home")}):
        try:
            yield server
        finally:
            server.done.set()
            server.server.shutdown()
            server.server.server_close()


def fetched(*kinds: str, known: bool = True, wrong: bool = False, after: Callable[[Server], object] = lambda server: None, **row):
    """Fetch a file that the table says is at these addresses; if that fails, nothing is left, and the next attempt succeeds.

    Args:
        kinds: first parts of the addresses.
        known: whether the table has the hash of the file.
        wrong: whether it is that of another one.
        after: what to do before.
        row: more of the table's row.
    """

    def run(folder: Path) -> Ending:
        with serving(folder) as server:
            sha256 = hashlib.sha256(server.content + b"!" * wrong).hexdigest() if known else ""
            start = Start("tiny", places=tuple(Place(f"{server.url}/{kind}/tiny.pth", sha256) for kind in kinds), **row)
            good = replace(start, places=(Place(f"{server.url}/good/tiny.pth", hashlib.sha256(server.content).hexdigest()),))
            after(server)
            with mock.patch.dict(starts(), {"tiny": start}):
                ending = call("weights", "tiny")
            path = fetch.path_of(good, good.places[0])
            left = {one.name for one in path.parent.glob("*")} - {f"{path.name}.lock"}
            if ending.code == 0:
                assert left == {path.name} and path.read_bytes() == server.content
            else:
                assert not left & {path.name, f"part-{path.name}"}, left
                os.environ[fetch.HOME] = str(folder / "home")
                with mock.patch.dict(starts(), {"tiny": good}):
                    assert call("weights", "tiny").code == 0
                assert fetch.path_of(good, good.places[0]).read_bytes() == server.content
        return ending

    return run


def full(server: Server) -> None:
    """The disk is full, once."""
    real = torch.hub.download_url_to_file

    def download(url: str, path: str, *more: object, **options: object) -> None:
        torch.hub.download_url_to_file = real
        Path(f"{path}.0.partial").write_bytes(server.content[:1000])
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    torch.hub.download_url_to_file = download


def elsewhere(folder: str) -> Callable[[Server], None]:
    def change(server: Server) -> None:
        os.environ[fetch.HOME] = folder

    return change


def silent(folder: Path) -> Ending:
    with mock.patch.object(fetch, "TIMEOUT", 0.2):
        return fetched("silent")(folder)


def refused(folder: Path) -> Ending:
    """Nobody listens at the port of a server that was stopped."""
    with serving(folder) as server:
        pass
    tiny = Start("tiny", places=(Place(f"{server.url}/good/tiny.pth", "0" * 64, 167),))
    with mock.patch.dict(os.environ, {fetch.HOME: str(folder / "home")}), mock.patch.dict(starts(), {"tiny": tiny}):
        return call("weights", "tiny")


def through_proxy(folder: Path) -> Ending:
    with serving(folder) as server, mock.patch.object(urllib.request, "_opener", None):
        place = Place("http://weights.invalid/good/tiny.pth", hashlib.sha256(server.content).hexdigest())
        with (
            mock.patch.dict(os.environ, {"http_proxy": server.url}),
            mock.patch.dict(starts(), {"tiny": Start("tiny", places=(place,))}),
        ):
            return call("weights", "tiny")


def two(folder: Path) -> Ending:
    """Two processes fetch the same file, of which the server sends the second half when both have begun."""
    with serving(folder) as server:
        real = server.answer

        def answer(request: BaseHTTPRequestHandler, kind: str) -> None:
            server.done.wait(HOLD_ON)
            real(request, "good")

        server.answer = answer
        home, url = str(folder / "home"), f"{server.url}/good/tiny.pth"
        both = [Forked(before=FETCH.format(home=home, url=url)) for _ in range(2)]
        try:
            wait_for(lambda: server.asked and all(process.stdout() == "begun\n" for process in both), what="both")
            time.sleep(0.3)
            server.done.set()
            codes = [process.wait(60) for process in both]
        finally:
            for process in both:
                process.end()
        assert codes == [0, 0] and Path(home, "tiny/tiny.pth").read_bytes() == server.content
        return Ending(0, f"requests: {len(server.asked)}")


def killed(folder: Path) -> Ending:
    """The process is killed when half of the file is there; what it leaves is removed by the next one."""
    with serving(folder) as server:
        home = folder / "home"
        process = Forked(before=FETCH.format(home=str(home), url=f"{server.url}/silent/tiny.pth"))
        try:
            wait_for(lambda: list(home.glob("tiny/*.partial")), what="half of a file")
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        finally:
            process.end()
        assert not (home / "tiny/tiny.pth").exists()
        with mock.patch.dict(starts(), {"tiny": Start("tiny", places=(Place(f"{server.url}/good/tiny.pth"),))}):
            ending = call("weights", "tiny")
        assert sorted(path.name for path in (home / "tiny").iterdir() if path.suffix != ".lock") == ["tiny.pth"]
        return ending


def by_hand(content: bytes | None, kind: str = "missing") -> Callable[[Path], Ending]:
    """A file that somebody put there, beside a server without it; ``None``: the right one."""

    def run(folder: Path) -> Ending:
        with serving(folder) as server:
            place = Place(f"{server.url}/{kind}/tiny.pth", hashlib.sha256(server.content).hexdigest())
            start = Start("tiny", places=(place,))
            path = fetch.path_of(start, place)
            path.parent.mkdir(parents=True)
            path.write_bytes(server.content if content is None else content)
            with mock.patch.dict(starts(), {"tiny": start}):
                ending = call("weights", "tiny")
            assert not server.asked
            return ending

    return run


FETCHED = "home/tiny/tiny.pth"
HASH = Cut("checkpoint/fetch.py", "str(part), place.sha256 or None,", "str(part), None,")
READ = Cut("checkpoint/fetch.py", "                read_checkpoint(part)\n", "                pass\n")
CAUGHT = Cut(
    "checkpoint/fetch.py",
    "        except Exception as error:  # those of two",
    "        except ZeroDivisionError as error:  # those of two",
)
CASES = [
    Case("a file that is fetched", fetched("good"), FETCHED, 0, guard="nothing is at fault"),
    Case("an address that leads to another", fetched("moved"), FETCHED, 0, guard="urllib follows it"),
    Case("a proxy", through_proxy, FETCHED, 0, guard="urllib asks it"),
    Case("a connection that is cut", fetched("cut"), "cannot fetch .../cut/tiny.pth: invalid hash value", guard=HASH),
    Case(
        "a connection that is cut, of a file whose hash is unknown",
        fetched("cut", known=False),
        "cannot fetch .../cut/tiny.pth: ...damaged, incomplete or not a checkpoint",
        guard=READ,
    ),
    Case(
        "a page in the place of a file, such as that of a hotel",
        fetched("page", known=False),
        "cannot fetch .../page/tiny.pth: ...damaged, incomplete or not a checkpoint",
        guard=READ,
    ),
    Case("another file than that of the table", fetched("good", wrong=True), "good/tiny.pth: invalid hash value", guard=HASH),
    Case("an address where nothing is", fetched("missing"), "cannot fetch .../missing/tiny.pth: HTTP Error 404", guard=CAUGHT),
    Case("an address where nothing is, before a copy", fetched("missing", "good"), FETCHED, 0, guard=CAUGHT),
    Case(
        "a server that falls silent",
        silent,
        "cannot fetch .../silent/tiny.pth: ...timed out",
        guard=Cut("checkpoint/fetch.py", "        socket.setdefaulttimeout(TIMEOUT)", "        socket.setdefaulttimeout(None)"),
    ),
    Case(
        "no network",
        refused,
        "cannot fetch http://127.0.0.1:.../good/tiny.pth: ...refused.... Without a network, download http://127.0.0.1:... (167 MB, "
        "SHA-256 0000...) on another machine and put it at .../tiny/tiny.pth; the environment variable CPVT_DET_WEIGHTS sets "
        "another folder",
        guard=CAUGHT,
    ),
    Case(
        "a disk that is full",
        fetched("good", after=full),
        "cannot fetch .../good/tiny.pth: ...No space left on device",
        guard=CAUGHT,
    ),
    Case(
        "a folder of weights that cannot be written to",
        fetched("good", after=elsewhere("/proc/weights")),
        "cannot fetch .../good/tiny.pth: ...put it at /proc/weights/tiny/tiny.pth; the environment variable CPVT_DET_WEIGHTS sets "
        "another folder",
        guard=CAUGHT,
    ),
    Case(
        "two processes at once",
        two,
        "requests: 1",
        0,
        guard=Cut("checkpoint/fetch.py", '    with FileLock(f"{path}.lock"):', "    with contextlib.nullcontext():"),
    ),
    Case(
        "killed in the middle",
        killed,
        FETCHED,
        0,
        guard=Cut("checkpoint/fetch.py", "            left.unlink()\n", "            pass\n"),
    ),
    Case("a file that was put there by hand, without a network", by_hand(None), FETCHED, 0, guard="it is looked for first"),
    Case(
        "another file that was put there by hand",
        by_hand(b"another"),
        "tiny.pth is not the file at .../missing/tiny.pth: its SHA-256 should be ...; remove it and try again",
        guard=Cut("checkpoint/fetch.py", "    if place.sha256 and sha256_of(path) != place.sha256:", "    if False:"),
    ),
    Case(
        "a name that is like one of public weights",
        lambda folder: call("predict", "dinor50", "--input", __file__, "--output", folder / "out"),
        "dinor50 is neither a weights file nor a name that cpvt-det weights lists (did you mean dino_r50?)",
        guard=Cut(
            "checkpoint/fetch.py",
            '    raise WeightsError(f"{text} is neither',
            '    return path\n    raise WeightsError(f"{text} is neither',
        ),
    ),
]
