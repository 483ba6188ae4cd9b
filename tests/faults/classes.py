# SPDX-License-Identifier: Apache-2.0
"""Data: classes and policy.

Classes come from the data. They are compared by name between all data sets, with `MODEL.NUM_CLASSES` and with a checkpoint's
classes.
"""

import copy
import json
from pathlib import Path

from faults.annotations import ANY_OBJECT
from faults.case import Case, Cut, Ending
from faults.drawn import Drawn, call_on, draw


def second_set(change):
    """Register ``other``, a copy of the data set after a change to the JSON's content, as the set to evaluate on."""

    def make(drawn: Drawn) -> None:
        content = copy.deepcopy(drawn.content)
        change(content)
        path = drawn.folder / "other.json"
        path.write_text(json.dumps(content), encoding="utf-8")
        sets = [
            [name, str(file), str(drawn.files.image_root)] for name, file in (("drawn", drawn.files.annotations), ("other", path))
        ]
        drawn.words |= {"DATASETS__REGISTER": sets, "DATASETS__TEST": ("other",)}

    return make


def other_ids(content: dict) -> None:
    for entry in content["categories"]:
        entry["id"] += 100
    for entry in content["annotations"]:
        entry["category_id"] += 100


def rename(content: dict) -> None:
    content["categories"][1]["name"] = "tick"


def swap(content: dict) -> None:
    first, second = content["categories"]
    first["name"], second["name"] = second["name"], first["name"]


def drop_class(content: dict) -> None:
    del content["categories"][1]
    content["annotations"] = [entry for entry in content["annotations"] if entry["category_id"] == 3]


def check(make, *words, **more):
    """``cpvt-det check-data`` on a drawn data set after a change."""
    return lambda folder: call_on(draw(folder / "data", make), "check-data", *words, **more)


def both_trained_on(drawn: Drawn) -> None:
    second_set(rename)(drawn)
    drawn.words["DATASETS__TRAIN"] = ("drawn", "other")


def bad_boxes(drawn: Drawn) -> None:
    drawn.content["annotations"][0]["bbox"] = [1, 2, 3]
    drawn.path(4).unlink()


def many_faults(drawn: Drawn) -> None:
    first = drawn.content["annotations"][0]
    drawn.content["annotations"] = [{**first, "id": number, "bbox": []} for number in range(1, 25)]


def train_then_eval(folder: Path) -> Ending:
    """Train on two classes, evaluate on two of which one has another name."""
    drawn = draw(folder / "data", second_set(rename))
    trained = call_on(drawn, "train", DATASETS__TEST=(), SOLVER__MAX_ITER=1)
    if trained.code:
        return trained
    return call_on(drawn, "train", "--eval-only", OUTPUT_DIR=folder / "eval", MODEL__WEIGHTS=folder / "out/model_final.pth")


def nothing(drawn: Drawn) -> None:
    pass


def break_all(drawn: Drawn) -> None:
    for image_id in range(1, 5):
        drawn.path(image_id).write_bytes(b"")


NAMES = Cut("common/class_names.py", "if first.names == second.names:", "if True:")
NUMBER = Cut("builders/datasets.py", "if cfg.MODEL.NUM_CLASSES not in (0, len(classes)):", "if False:")

CASES = [
    Case(
        "the same classes under other ids in the set to evaluate on",
        check(second_set(other_ids)),
        "other: 4 images",
        0,
        guard=Cut("common/class_names.py", "if first.names == second.names:", "if first == second:"),
    ),
    Case(
        "a class of another name in the set to evaluate on",
        check(second_set(rename)),
        "data sets drawn and other have different classes (2 and 2; only in the first: ['mite'], only in the second: ['tick'])",
        guard=NAMES,
    ),
    Case(
        "classes in another order",
        check(second_set(swap)),
        "drawn and other have different classes (2 and 2; order)",
        guard=Cut("common/class_names.py", "if first.names == second.names:", "if set(first.names) == set(second.names):"),
    ),
    Case(
        "a class less in the set to evaluate on",
        check(second_set(drop_class)),
        "drawn and other have different classes (2 and 1; ",
        guard=NAMES,
    ),
    Case("two training sets with different classes", check(both_trained_on), "drawn and other have different classes", guard=NAMES),
    Case(
        "MODEL.NUM_CLASSES one too small",
        check(nothing, MODEL__NUM_CLASSES=1),
        "NUM_CLASSES is 1, but the data has 2 classes (cell, mite)",
        guard=NUMBER,
    ),
    Case(
        "MODEL.NUM_CLASSES too large",
        check(nothing, MODEL__NUM_CLASSES=80),
        "MODEL.NUM_CLASSES is 80, but the data has 2 classes",
        guard=NUMBER,
    ),
    Case(
        "weights of other classes evaluated",
        train_then_eval,
        "fits only part of the config's model, but evaluation needs all of it",
        guard=Cut("checkpoint/load.py", " or None in self.rows_by_name.values()", ""),
    ),
    Case(
        "weights that are missing",
        check(nothing, MODEL__WEIGHTS="none.pth"),
        "weights that cannot be read: 1...no weights file none.pth",
        guard=Cut("cli/check_data.py", 'issues.add_error("weights that cannot be read", str(error))', "pass"),
    ),
    Case(
        "no data set at all",
        check(nothing, DATASETS__TRAIN=(), DATASETS__TEST=()),
        "DATASETS.TRAIN and DATASETS.TEST are empty",
        guard=Cut("cli/check_data.py", "if not cfg.DATASETS.TRAIN and not cfg.DATASETS.TEST:", "if False:"),
    ),
    Case(
        "a data set that is not registered",
        check(nothing, DATASETS__TRAIN=("drown",)),
        "'drown' (did you mean 'drawn'?)",
        guard=Cut("data/catalog.py", "if name not in known:", "if False:"),
    ),
    Case(
        "DATASETS.ON_BAD drop",
        check(bad_boxes, DATASETS__ON_BAD="drop"),
        "drawn: 3 images, 0 of them without objects, 5 boxes, 2 classes; boxes that are not four numbers: 1; image files that ...",
        0,
        guard=Cut("data/validation/issues.py", '(on_bad == "error" and bool(self.faults))', "bool(self.faults)"),
    ),
    Case(
        "check-data --all",
        check(many_faults, "--all"),
        "boxes that are not four numbers: 24\n...annotations[23] (id 24, image 1)",
        guard=Cut("cli/check_data.py", "check_data(decode, math.inf if every else EXAMPLES)", "check_data(decode, EXAMPLES)"),
    ),
    Case(
        "24 faults of a kind",
        check(many_faults),
        "annotations[19] (id 20, image 1): ...\n    and 4 more\n",
        guard=Cut("data/validation/issues.py", "if len(group.examples) < self.examples:", "if True:"),
    ),
    Case(
        "DATASETS.ON_BAD drop, no image left",
        check(break_all, DATASETS__ON_BAD="drop"),
        "drawn: no image has an object",
        guard=ANY_OBJECT,
    ),
    Case(
        "DATASETS.ON_BAD drop, other classes",
        check(second_set(rename), DATASETS__ON_BAD="drop"),
        "have different classes",
        guard=NAMES,
    ),
    Case(
        "unknown DATASETS.ON_BAD",
        check(nothing, DATASETS__ON_BAD="ignore"),
        "unknown DATASETS.ON_BAD 'ignore'; known: drop, error",
        guard=Cut("builders/datasets.py", "if cfg.DATASETS.ON_BAD not in POLICIES:", "if False:"),
    ),
]
