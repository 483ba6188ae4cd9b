# SPDX-License-Identifier: Apache-2.0
"""Read the frames of videos, cameras and streams. They are decoded by PyAV, the package ``av``."""

import os
import re
import sys
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cpvt_det.common.errors import BadInputError, DataError, RunStoppedError, first_line
from cpvt_det.predict.detections import ImageDetections

SUFFIXES = (".mp4", ".m4v", ".mov", ".avi", ".mkv", ".webm", ".mpg", ".mpeg", ".wmv", ".flv", ".ts", ".3gp")
ADDRESS = re.compile(r"(rtsps?|rtmps?|https?|udp|tcp|srt)://", re.IGNORECASE)
CAMERAS = {"linux": ("v4l2", "/dev/video{}"), "darwin": ("avfoundation", "{}:none")}
"""Operating system -> the format and the name with which ffmpeg opens a camera by its number."""
MILLISECOND = Fraction(1, 1000)
SECONDS = 10.0
"""Seconds within which an address must answer, at the start and between two frames."""


class Frame(NamedTuple):
    """A frame of a video.

    Attributes:
        number: number of the frame in the video, from 0.
        time: time stamp in seconds, which increases from frame to frame. If the frame rate varies, it is the time at which the
            frame is shown.
        pixels: (3, H, W) uint8 RGB, upright.
    """

    number: int
    time: float
    pixels: Tensor


def is_film(source: str) -> bool:
    """Whether a word is a video, a camera's number or an address instead of an image, judged by its form or its suffix."""
    return not os.path.isdir(source) and bool(ADDRESS.match(source) or is_camera(source) or Path(source).suffix.lower() in SUFFIXES)


def is_camera(source: str) -> bool:
    """Whether a word is the number of a camera."""
    return source.isdecimal() and not os.path.exists(source)


class FilmReader:
    """The frames of a video, read on demand, so that videos of any length need little memory.

    Args:
        source: path of a video, number of a camera, or address that ffmpeg reads, such as ``rtsp://...``.
        every: interval of the frames: the first of every ``every`` frames is used.

    Attributes:
        rate: number of frames used per second, according to the video's header.
        expected: number of frames that will be used, according to the header; ``None`` if the header has no such number.

    Raises:
        BadInputError: ``every`` below 1; PyAV is not installed; a camera's number on a system other than Linux and macOS.
        DataError: a video that does not exist, cannot be opened or has no pictures; an address that does not answer.
    """

    def __init__(self, source: str | os.PathLike[str] | int, every: int = 1):
        if every < 1:
            raise BadInputError(f"every must be 1 or more frames, got {every}")
        self.source, self.every = str(source), every
        self._container = _open(self.source)
        if not (streams := self._container.streams.video):
            self.close()
            raise DataError(f"{self.source} contains no video")
        self._stream = streams[0]
        self._stream.thread_type = "AUTO"
        rate = float(self._stream.average_rate or self._stream.guessed_rate or 25)
        count = self._stream.frames or (self._container.duration or 0) * rate / 1e6  # in microseconds
        self.rate, self.expected = rate / every, (-(-int(count) // every) or None)

    def __iter__(self) -> Iterator[Frame]:
        """The frames.

        Raises:
            DataError: a video without frames.
            RunStoppedError: a video that breaks off; the error is raised after the last frame before that point.
        """
        av, step, number = _av(), 1 / (self.rate * self.every), -1
        last = -step
        try:
            for number, frame in enumerate(self._container.decode(self._stream)):
                time = frame.time if frame.time is not None and frame.time > last else last + step  # some frames have no time
                last = time
                if number % self.every == 0:
                    # Rotated as the video specifies, because phones may store videos turned by 90 degrees.
                    pixels = np.rot90(frame.to_ndarray(format="rgb24"), round(frame.rotation / 90))
                    yield Frame(number, time, torch.from_numpy(pixels.transpose(2, 0, 1).copy()))  # (H, W, 3) -> (3, H, W)
        except av.FFmpegError as error:
            if number < 0:
                raise DataError(f"{self.source}: no frame can be decoded ({first_line(error)})") from error
            raise RunStoppedError(
                f"{self.source} breaks off after frame {number}, at {last:.1f} s ({first_line(error)}); what was found so far is "
                "kept"
            ) from error
        finally:
            self.close()
        if number < 0:
            raise DataError(f"{self.source} contains no frames")

    def close(self) -> None:
        """Close the video or the camera."""
        self._container.close()


def _open(source: str) -> Any:
    """PyAV's container of a video, camera or stream."""
    av = _av()
    name, options = str(Path(source).expanduser()), {}
    if ADDRESS.match(source):
        name, options = source, {"timeout": (SECONDS, SECONDS)}
        options["options"] = {"rtsp_transport": "tcp"} if source.lower().startswith("rtsp") else {}
    elif is_camera(source):
        if sys.platform not in CAMERAS:
            raise BadInputError(
                f"camera {source}: a camera can be opened by its number only on Linux and macOS; give the address of a stream"
            )
        options["format"], pattern = CAMERAS[sys.platform]
        name = pattern.format(source)
    elif not os.path.isfile(name):
        raise DataError(f"there is no video {source}")
    try:
        return av.open(name, **options)
    except av.error.ExitError as error:
        raise DataError(f"{source} has not answered in {SECONDS:g} s") from error
    except (av.FFmpegError, OSError) as error:
        what = "camera " if is_camera(source) else ""
        raise DataError(f"cannot open {what}{source} as a video: {first_line(error)}") from error


def _av() -> Any:
    try:
        import av
    except ImportError as error:
        raise BadInputError("videos and cameras need PyAV: pip install 'cpvt-det[video]'") from error
    return av


class FilmWriter:
    """A writer of pictures with their times to an MP4 file; what has been written so far can always be played.

    Args:
        path: path of the file.
    """

    def __init__(self, path: Path):
        av = _av()
        # In fragments, so that an unfinished file can be played, and no index grows in memory.
        self._container = av.open(str(path), "w", options={"movflags": "frag_keyframe+empty_moov+default_base_moof"})
        self.path = path
        self._codec = "libx264" if "libx264" in av.codecs_available else "mpeg4"
        self._stream: Any = None
        self._start = self._last = 0

    def add(self, picture: Image.Image, time: float) -> None:
        """Write a picture that is shown from ``time`` on, in seconds. All pictures are scaled to the size of the first one.

        Raises:
            BadInputError: a file that cannot be written.
        """
        milliseconds = round(1000 * time)
        if self._stream is None:
            self._stream = self._container.add_stream(self._codec, rate=25, options={"crf": "23", "g": "50", "bf": "0"})
            self._stream.width, self._stream.height = (side + side % 2 for side in picture.size)  # H.264 needs even sides
            self._stream.pix_fmt, self._stream.codec_context.time_base = "yuv420p", MILLISECOND
            self._start, self._last = milliseconds, -1
        size = self._stream.width, self._stream.height
        frame = _av().VideoFrame.from_image(picture if picture.size == size else picture.resize(size))
        self._last = max(milliseconds - self._start, self._last + 1)
        frame.pts, frame.time_base = self._last, MILLISECOND
        self._write(frame)

    def close(self) -> None:
        """Write the remaining frames, and close the file."""
        if self._stream is not None:
            self._write(None)
        self._container.close()

    def _write(self, frame: Any) -> None:
        try:
            self._container.mux(self._stream.encode(frame))
        except (_av().FFmpegError, OSError) as error:
            raise BadInputError(f"cannot write {self.path}: {first_line(error)}; choose another folder") from error


class Tracks:
    """A tracker that gives objects ids across the frames of a video; it is called once per frame.

    Args:
        rate: frames per second.
        threshold: lowest score at which a new object gets an id; detections with lower scores only continue existing tracks.

    Raises:
        BadInputError: the package ``trackers`` is not installed.

    Source: ByteTrack (arXiv 2110.06864), with the defaults of ``trackers``.
    """

    def __init__(self, rate: float, threshold: float):
        try:
            from trackers import ByteTrackTracker
        except ImportError as error:
            raise BadInputError("--track needs the package trackers: pip install 'cpvt-det[track]'") from error
        self._tracker = ByteTrackTracker(frame_rate=rate, track_activation_threshold=threshold, high_conf_det_threshold=threshold)

    def __call__(self, found: ImageDetections) -> list[int | None]:
        """The id of each detection of the next frame; ``None`` for a detection that belongs to no track, or not yet."""
        given = found.to_supervision()
        given.data["index"] = np.arange(len(found))  # the answer may have a different order
        tracked = self._tracker.update(given)
        pairs = zip(tracked.data.get("index", ()), () if tracked.tracker_id is None else tracked.tracker_id, strict=True)
        ids = {int(index): int(number) for index, number in pairs if number >= 0}
        return [ids.get(index) for index in range(len(found))]
