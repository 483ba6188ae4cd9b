# SPDX-License-Identifier: Apache-2.0
"""The server of the page: what it finds is what the predictor finds, and what is wrong is a message; nothing is written."""

import contextlib
import fnmatch
import functools
import http.client
import io
import json
import os
import signal
import socket
import struct
import sys
import threading
import weakref
import zlib
from urllib.parse import urlsplit

import numpy as np
import pytest
from click.testing import CliRunner
from forked import Forked
from nodes import wait_for
from PIL import Image
from tiny import DEFORMABLE, DFINE, save_random

from cpvt_det import Predictor
from cpvt_det.cli import main
from cpvt_det.predict import served_model
from cpvt_det.predict.served_model import ServedModel
from cpvt_det.predict.server import PageServer

MOST = 300_000


@contextlib.contextmanager
def running(models, max_upload=MOST, host="127.0.0.1", names=()):
    """A server at a free port, in a thread."""
    with PageServer(host, 0, max_upload, names) as server:
        server.show(models)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    size = {"INPUT__MIN_SIZE_TEST": 64, "INPUT__MAX_SIZE_TEST": 96}
    return [save_random(folder / "detr.pth", **size), save_random(folder / "deformable.pth", **DEFORMABLE, **size)]


@pytest.fixture(scope="module")
def models(weights):
    return [ServedModel(Predictor.from_checkpoint(path, "cpu"), path.name) for path in weights]


@pytest.fixture(scope="module")
def server(models):
    with running(models) as started:
        yield started


written = []
"""Paths that this process makes, moves, removes or opens for writing, anywhere, by Python's events, which cannot be unhooked."""


def note_written(event, arguments):
    if (
        event == "open"
        and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
        and isinstance(arguments[0], str | bytes | os.PathLike)
    ):
        written.append(os.fspath(arguments[0]))
    elif event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.truncate"):
        written.append(arguments[0])


sys.addaudithook(note_written)


def ask(server, path, body=b"", method="POST", **headers):
    """Status and JSON of an answer."""
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=20)
    connection.request(method, path, body, {"Content-Type": "application/octet-stream", **headers})
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    return answer.status, json.loads(content) if answer.getheader("Content-Type") == "application/json" else content.decode()


def encoded(kind, size=(70, 50), mode="RGB", **options):
    """Bytes of an image file of noise; size is (width, height)."""
    pixels = np.random.default_rng(0).integers(0, 256, (size[1], size[0], 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, kind, **options)
    return file.getvalue()


TURNED = Image.Exif()
TURNED[0x0112] = 6
FILES = {
    "a.jpg": encoded("JPEG"),
    "turned.jpg": encoded("JPEG", exif=TURNED),
    "cmyk.jpg": encoded("JPEG", mode="CMYK"),
    "grey.png": encoded("PNG", mode="L"),
    "pixel.png": encoded("PNG", size=(1, 1)),
    "wide.tif": encoded("TIFF", size=(90, 20)),
}


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("number", [0, 1], ids=["detr", "deformable"])
def test_detections_are_those_of_the_predictor(server, models, tmp_path, name, number):
    (tmp_path / name).write_bytes(FILES[name])
    expected = models[number].predictor(tmp_path / name)
    status, answer = ask(server, f"/detect?model={number}&pixels=1&name={name}", FILES[name])
    assert status == 200
    assert answer["size"] == list(expected.image.shape[:0:-1])
    rows = [[*one["bbox"], one["score"], int(label)] for one, label in zip(expected.to_coco(1), expected.labels, strict=True)]
    assert [row[:6] for row in answer["boxes"]] == rows and rows
    assert answer["image"].startswith("data:image/jpeg;base64,")


def test_every_box_is_that_of_its_query(models):
    """With sigmoids a query may have several detections."""
    for model in models:
        found = model.detect(FILES["a.jpg"], "a.jpg")
        detector, record = model.predictor.detector, found.record
        batch = detector.preprocess([record.image])
        x, y, w, h = detector(batch.images, batch.padding_mask).boxes[-1][0][found.queries].detach().double().T.numpy()
        expected = np.stack([x - w / 2, y - h / 2, x + w / 2, y + h / 2]).clip(0, 1).T * [70, 50, 70, 50]
        assert np.abs(found.detections.boxes_xyxy.numpy() - expected).max() < 1e-3


def test_looks_share_out_the_attention(server):
    """Heat is in multiples of even attention, 1 on average; weights of points sum to 1; the reference is of the padded canvas."""
    _, heat = ask(server, "/look?model=0&query=3", FILES["a.jpg"])
    assert heat["kind"] == "heat" and len(heat["layers"]) == 2
    for layer in heat["layers"]:
        rows = np.array(layer["rows"])
        assert rows.shape == (8, 12) and rows.mean() == pytest.approx(1, abs=2e-3)  # 64 x 90 pixels, stride 8
        assert layer["corner"] == pytest.approx([12 * 8 * 70 / 90, 8 * 8 * 50 / 64])
    _, points = ask(server, "/look?model=1&query=3", FILES["a.jpg"])
    assert points["kind"] == "points" and len(points["strides"]) == 2
    for layer in points["layers"]:
        table = np.array(layer["points"])
        assert table.shape == (2 * 2 * 4, 4) and table[:, 2].sum() == pytest.approx(1, abs=1e-5)
        assert sorted(set(table[:, 3])) == [0, 1] and len(layer["reference"]) == 4


def test_looks_are_those_of_the_drawn_attention(models):
    """Points and references of every layer, by the functions that ``show attention`` draws with."""
    from cpvt_det.visualize.attention import look

    model = models[1]
    record = model.detect(FILES["a.jpg"], "a.jpg").record
    looks = model.looks(FILES["a.jpg"], "a.jpg", 2)["layers"]
    width, height = record.canvas[1] * 70 / 90, record.canvas[0] * 50 / 64
    for number, layer in enumerate(looks):
        locations, _, references = look(record, "decoder", number, [2])
        places = locations[0, 0].flatten(0, 2).numpy() * [width, height]
        assert np.abs(np.array(layer["points"])[:, :2] - places).max() < 1e-3
        assert np.abs(np.array(layer["reference"]) - references[0, 0, 0].numpy() * [width, height, width, height]).max() < 1e-3


def test_looks_of_levels_with_unequal_points(tmp_path):
    """As of D-FINE: the points that a level lacks have no weight."""
    path = save_random(tmp_path / "dfine.pth", **DFINE)
    model = ServedModel(Predictor.from_checkpoint(path, device="cpu"), "dfine")
    for layer in model.looks(FILES["a.jpg"], "a.jpg", 2)["layers"]:
        *_, weights, levels = np.array(layer["points"]).T
        assert [np.count_nonzero(weights[levels == level]) for level in (0, 1)] == [2 * 2, 2 * 3] and sum(weights) == pytest.approx(
            1
        )


def png_header(width, height):
    """A PNG of a size that nobody could hold, in a few bytes."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    end = b"IEND" + struct.pack(">I", zlib.crc32(b"IEND"))
    return b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk)) + bytes(4) + end


WRONG = [
    ("/detect?model=0&name=text.jpg", b"not an image\n" * 9, {}, 422, "cannot read image text.jpg: it is not an image*"),
    ("/detect?model=0&name=half.jpg", FILES["a.jpg"][:900], {}, 422, "cannot read image half.jpg: *"),
    ("/detect?model=0&name=empty.jpg", b"", {}, 422, "cannot read image empty.jpg: it is empty (0 bytes)"),
    (
        "/detect?model=0&name=bomb.png",
        png_header(9000, 8000),
        {},
        422,
        "bomb.png has 9000 x 8000 pixels; the limit is 64 million",
    ),
    ("/detect?model=0&name=bomb.png", png_header(60000, 60000), {}, 422, "cannot read image bomb.png: *"),
    ("/detect?model=0", bytes(MOST + 1), {}, 413, "0.3 MB are too much: at most 0.3 MB are accepted (--max-upload)"),
    ("/detect?model=0", b"", {"Content-Length": "-5"}, 411, "the length of the image is missing"),
    ("/detect?model=2", FILES["a.jpg"], {}, 400, "model '2' is not a valid number"),
    ("/look?model=0&query=x", FILES["a.jpg"], {}, 400, "query 'x' is not a valid number"),
    (f"/look?model=0&query={5000 * '1'}", FILES["a.jpg"], {}, 400, "query '111111111111111111' is not a valid number"),
    ("/detect?model=0", b"", {"Content-Length": 5000 * "1"}, 411, "the length of the image is missing"),
    ("/look?model=0&query=6", FILES["a.jpg"], {}, 422, "query 6 does not exist; this model has queries 0 to 5"),
    ("/detect/../../etc/passwd", b"", {}, 404, "the only requests are /detect and /look"),
    (
        "/detect?model=0",
        FILES["a.jpg"],
        {"Host": "evil.example:80"},
        403,
        "the host 'evil.example' is not allowed here; *serve --allow-host adds host names",
    ),
    ("/detect?model=0", FILES["a.jpg"], {"Host": "[::1"}, 403, "the host '' is not allowed here; *"),
    ("/detect?model=0", FILES["a.jpg"], {"Origin": "null"}, 403, "requests from other sites are refused"),
    ("/detect?model=0", FILES["a.jpg"], {"Origin": "http://evil.example"}, 403, "requests from other sites are refused"),
]


@pytest.mark.parametrize(("path", "body", "headers", "status", "message"), WRONG, ids=[row[4] for row in WRONG])
def test_what_is_wrong_is_a_message_and_nothing_is_written(server, path, body, headers, status, message):
    ask(server, "/detect?model=0", FILES["a.jpg"])  # what is compiled at first use may be kept
    written.clear()
    found, answer = ask(server, path, body, **headers)
    assert found == status and fnmatch.fnmatchcase(answer["error"], message)
    assert ask(server, "/detect?model=0", FILES["a.jpg"])[0] == 200  # and it still serves
    assert written == []


def test_a_file_that_is_written_would_be_seen(tmp_path):
    written.clear()
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "file").write_bytes(b"")
    assert [str(path) for path in written] == [str(tmp_path / "folder"), str(tmp_path / "folder" / "file")]


@pytest.mark.parametrize(
    "headers",
    [
        {"Host": "127.0.0.2:8765"},
        {"Host": "192.168.1.7:8765", "Origin": "http://192.168.1.7:8765"},
        {"Host": "[::1]:8765", "Origin": "http://[::1]:8765"},
        {"Host": "localhost", "Origin": "http://localhost"},  # port 80
        {"Host": "Cells.example", "Origin": "https://cells.example"},  # a proxy with TLS that hands the name on
        {"Host": "127.0.0.1:8765", "Origin": "https://cells.example"},  # nginx as it comes, which does not
    ],
    ids=str,
)
def test_addresses_and_allowed_names_are_answered(proxied, headers):
    assert ask(proxied, "/detect?model=0", FILES["a.jpg"], **headers)[0] == 200


@pytest.fixture(scope="module")
def proxied(models):
    """A server that listens at every address of the machine, and is known under a name."""
    with running(models[:1], host="0.0.0.0", names=["cells.example"]) as started:
        yield started


@pytest.mark.parametrize(
    "headers", [{"Host": "evil.example"}, {"Host": "cells.example", "Origin": "https://evil.example"}], ids=str
)
def test_at_every_address_other_names_are_refused_too(proxied, headers):
    """A site whose name leads to this machine (DNS rebinding) is no other origin to the browser."""
    assert ask(proxied, "/detect?model=0", FILES["a.jpg"], **headers)[0] == 403


@pytest.mark.parametrize(("host", "url"), [("127.0.0.2", "http://127.0.0.2:"), ("::1", "http://[::1]:")])
def test_every_address_of_the_loopback_serves(models, monkeypatch, host, url):
    """At once: the machine's full name is not looked up, which takes seconds on some."""
    with contextlib.suppress(OSError), socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET):
        monkeypatch.setattr(socket, "getfqdn", None)
        with running(models[:1], host=host) as server:
            assert server.url.startswith(url) and server.is_local
            origin = server.url.rstrip("/")
            assert ask(server, "/detect?model=0", FILES["a.jpg"], Origin=origin)[0] == 200
        return
    pytest.skip(f"this machine has no address {host}")


@pytest.mark.parametrize("path", ["/../../../etc/passwd", "//etc/passwd", "/%2e%2e/setup.py", "/style.css"])
def test_no_file_can_be_fetched(server, path):
    assert ask(server, path, method="GET") == (404, {"error": "the only page is /"})


def test_a_hundred_megabytes_are_refused_before_they_are_sent(server):
    with socket.create_connection(server.server_address, timeout=20) as connection:
        head = "POST /detect?model=0 HTTP/1.1\r\nHost: localhost:1\r\nContent-Length: 100000000\r\n\r\n"
        connection.sendall(head.encode())
        answer = connection.makefile("rb").read().decode()
    assert answer.startswith("HTTP/1.0 413") and "100.0 MB are too much: at most 0.3 MB are accepted" in answer


def test_the_last_images_are_remembered_and_no_more(models, monkeypatch):
    model, runs = ServedModel(models[0].predictor, "again"), []
    run = ServedModel._run
    monkeypatch.setattr(ServedModel, "_run", lambda self, image: runs.append(1) or run(self, image))
    model.passes = functools.lru_cache(2)(model.passes.__wrapped__)
    contents = [encoded("PNG", size=(side, 30)) for side in (20, 30, 40)]
    for content in (*contents[:2], contents[0], contents[2], contents[0], contents[1]):
        model.detect(content, "x.png")
    assert len(runs) == 4  # the three, and the second again, which was the longest ago
    model.looks(contents[1], "x.png", 0)
    assert len(runs) == 4


def test_the_pixels_of_an_image_are_not_kept(models, monkeypatch):
    read, pixels = served_model._read, []

    def keep_weakly(*arguments):
        image = read(*arguments)
        pixels.append(weakref.ref(image.untyped_storage()))
        return image

    monkeypatch.setattr(served_model, "_read", keep_weakly)
    found = ServedModel(models[0].predictor, "again").detect(encoded("PNG", size=(300, 200)), "x.png")
    assert found.size == (200, 300) and len(pixels) == 1 and pixels[0]() is None


def test_the_page_holds_the_models(server):
    status, page = ask(server, "/", method="GET")
    assert status == 200 and '"name":"detr.pth"' in page and '"name":"deformable.pth"' in page
    assert 'src="' not in page.partition('id="data">')[0]


@pytest.mark.parametrize(("system", "shared"), [("linux", 1), ("win32", 0)])
def test_a_port_is_not_shared_on_windows(monkeypatch, system, shared):
    """SO_REUSEADDR is there what lets two servers have one port; elsewhere it lets the next one start at once."""
    monkeypatch.setattr("cpvt_det.predict.server.sys.platform", system)
    with PageServer("127.0.0.1", 0, MOST) as server:
        assert server.socket.getsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR) == shared


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["a.pth", "b.pth"], "at most 2 models are shown side by side, got 3"),
        (["--port", "99999"], "cannot listen on 127.0.0.1:99999: "),
        (["--host", "no.such.host.invalid"], "cannot listen on no.such.host.invalid:8765: "),
        (
            ["--allow-host", "https://a.example"],
            "'https://a.example' is not a host name; --allow-host takes one without http://",
        ),
        (["--allow-host", "a.example:80"], "'a.example:80' is not a host name"),
    ],
)
def test_words_that_cannot_be_served(tmp_path, words, message):
    """They are refused before weights are read."""
    result = CliRunner().invoke(main, ["serve", str(tmp_path / "none.pth"), "--device", "cpu", *words])
    assert result.exit_code == 2 and f"error: {message}" in result.output


def test_a_port_in_use_is_found_before_weights_are_read(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        result = CliRunner().invoke(main, ["serve", str(tmp_path / "none.pth"), "--port", port])
    assert result.exit_code == 2 and f"error: cannot listen on 127.0.0.1:{port}: " in result.output


def test_the_command_serves_until_it_is_interrupted(weights):
    process = Forked("serve", weights[1], "--port", "0", "--device", "cpu")
    try:
        wait_for(lambda: "\n" in process.stdout(), what="the address")
        address = urlsplit(process.stdout().split(": ")[1].split()[0])
        assert address.hostname == "127.0.0.1"
        connection = http.client.HTTPConnection(address.hostname, address.port, timeout=20)
        connection.request("GET", "/")
        assert connection.getresponse().status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(100) == 130
    finally:
        process.end()
