# SPDX-License-Identifier: Apache-2.0
"""Looking inside: ``show`` and ``analyze``."""

from collections.abc import Callable
from pathlib import Path

import torch
from PIL import Image
from tiny import DEFORMABLE, random_config, save_random

from faults.case import Case, Cut, Ending, call
from faults.checkpoints import DAMAGED, NO_FILE, SHAPES
from faults.configs import NEVER, NO_CONFIG, UNKNOWN_KEY
from faults.drawn import call_on, draw


def attention(*words: object, weights: str = "model.pth", image: str = "image.png", **more: object) -> Callable[[Path], Ending]:
    """``cpvt-det show attention`` with an untrained detector and an image of 60 x 40 pixels."""

    def run(folder: Path) -> Ending:
        save_random(folder / "model.pth", **more)
        torch.save({"model": {"layer.weight": torch.ones(2)}}, folder / "other.pth")
        Image.new("RGB", (60, 40), "red").save(folder / "image.png")
        places = ["--input", folder / image, "--output", folder / "out"]
        return call("show", "attention", folder / weights, *places, *(str(word).format(folder=folder) for word in words))

    return run


def with_config(*command: str, options: tuple[str, ...] = (), **more: object) -> Callable[[Path], Ending]:
    """A command of configs, with the smallest one as the file FILE."""

    def run(folder: Path) -> Ending:
        (folder / "empty").mkdir()
        (folder / "run.yaml").write_text(random_config(**more).dump(), encoding="utf-8")
        words = [word.replace("FILE", str(folder / "run.yaml")) for word in command]
        return call(*words, *(word.format(folder=folder) for word in options))

    return run


def position(*options: str, **more: object) -> Callable[[Path], Ending]:
    return with_config("show", "position", "FILE", "--output", "FILE.out", options=options, **more)


def analyze(*options: str, **more: object) -> Callable[[Path], Ending]:
    return with_config("analyze", "--config-file", "FILE", "--runner", "builtin", options=options, **more)


def data(*words: object, **more: object) -> Callable[[Path], Ending]:
    """``cpvt-det show data`` on a drawn data set."""
    return lambda folder: call_on(draw(folder / "data", lambda _: None), "show", "data", "--output", folder / "out", *words, **more)


def none_matches(option: str, file: str = "cli/show.py") -> Cut:
    """The text of an option is taken, whatever it is."""
    refusal = f'        raise BadInputError(f"--{option}'
    return Cut(file, f")) is None:\n{refusal}", f")) is False:\n{refusal}")


LEVEL = Cut("visualize/recording.py", "if not 0 <= level < levels:", "if False:")

CASES = [
    Case(
        "show attention: no such image",
        attention(image="nowhere.jpg"),
        "cannot read image ...nowhere.jpg: no such file",
        guard=(
            Cut("data/images.py", "except FileNotFoundError as error:", NEVER),
            Cut("data/images.py", "except OSError as error:\n        kind", f"{NEVER}\n        kind"),
        ),
    ),
    Case("show attention: no such weights", attention(weights="nowhere.pth"), "no weights file ...nowhere.pth", guard=NO_FILE),
    Case(
        "show attention: the config of another model",
        attention("--config-file", "coco/detr_r50_peg_50ep.yaml"),
        "model.pth has different shapes from the config's model: ",
        guard=(SHAPES, Cut("builders/trained.py", "if report.is_partial:", "if False:")),
    ),
    Case(
        "show attention: an image for weights",
        attention(weights="image.png"),
        "image.png: damaged, incomplete or not a checkpoint",
        guard=DAMAGED,
    ),
    Case(
        "show attention: a checkpoint of another project",
        attention(weights="other.pth"),
        "other.pth contains no config; give one with --config-file, for example --config-file coco/detr_r50_sine_50ep.yaml",
        guard=Cut("checkpoint/weights.py", "if weights.config is None:", "if False:"),
    ),
    Case(
        "show attention: a point outside the image",
        attention("--points", "60,10"),
        "--points 60,10 is outside the image: x must be below 60 and y below 40 pixels",
        guard=Cut("visualize/recording.py", "if not (0 <= x < width and 0 <= y < height):", "if False:"),
    ),
    Case(
        "show attention: a point that is none",
        attention("--points", "top left"),
        "--points 'top' is not X,Y in pixels, such as 120,80",
        guard=none_matches("points"),
    ),
    Case("show attention: a level, of DETR", attention("--level", "2"), "--level 2: this DETR has one level, 0", guard=LEVEL),
    Case(
        "show attention: a level too many, of Deformable-DETR",
        attention("--level", "2", **DEFORMABLE),
        "--level 2: this DeformableDETR has levels 0 to 1",
        guard=LEVEL,
    ),
    Case(
        "show attention: no detections",
        attention("--detections", "0"),
        "0 is not in the range x>=1",
        guard=Cut(
            "cli/show.py",
            '"--detections", default=4, show_default=True, type=click.IntRange(min=1)',
            '"--detections", default=4, show_default=True, type=int',
        ),
    ),
    Case(
        "show attention: a file where the folder should be",
        attention("--output", "{folder}/image.png/pictures"),
        "cannot write ...image.png/pictures/encoder.png: ...Not a directory",
        guard=Cut("visualize/figures.py", "except (ValueError, OSError) as error:", NEVER),
    ),
    Case(
        "show position: no such config",
        lambda _: call("show", "position", "nowhere.yaml", "--output", "out"),
        "no config file",
        guard=NO_CONFIG,
    ),
    Case(
        "show position: no model",
        lambda _: call("show", "position", "--output", "out"),
        "Missing argument",
        guard=Cut("cli/show.py", 'nargs=-1, required=True, metavar="CONFIG_OR_WEIGHTS..."', "nargs=-1"),
    ),
    Case(
        "show position: a size that is none",
        position("--size", "800"),
        "--size '800' is not HEIGHTxWIDTH, such as 480x640",
        guard=none_matches("size", "cli/show.py"),
    ),
    Case(
        "show position: a size below one stride",
        position("--size", "7x64"),
        "--size 7x64 is too small: the smallest size for these models is 8x8",
        guard=Cut("cli/show.py", "if min(sides) < stride:", "if False:"),
    ),
    Case(
        "show position: a size beyond a learned table",
        position("--size", "64x96", MODEL__POSITION__NAME="learned", MODEL__POSITION__TABLE_SIZE=8),
        "a map of 8 x 12 tokens is larger than the learned table of 8 x 8; set MODEL.POSITION.TABLE_SIZE",
        guard=Cut("position/learned.py", "if height > size or width > size:", "if False:"),
    ),
    Case(
        "show position: a folder without images",
        position("--input", "{folder}/empty"),
        "there is no image in the folder",
        guard=Cut("data/listing.py", "if len(ignored) == len(found):", "if False:"),
    ),
    Case(
        "show data: no data set to train on",
        data(DATASETS__TRAIN=()),
        "DATASETS.TRAIN must list the names of data sets",
        guard=Cut("builders/datasets.py", "if isinstance(names, str) or not names:", "if False:"),
    ),
    Case(
        "show data: an unknown key",
        data(INPUT__SIZE=3),
        "unknown config key (from the command line) 'INPUT.SIZE'",
        guard=UNKNOWN_KEY,
    ),
    Case(
        "show data: a file where the folder should be",
        data("--output", "/dev/null/pictures"),
        "cannot write /dev/null/pictures/train.png: Not a directory; give another --output",
        guard=Cut("visualize/pictures.py", "except OSError as error:", NEVER),
    ),
    Case(
        "analyze: a size that is none",
        analyze("--sizes", "480,large"),
        "--sizes: 'large' must be a side length or HEIGHTxWIDTH",
        guard=Cut("cli/analyze.py", ", word)) is None:", ", word)) is False:"),
    ),
    Case(
        "analyze: a size below one stride",
        analyze("--sizes", "64,4x80"),
        "--sizes 4x80 is too small: each side must be at least this model's stride, 8",
        guard=Cut("cli/analyze.py", "if small:", "if False:"),
    ),
    Case(
        "analyze: no such config",
        lambda _: call("analyze", "--config-file", "nowhere.yaml"),
        "no config file 'nowhere.yaml'",
        guard=NO_CONFIG,
    ),
]
