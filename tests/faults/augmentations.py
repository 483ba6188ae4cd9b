# SPDX-License-Identifier: Apache-2.0
"""Augmentations."""

from cpvt_det.data.augmentation import AUGMENTATION_REGISTRY
from faults.case import Case, Cut
from faults.drawn import call_on, draw


@AUGMENTATION_REGISTRY.register_as("own late")
def late():
    """Fails, but not on black images, which it is tried on before the run."""

    def augment(image, boxes, labels):
        if image.any():
            raise OverflowError("too bright")
        return image, boxes, labels

    return augment


@AUGMENTATION_REGISTRY.register_as("own xywh")
def xywh():
    """Returns boxes of another format."""
    return lambda image, boxes, labels: (image, boxes[:, [2, 3, 0, 1]], labels)


def train(*entries: object, **more: object):
    """``cpvt-det train`` with a list of augmentations."""

    def run(folder):
        return call_on(draw(folder / "data", lambda _: None), "train", INPUT__AUGMENTATIONS=list(entries), **more)

    return run


def built(old: str, new: str) -> Cut:
    return Cut("builders/data.py", old, new)


TRIED = Cut("builders/data.py", "    check_augmentations(cfg, join([dataset.records for dataset in train]))\n", "")
NAMED = Cut("data/augmentation.py", "except Exception as error:", "except ZeroDivisionError as error:")

CASES = [
    Case(
        "an unknown augmentation",
        train("RandomRotate"),
        "unknown augmentation 'RandomRotate' (did you mean 'RandomRotation'?); known: CenterCrop, ",
        guard=Cut(
            "common/registry.py",
            "        if name not in self:\n            raise UnknownName",
            "        if False:\n            raise UnknownName",
        ),
    ),
    Case(
        "an unknown option of an augmentation",
        train(["RandomRotation", {"angle": 10}]),
        "unknown option of augmentation 'RandomRotation' 'angle'; known: center, degrees, expand, fill, interpolation",
        guard=Cut("common/registry.py", "            if option not in accepted:", "            if False:"),
    ),
    Case(
        "an option without which an augmentation cannot be",
        train("RandomRotation"),
        "INPUT.AUGMENTATIONS: 'RandomRotation': ...missing 1 required positional argument: 'degrees'",
        guard=built("""with config_errors(f"{KEY}: {name!r}"):""", "if True:"),
    ),
    Case(
        "an entry that is neither a name nor a pair",
        train(["RandomRotation", 10]),
        "INPUT.AUGMENTATIONS must contain names and [name, {option: value}] pairs, got ['RandomRotation', 10]",
        guard=built("if not isinstance(name, str) or not isinstance(options, dict):", "if False:"),
    ),
    Case(
        "a crop that is larger than an image",
        train(["RandomCrop", {"size": [900, 900]}]),
        "INPUT.AUGMENTATIONS: 'RandomCrop' failed on a black image, ... pixels and ... boxes: Required crop size (900, 900)",
        guard=TRIED,
    ),
    Case(
        "mixing inside of another augmentation",
        train(["RandomApply", {"transforms": ["Mosaic"]}]),
        "INPUT.AUGMENTATIONS: 'Mosaic' mixes images, so it cannot be inside 'RandomApply'; put it directly into "
        "INPUT.AUGMENTATIONS, with its own p",
        guard=built("if step.mixes and in_group:", "if False:"),
    ),
    Case(
        "INPUT.CLOSE_EPOCHS where no images are mixed",
        train("RandomPhotometricDistort", INPUT__CLOSE_EPOCHS=2),
        "INPUT.CLOSE_EPOCHS is 2.0, but no augmentation of INPUT.AUGMENTATIONS mixes images; set it to 0, or add one that does",
        guard=built("if last and not any(step.mixes for step in steps):", "if False:"),
    ),
    Case(
        "an augmentation of one's own with boxes of another format",
        train("own xywh"),
        "'own xywh' failed on a black image, ...: it must return image, boxes and labels, but a box is not [x0, y0, x1, y1]",
        guard=Cut("data/augmentation.py", "if wrong := _fault(found):", "if False:"),
    ),
    Case(
        "an augmentation of one's own that fails on an image, not on the black one",
        train("own late"),
        "INPUT.AUGMENTATIONS: 'own late' failed on image ...png (id ...), ... boxes: too bright",
        guard=NAMED,
    ),
    Case(
        "augmentations that leave no box",
        train(["RandomCrop", {"size": [2, 2]}], INPUT__MIN_VISIBLE=1.0),
        "Best checkpoint",
        0,
        guard="an image without objects is an image",
    ),
]
