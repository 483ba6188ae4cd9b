# SPDX-License-Identifier: Apache-2.0
"""Films: the frames of any film as images, with their times; what is written, also of one that breaks off; bad input."""

import contextlib
import json
import socket
import struct
import sys
from fractions import Fraction

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from PIL import Image

from cpvt_det import Predictor
from cpvt_det.cli import main
from cpvt_det.common.errors import BadInputError, DataError, RunStoppedError
from cpvt_det.predict import films
from cpvt_det.predict.films import FilmReader, FilmWriter, is_film

av = pytest.importorskip("av", reason="films need av: pip install 'cpvt-det[video]'")


@pytest.fixture(scope="module")
def run(tiny_run):
    return tiny_run("detr")


def picture(number, size=(64, 48)):
    """Blocks of colours that differ from frame to frame."""
    generator = np.random.default_rng(number)
    return Image.fromarray(generator.integers(0, 255, (4, 6, 3), dtype=np.uint8)).resize(size, Image.Resampling.NEAREST)


def write_film(path, count=7, size=(64, 48), times=None, codec="mpeg4"):
    """A film of ``count`` pictures, at 10 frames per second or at these times in milliseconds."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=10, options={"g": "1"})
        stream.width, stream.height, stream.pix_fmt = *size, "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for number in range(count):
            frame = av.VideoFrame.from_image(picture(number, size))
            frame.pts, frame.time_base = (100 * number if times is None else times[number]), Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def test_a_film_is_not_overwritten_by_its_own_pictures(run, tmp_path):
    film = write_film(tmp_path / "film.mp4")
    before = film.read_bytes()
    words = ["predict", run.weights, "--input", film, "--output", tmp_path, "--device", "cpu"]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 2 and "film.mp4 would be overwritten; choose another output folder" in result.stderr
    assert film.read_bytes() == before


def write_sound(path, seconds=1):
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_s16le", rate=8000, layout="mono")
        frame = av.AudioFrame.from_ndarray(np.zeros((1, 8000 * seconds), np.int16), format="s16", layout="mono")
        frame.sample_rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def lines(folder):
    return [json.loads(line) for line in (folder / "frames.jsonl").read_text().splitlines()]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("film.MP4", True),
        ("0", True),
        ("rtsp://host/one", True),
        ("HTTP://host/a", True),
        ("photo.jpg", False),
        ("photos", False),
        ("photos/*.png", False),
        ("clip.gif", False),
    ],
)
def test_a_film_is_told_by_its_name(word, expected):
    assert is_film(word) == expected


def test_a_folder_with_the_name_of_a_number_is_no_camera(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "7").mkdir()
    assert not is_film("7") and is_film("8")


def test_a_folder_of_frames_with_the_name_of_their_film_is_no_film(run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").mkdir()
    picture(0).save(tmp_path / "clip.mp4/0.png")
    words = ["predict", run.weights, "--input", "clip.mp4", "--output", "out", "--device", "cpu"]
    result = CliRunner().invoke(main, [str(word) for word in words])
    assert result.exit_code == 0 and "out: 1 image" in result.stdout, result.output


def test_boxes_of_frames_are_those_of_the_same_frames_as_images(run, tmp_path):
    """Alone and in batches, of which the last is not full; every second frame has its own number and time."""
    predictor = Predictor.from_checkpoint(run.weights, device="cpu")
    film = write_film(tmp_path / "film.mp4")
    with av.open(str(film)) as container:
        images = [frame.to_image() for frame in container.decode(video=0)]
    expected = predictor(images)
    found = list(predictor.stream(film))
    assert [(one.number, round(one.time, 3)) for one in found] == [(number, number / 10) for number in range(7)]
    for one, alone in zip(found, expected, strict=True):
        for name in ("boxes_xyxy", "scores", "labels"):
            assert torch.equal(getattr(one.detections, name), getattr(alone, name))
    some = list(predictor.stream(str(film), every=2, batch_size=3))
    assert [one.number for one in some] == [0, 2, 4, 6]
    for one in some:
        torch.testing.assert_close(one.detections.scores, expected[one.number].scores, rtol=0, atol=1e-5)
        assert torch.equal(one.detections.image, found[one.number].detections.image)


def test_the_command_writes_a_film_with_boxes_and_a_line_for_each_frame(run, tmp_path):
    film = write_film(tmp_path / "film.mkv", times=[0, 40, 50, 300, 310, 1000, 1500])
    result = call(
        "predict", run.weights, "--input", film, "--output", tmp_path / "out", "--threshold", 0, "--every", 2, "--batch", 3
    )
    assert result.exit_code == 0, result.output
    assert (
        f"{tmp_path}/out: 4 frames, 24 detections with score >= 0, " in result.stdout
        and " frames/s; the best score" in result.stdout
    )
    rows = lines(tmp_path / "out")
    assert [(row["frame"], row["time"], len(row["detections"])) for row in rows] == [
        (0, 0, 6),
        (2, 0.05, 6),
        (4, 0.31, 6),
        (6, 1.5, 6),
    ]
    assert set(rows[0]["detections"][0]) == {"category_id", "name", "bbox", "score"}
    with av.open(str(tmp_path / "out/film.mp4")) as container:
        frames = list(container.decode(video=0))
    assert [round(frame.time, 3) for frame in frames] == [0, 0.05, 0.31, 1.5]
    predictor = Predictor.from_checkpoint(run.weights, device="cpu")
    drawn = np.array(next(predictor.stream(film)).detections.draw(), dtype=int)
    assert frames[0].height == drawn.shape[0] and np.abs(frames[0].to_ndarray(format="rgb24") - drawn).mean() < 12


def test_frames_of_odd_sizes_are_read_and_written(tmp_path):
    film = write_film(tmp_path / "odd.avi", count=2, size=(65, 49), codec="mjpeg")
    frames = list(FilmReader(film))
    assert [tuple(frame.pixels.shape) for frame in frames] == [(3, 49, 65)] * 2
    writer = FilmWriter(tmp_path / "out.mp4")
    for frame in frames:
        writer.add(Image.fromarray(frame.pixels.permute(1, 2, 0).numpy()), frame.time)
    writer.close()
    assert [tuple(frame.pixels.shape) for frame in FilmReader(tmp_path / "out.mp4")] == [(3, 50, 66)] * 2


@pytest.mark.parametrize(("matrix", "turns"), [((0, 1, -1, 0), -1), ((-1, 0, 0, -1), 2), ((0, -1, 1, 0), 1)])
def test_a_film_of_a_phone_is_turned_upright(tmp_path, matrix, turns):
    """The matrix of the track's header, as phones write it: (0, 1, -1, 0) is a quarter to the right."""
    content = bytearray(write_film(tmp_path / "film.mp4", count=2).read_bytes())
    (flat,) = (frame.pixels for frame in list(FilmReader(tmp_path / "film.mp4"))[:1])
    start = content.index(b"tkhd") + 4 + 40
    a, b, c, d = (int(value * 65536) for value in matrix)
    assert struct.unpack(">2i", content[start : start + 8]) == (65536, 0)
    content[start : start + 36] = struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30)
    (tmp_path / "phone.mp4").write_bytes(content)
    turned = next(iter(FilmReader(tmp_path / "phone.mp4"))).pixels
    assert torch.equal(turned, torch.rot90(flat, turns, (1, 2)))


def test_memory_does_not_grow_with_the_film(tmp_path):
    """Forty frames are read one by one, and none is kept."""
    film = write_film(tmp_path / "film.mkv", count=40)
    reader = FilmReader(film)
    assert reader.expected in (None, 40) and reader.rate == pytest.approx(10)
    alive = []
    for frame in reader:
        alive.append(sys.getrefcount(frame.pixels))
        del frame
    assert alive == [alive[0]] * 40


def test_a_film_that_breaks_off_leaves_what_was_found(run, tmp_path, monkeypatch):
    """The last frames of a batch that is not full among it; the written film can be played."""
    reader, count = FilmReader.__iter__, 5

    def broken(self):
        for number, frame in enumerate(reader(self)):
            if number == count:
                raise RunStoppedError(f"{self.source} breaks off after frame {number - 1}")
            yield frame

    monkeypatch.setattr(FilmReader, "__iter__", broken)
    words = ["--output", tmp_path / "out", "--batch", 3, "--threshold", 0.5]
    result = call("predict", run.weights, "--input", write_film(tmp_path / "film.mp4"), *words)
    assert result.exit_code == 1
    assert result.output.strip().splitlines()[-1] == f"stopped: {tmp_path}/film.mp4 breaks off after frame 4"
    assert [row["frame"] for row in lines(tmp_path / "out")] == [0, 1, 2, 3, 4]
    assert len(list(FilmReader(tmp_path / "out/film.mp4"))) == 5


def test_a_film_that_is_shorter_than_its_header_promises_is_told(run, tmp_path):
    """A decoder raises nothing where a Matroska file was cut off."""
    film = write_film(tmp_path / "film.mkv", count=20)
    words = ["predict", run.weights, "--output", tmp_path / "out", "--threshold", 0.5, "--every", 2, "--input"]
    whole = call(*words, film)
    assert whole.exit_code == 0 and "incomplete" not in whole.output, whole.output
    film.write_bytes(film.read_bytes()[: film.stat().st_size // 2])
    result = call(*words, film)
    assert result.exit_code == 0 and len(lines(tmp_path / "out")) < 9, result.output
    assert f"{film} may be incomplete: by its header, about 10 frames were expected" in result.stderr


class Decoded:
    """A stand-in for PyAV's container: frames, then what it raises."""

    def __init__(self, frames, error=None):
        self.frames, self.error = frames, error

    def decode(self, stream):
        yield from self.frames
        if self.error:
            raise self.error

    def close(self):
        pass


def test_errors_of_decoding_say_where(tmp_path):
    film = write_film(tmp_path / "film.mp4")
    with av.open(str(film)) as container:
        frames = list(container.decode(video=0))
    error = av.error.InvalidDataError(1, "Invalid data found when processing input", "film.mp4")
    for given, kind, said in (
        (frames[:3], RunStoppedError, r"breaks off after frame 2, at 0\.2 s \(.*Invalid data.*\); what was found so far is kept"),
        ([], DataError, r"film\.mp4: no frame can be decoded \(.*Invalid data"),
    ):
        reader = FilmReader(film)
        reader._container = Decoded(given, error)
        with pytest.raises(kind, match=said):
            list(reader)
    reader = FilmReader(film)
    reader._container = Decoded([])
    with pytest.raises(DataError, match="contains no frames"):
        list(reader)


def test_frames_without_times_get_those_of_the_rate(tmp_path):
    film = write_film(tmp_path / "film.mp4")
    with av.open(str(film)) as container:
        frames = list(container.decode(video=0))
    for frame in frames[3:]:
        frame.pts = None
    frames[2].pts = 0  # goes back
    for given, count in ((frames, 7), (frames[3:], 4)):
        reader = FilmReader(film)
        reader._container = Decoded(given)
        assert [round(frame.time, 3) for frame in reader] == [number / 10 for number in range(count)]


def test_a_truncated_film_is_read_up_to_its_end_or_refused(tmp_path):
    """What has its index at the end, an MP4, cannot be opened; a Matroska film gives the frames that it has."""
    content = write_film(tmp_path / "film.mp4").read_bytes()
    (tmp_path / "half.mp4").write_bytes(content[: len(content) // 2])
    with pytest.raises(DataError, match=r"cannot open .*half\.mp4 as a video: .*Invalid data"):
        FilmReader(tmp_path / "half.mp4")
    content = write_film(tmp_path / "film.mkv", count=20).read_bytes()
    (tmp_path / "half.mkv").write_bytes(content[: len(content) // 2])
    found = []
    with contextlib.suppress(RunStoppedError):  # some versions of the decoder see that the end is missing
        for frame in FilmReader(tmp_path / "half.mkv"):
            found.append(frame.number)
    assert 0 < len(found) < 15


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("none.mp4", "there is no video {path}"),
        ("text.mp4", "cannot open {path} as a video: "),
        ("empty.mp4", "cannot open {path} as a video: "),
        ("sound.mkv", "{path} contains no video"),
    ],
)
def test_what_is_no_film_is_refused_in_one_line(run, tmp_path, name, said):
    (tmp_path / "text.mp4").write_text("no film " * 100)
    (tmp_path / "empty.mp4").write_bytes(b"")
    write_sound(tmp_path / "sound.mkv")
    result = call("predict", run.weights, "--input", tmp_path / name, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert result.output.strip().splitlines()[-1].startswith("error: " + said.format(path=tmp_path / name))
    assert not (tmp_path / "out").exists()


def test_an_address_that_does_not_answer_is_named(monkeypatch):
    """One that refuses, at once; one that takes the connection and is silent, after the time limit."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(DataError, match=rf"cannot open rtsp://127.0.0.1:{port}/one as a video: .*refused"):
        FilmReader(f"rtsp://127.0.0.1:{port}/one")
    monkeypatch.setattr(films, "SECONDS", 0.5)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/one.mp4"
        with pytest.raises(DataError, match=rf"{address} has not answered in 0.5 s"):
            FilmReader(address)


def test_a_camera_that_is_not_there_is_named(monkeypatch):
    for camera in ("77", 77):
        with pytest.raises(DataError, match="cannot open camera 77 as a video: "):
            FilmReader(camera)
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(
        BadInputError, match="camera 77: a camera can be opened by its number only on Linux and macOS; give the address"
    ):
        FilmReader("77")


def test_options_of_films_are_checked(run, tmp_path):
    film = write_film(tmp_path / "film.mp4", count=2)
    with pytest.raises(BadInputError, match="every must be 1 or more frames, got 0"):
        FilmReader(film, every=0)
    result = call("predict", run.weights, "--input", run.image(7), "--every", 2, "--output", tmp_path / "out")
    assert result.exit_code == 2 and "--track and --every are for videos, and" in result.output
    (tmp_path / "file").write_text("")
    result = call("predict", run.weights, "--input", film, "--output", tmp_path / "file")
    assert result.exit_code == 2 and f"cannot write to {tmp_path}/file: " in result.output
    writer = FilmWriter(tmp_path / "nowhere/film.mp4")
    with pytest.raises(BadInputError, match=r"cannot write .*film\.mp4: .*; choose another"), contextlib.closing(writer):
        writer.add(picture(0), 0.0)


def test_a_missing_package_is_named_with_the_way_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(BadInputError, match=r"videos and cameras need PyAV: pip install 'cpvt-det\[video\]'"):
        FilmReader("film.mp4")
