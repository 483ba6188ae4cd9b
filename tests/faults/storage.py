# SPDX-License-Identifier: Apache-2.0
"""Data: tar files, URLs and mounts.

A batch from tar files or a URL equals the batch from a folder, bit for bit. During a run, a missing image is retried for
`DATALOADER.PATIENCE` seconds. The check before a run waits 30 seconds in total for a mount or server that returns errors.
"""

import contextlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import torch

from cpvt_det.cli.pack import write_shards
from cpvt_det.data.shards import INDEX
from cpvt_det.solver.step import TrainStep
from faults.case import Case, Cut, Ending
from faults.checkpoints import SHORT
from faults.drawn import DataCase, Drawn, call_on, draw
from faults.images import CANNOT, FINE

ALL = (1, 2, 3, 4)


def packed(change: Callable[[Path], object], images: tuple[int, ...] = ALL) -> Callable[[Drawn], None]:
    """The images in one tar file, after a change."""

    def make(drawn: Drawn) -> None:
        folder = drawn.folder / "shards"
        folder.mkdir()
        root = write_shards([(f"{number}.png", str(drawn.path(number))) for number in images], folder, 10**6)
        drawn.words["DATASETS__REGISTER"] = [["drawn", str(drawn.files.annotations), root]]
        change(folder)

    return make


def halve(folder: Path) -> None:
    path = folder / "000000.tar"
    os.truncate(path, path.stat().st_size // 2)


def behind(url: str) -> Callable[[Drawn], None]:
    """Images at a URL."""

    def make(drawn: Drawn) -> None:
        drawn.words["DATASETS__REGISTER"] = [["drawn", str(drawn.files.annotations), url]]

    return make


def gone(seconds: float, patience: float) -> Callable[[Path], Ending]:
    """Train, while the folder of the images is away from the second step on; the weights are those of a folder that stays."""
    real = TrainStep.__call__

    def run(folder: Path) -> Ending:
        drawn = draw(folder / "data", lambda _: None)
        root, away = drawn.files.image_root, drawn.folder / "away"

        def come_back() -> None:
            with contextlib.suppress(FileNotFoundError):  # the test is over
                away.rename(root)

        def step(self: TrainStep, samples: list, iteration: int) -> dict:
            if iteration == 1:
                root.rename(away)
                threading.Timer(seconds, come_back).start()
            return real(self, samples, iteration)

        more = {**SHORT, "SOLVER__MAX_ITER": 4, "DATASETS__TEST": (), "DATALOADER__PATIENCE": patience}
        call_on(drawn, "train", **more, OUTPUT_DIR=folder / "unhurt")
        with mock.patch.object(TrainStep, "__call__", step):
            ending = call_on(drawn, "train", **more)
        if ending.code == 0:
            one, two = (torch.load(folder / name / "model_final.pth", weights_only=True)["model"] for name in ("unhurt", "out"))
            assert all(torch.equal(one[key], two[key]) for key in one)
        return ending

    return run


PATIENT = Cut("data/loader.py", "Patience(self.patience)", "Patience(0)")

CASES = [
    DataCase("images in a tar file", packed(lambda folder: None), FINE, 0, guard="nothing is at fault"),
    DataCase("a tar file without an index", packed(lambda folder: (folder / INDEX).unlink()), FINE, 0, guard="it is searched"),
    DataCase(
        "a tar file that is cut off",
        packed(halve),
        f"{CANNOT}1.png: .../000000.tar has ... bytes instead of ...: it is cut off, or newer than its index.npz".replace(
            "images/", "{000000..000000}.tar/"
        ),
        guard=Cut("data/shards.py", "if length != self.lengths[shard]:", "if False:"),
    ),
    DataCase(
        "an index of tar files that is cut off",
        packed(lambda folder: os.truncate(folder / INDEX, 300)),
        "image files that cannot be read: 4...image 1: cannot read image ...1.png: .../index.npz is damaged: ",
        guard=Cut("data/shards.py", "except (ValueError, KeyError, EOFError, zipfile.BadZipFile)", "except ZeroDivisionError"),
    ),
    DataCase(
        "an image that is in no tar file",
        packed(lambda folder: None, ALL[1:]),
        "image files that are missing: ...image 1: cannot read image ...1.png: it is in none of the 1 tar files",
        guard=Cut("data/shards.py", "if row == len(self.keys) or self.keys[row] != key:", "if False:"),
    ),
    DataCase(
        "a tar file that is missing",
        packed(lambda folder: [path.unlink() for path in folder.iterdir()]),
        "image files that are missing: 4...image 1: cannot read image ...1.png: there is no .../000000.tar",
        guard=Cut("data/shards.py", "except FileNotFoundError as error:", "except ZeroDivisionError as error:"),
    ),
    DataCase(
        "a URL of a kind that fsspec does not know",
        behind("nowhere://images"),
        "image files that cannot be read: 4...image 1: cannot read image nowhere://images/1.png: Protocol not known: nowhere",
        guard=Cut("data/storage.py", "except (ImportError, ValueError) as error:", "except ZeroDivisionError as error:"),
    ),
    DataCase(
        "a URL where nothing is",
        behind("memory://nowhere"),
        "image files that are missing: 4...image 1: cannot read image memory://nowhere/1.png: no such file",
        guard=Cut("data/images.py", "except FileNotFoundError as error:", "except ZeroDivisionError as error:"),
    ),
    Case(
        "mount gone for 10 seconds",
        gone(10, 60),
        "cannot read image .../images/...png: no such file; trying again for 60 s",
        0,
        guard=PATIENT,
    ),
    Case(
        "mount gone for longer than DATALOADER.PATIENCE",
        gone(10, 1),
        "error: cannot read image .../images/...png: no such file",
        guard=Cut("data/storage.py", "return time.monotonic() + PAUSE > self._end", "return False"),
    ),
]
