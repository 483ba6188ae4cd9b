# SPDX-License-Identifier: Apache-2.0
"""Data: annotations.

`cpvt-det check-data --config-file FILE` lists the faults of all splits, up to 20 of each kind (`--all` lists all), by file,
image id and annotation id. Training and evaluation run the same check first and stop at a fault. With `DATASETS.ON_BAD` set to
`drop`, both leave out and count the same images and boxes. Either way, ground truth used as detections scores an AP of 100.0;
each row tests this. Files above 4 MB are [cached](scaling.md#annotations).
"""

import contextlib
import json
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
from forked import Forked
from nodes import wait_for
from tiny import coco_dict

from cpvt_det.data.cache import SMALL
from faults.case import Case, Cut, Ending
from faults.drawn import DataCase, Drawn, call_on, draw, read_set, words_on


def annotation(**values):
    """Change the first annotation; ``None`` removes a key."""

    def make(drawn: Drawn) -> None:
        entry = drawn.content["annotations"][0]
        entry.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del entry[key]

    return make


def entry(section: str, **values):
    """Change the first entry of a section; ``None`` removes a key."""

    def make(drawn: Drawn) -> None:
        first = drawn.content[section][0]
        first.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del first[key]

    return make


def repeat(section: str, **values):
    """Append the first entry of a section again, with other values."""
    return lambda drawn: drawn.content[section].append({**drawn.content[section][0], **values})


def content(**values):
    """Replace sections; ``None`` removes one."""

    def make(drawn: Drawn) -> None:
        drawn.content.update(values)
        for key in [key for key, value in values.items() if value is None]:
            del drawn.content[key]

    return make


def file_of(make):
    """Write the JSON file by hand."""
    return lambda drawn: drawn.files.annotations.write_bytes(make(json.dumps(drawn.content).encode()))


def crowds_only(drawn: Drawn) -> None:
    for box in drawn.content["annotations"]:
        box["iscrowd"] = 1


def normalised(drawn: Drawn) -> None:
    for box in drawn.content["annotations"]:
        box |= {"bbox": [0.2, 0.2, 0.3, 0.3], "area": 0.09}


def without_extras(drawn: Drawn) -> None:
    for box in drawn.content["annotations"]:
        del box["area"], box["iscrowd"]


def only_first_boxes(drawn: Drawn) -> None:
    drawn.content["annotations"] = [box for box in drawn.content["annotations"] if box["image_id"] < 3]


def many_boxes(drawn: Drawn) -> None:
    extra = [{"image_id": 2, "category_id": 3, "bbox": [number, 1, 8, 9]} for number in range(9)]
    drawn.content["annotations"] += extra


def many_boxes_for(**words: object) -> Callable[[Drawn], None]:
    """:func:`many_boxes`, in a run of these settings."""

    def make(drawn: Drawn) -> None:
        many_boxes(drawn)
        drawn.words.update(words)

    return make


def renumber(drawn: Drawn) -> None:
    new = {3: 0, 7: 1000}
    for category in drawn.content["categories"]:
        category["id"] = new[category["id"]]
    for box in drawn.content["annotations"]:
        box["category_id"] = new[box["category_id"]]


def boxes(*expected: list[float]):
    """Look at the first image's first boxes, xywh: the second of the drawn ones comes after them, in training and in evaluation."""

    def then(drawn: Drawn) -> None:
        dataset, wanted = read_set(drawn), [*expected, [15, 8, 16.5, 24.25]]
        x0, y0, x1, y1 = dataset.records[0].boxes_xyxy.T
        np.testing.assert_allclose(np.stack((x0, y0, x1 - x0, y1 - y0), 1), wanted, atol=1e-5)
        evaluated = [entry["bbox"] for entry in coco_dict(dataset)["annotations"] if entry["image_id"] == 1]
        np.testing.assert_allclose(evaluated, wanted)

    return then


def areas(drawn: Drawn) -> None:
    """Every object counts as large as its box, and none is a crowd."""
    for entry in coco_dict(read_set(drawn))["annotations"]:
        assert entry["area"] == entry["bbox"][2] * entry["bbox"][3] and entry["iscrowd"] == 0


def labels(drawn: Drawn) -> None:
    """The classes are numbered from 0 without gaps, by rising id."""
    assert [record.labels.tolist() for record in read_set(drawn).records] == [[0, 1]] * 4


def twice(folder: Path, change, cache: Path | None = None) -> Ending:
    """Look at a data set of a large file, which is then kept; change what is kept, and look again."""
    drawn = draw(folder / "data", lambda drawn: drawn.content.update(info="x" * SMALL))
    for _ in range(2):
        for kept in (folder / "kept").glob("*.columns"):
            change(kept)
        ending = call_on(drawn, "check-data", DATASETS__CACHE=cache or folder / "kept")
    return ending


MAKER = """
import time
from pathlib import Path
from cpvt_det.data import cache, coco
folder, read_once, read, save = Path({folder!r}), coco.read_once, coco._read, cache.save_table
def note(what):
    with (folder / what).open("a") as file:
        file.write(what + ".")
def arrive(*arguments):
    note("came")
    return read_once(*arguments)
def read_late(*arguments):
    note("read")
    while (folder / "came").stat().st_size < 10 and not {hangs}:
        time.sleep(0.01)
    return read(*arguments)
def save_half(table, file):
    file.write(b"half")
    file.flush()
    note("half")
    time.sleep(100)
coco.read_once, coco._read = arrive, read_late
if {hangs}:
    cache.save_table = save_half
"""
"""A process that reads when two have come, or one that hangs in the middle of writing down what it has read."""


@contextlib.contextmanager
def makers(folder: Path) -> Iterator[Callable[[bool], Forked]]:
    """What starts processes that look at a data set of a large file; they write into the folder what they do."""
    drawn, started = draw(folder / "data", lambda drawn: drawn.content.update(info="x" * SMALL)), []

    def start(hangs: bool) -> Forked:
        words = words_on(drawn, "check-data", DATASETS__CACHE=folder / "kept")
        started.append(Forked(*words, before=MAKER.format(folder=str(folder), hangs=hangs)))
        return started[-1]

    try:
        yield start
    finally:
        for process in started:
            process.end()


def ending_of(process: Forked) -> Ending:
    return Ending(process.wait(), process.stdout() + process.stderr())


def two_makers(folder: Path) -> Ending:
    """Both come before either reads."""
    with makers(folder) as start:
        first, second = map(ending_of, [start(False), start(False)])
    assert first.code == 0, first
    assert (folder / "read").read_text() == "read.", "both have read"
    return second


def killed_maker(folder: Path) -> Ending:
    """It is killed while it holds the lock and writes, and another waits for it."""
    with makers(folder) as start:
        first = start(True)
        wait_for(lambda: (folder / "half").exists(), what="half a file")
        second = start(False)
        wait_for(lambda: (folder / "came").stat().st_size == 10, what="the second process")
        first.send_signal(signal.SIGKILL)
        ending = ending_of(second)
    assert {path.suffix for path in (folder / "kept").iterdir()} == {".columns", ".lock"}, "half a file is left"
    return ending


def rule(old: str, new: str = "if False:") -> Cut:
    return Cut("data/validation/rules.py", old, new)


def reader(old: str, new: str = "if False:") -> Cut:
    return Cut("data/coco.py", old, new)


def table(old: str, new: str = "if False:") -> Cut:
    return Cut("data/annotations.py", old, new)


HERE = "annotations[0] (id 1, image 1): "
FOUR_NUMBERS = "if type(box) is not list or len(box) != 4 or not all(type(side) in (int, float) for side in box):"
FLAT = (  # a box without area meets the one or the other
    rule("if w <= 0 or h <= 0:"),
    rule("return (None, WITHOUT_AREA) if _vanishes(x, y, x + w, y + h) else (box, None)", "return box, None"),
)
FINITE = rule("if not all(map(is_number, box)):")
KNOWN = rule("if type(value) is not int or value not in known:")
NUMBER = rule("if value is not None and not is_number(value):")
AREA = rule("if area is not None and not 0 <= area <= LARGEST_AREA:")
MANY_NOTED = Cut("builders/datasets.py", "(counts > min(num_queries, num_detections))", "(counts < 0)")
ANY_OBJECT = Cut(
    "data/validation/check.py",
    "if split and not any(dataset.records.num_boxes.any() for dataset in split):",
    "if False:",
)
SECTION = reader("if not isinstance(section, list) or not section:")
UNIQUE = reader("for value in (value for value, count in counts.items() if count > 1):", "for value in ():")
BYTE_ORDER_MARK = (
    Cut("data/text.py", "encoding, declared = json.detect_encoding(content),", 'encoding, declared = "utf-8",'),
    Cut("data/json_stream.py", 'encoding="utf-8-sig"', 'encoding="utf-8"'),
)
JSON = reader("except (ValueError, RecursionError) as error:", "except ZeroDivisionError as error:")

CASES = [
    DataCase(
        "box of zero area",
        annotation(bbox=[4, 5, 0, 12]),
        f"boxes without area, left out: ...{HERE}bbox [4, 5, 0, 12]",
        0,
        guard=FLAT,
        then=boxes(),
    ),
    DataCase(
        "box of negative width",
        annotation(bbox=[24, 5, -20, 12]),
        "boxes without area, left out: 1",
        0,
        guard=FLAT,
        then=boxes(),
    ),
    DataCase(
        "box so thin that it vanishes in float32",
        annotation(bbox=[30, 5, 1e-9, 12]),
        "boxes without area, left out: 1",
        0,
        guard=FLAT[1],
        then=boxes(),
    ),
    DataCase(
        "box less than a pixel wide",
        annotation(bbox=[30, 5, 0.6, 12]),
        f"boxes less than a pixel wide or high, kept: ...{HERE}bbox [30, 5, 0.6, 12]",
        0,
        guard=table("if min(box[2:]) < 1 and max(size) > 1:  # a file that cannot be read counts as 1 x 1"),
        then=boxes([30, 5, 0.6, 12]),
    ),
    DataCase(
        "all boxes within [0, 1]",
        normalised,
        "boxes that are not in pixels: ...all 8 are within [0, 1]; bbox must be [x, y, width, height] in pixels, not relative to "
        "the image",
        guard=reader("if len(boxes) and (boxes[:, :2] + boxes[:, 2:]).max() <= 1:"),
    ),
    DataCase(
        "box outside its image",
        annotation(bbox=[60, 5, 20, 12]),
        f"boxes outside the image, left out: ...{HERE}",
        0,
        guard=rule("is_outside = x1 <= x0 or y1 <= y0 or _vanishes(x0, y0, x1, y1)", "is_outside = False"),
        then=boxes(),
    ),
    DataCase(
        "box partly outside its image",
        annotation(bbox=[50, -5, 20, 12]),
        "boxes partly outside the image, clipped: 1",
        0,
        guard=rule("([x0, y0, x1 - x0, y1 - y0], CLIPPED)", "(box, CLIPPED)"),
        then=boxes([50, 0, 10, 7]),
    ),
    DataCase(
        "NaN in a box",
        annotation(bbox=[4, float("nan"), 20, 12]),
        f"boxes that are not finite: ...{HERE}bbox [4, nan, 20, 12]",
        guard=FINITE,
    ),
    DataCase("infinity in a box", annotation(bbox=[4, 5, float("inf"), 12]), f"boxes that are not finite: ...{HERE}", guard=FINITE),
    DataCase(
        "box of 3 numbers",
        annotation(bbox=[4, 5, 20]),
        f"{HERE}bbox [4, 5, 20]; expected [x, y, width, height] in pixels",
        guard=rule(FOUR_NUMBERS, FOUR_NUMBERS.replace("len(box) != 4 or ", "")),
    ),
    DataCase(
        "box of text",
        annotation(bbox=["4", "5", "20", "12"]),
        f"boxes that are not four numbers: ...{HERE}bbox ['4', ",
        guard=rule(FOUR_NUMBERS, "if type(box) is not list or len(box) != 4:"),
    ),
    DataCase(
        "empty box",
        annotation(bbox=[]),
        f"boxes that are not four numbers: ...{HERE}bbox []",
        guard=rule(FOUR_NUMBERS, FOUR_NUMBERS.replace("len(box) != 4 or ", "")),
    ),
    DataCase(
        "no box",
        annotation(bbox=None),
        f"boxes that are not four numbers: ...{HERE}bbox None",
        guard=rule(FOUR_NUMBERS, FOUR_NUMBERS.replace("type(box) is not list or ", "")),
    ),
    DataCase(
        "annotation of an unknown image",
        annotation(image_id=9),
        "(id 1, image 9): image_id 9, which is not an id in images",
        guard=KNOWN,
    ),
    DataCase(
        "annotation of an unknown category",
        annotation(category_id=4),
        f"annotations of unknown categories: ...{HERE}category_id 4",
        guard=KNOWN,
    ),
    DataCase(
        "category_id as text",
        annotation(category_id="3"),
        "category_id '3', which is not an id in categories; it is text, not a number",
        guard=KNOWN,
    ),
    DataCase(
        "annotation without id",
        annotation(id=None),
        "drawn: 4 images, 0 of them without objects, 8 boxes, 2 classes",
        0,
        guard=(
            table('entry.get("iscrowd"), entry.get("id")', 'entry.get("iscrowd"), entry["id"]'),
            table('own = entry.get("id")', 'own = entry["id"]'),
        ),
    ),
    DataCase(
        "annotation id twice",
        repeat("annotations"),
        "annotations[8] (id 1, image 1): an earlier annotation has the same id",
        guard=table("if own in seen:"),
    ),
    DataCase(
        "annotation that is no object",
        lambda d: d.content["annotations"].append(7),
        "annotations[8]: 7",
        guard=rule("if type(annotation) is not dict:"),
    ),
    DataCase(
        "no area and no iscrowd",
        without_extras,
        "annotations without area or iscrowd, filled in: 8",
        0,
        guard=table("area = box_area if area is None else", "area = 0.0 if area is None else"),
        then=areas,
    ),
    DataCase(
        "area that is NaN",
        annotation(area=float("nan")),
        f"annotations whose area is not a number: ...{HERE}area nan",
        guard=(NUMBER, AREA),
    ),
    DataCase(
        "area below 0",
        annotation(area=-5),
        f"annotations whose area is out of range: ...{HERE}area -5; expected 0 to 1e10 square pixels",
        guard=AREA,
    ),
    DataCase(
        "area of 2e10",
        annotation(area=2e10),
        f"annotations whose area is out of range: ...{HERE}area 20000000000.0",
        guard=AREA,
    ),
    DataCase(
        "area of 0",
        annotation(area=0),
        "drawn: 4 images, 0 of them without objects, 8 boxes, 2 classes",
        0,
        guard=(rule("not 0 <= area <= LARGEST_AREA", "not 0 < area <= LARGEST_AREA"), table("and 0 <= area <=", "and 0 < area <=")),
    ),
    DataCase(
        "iscrowd of -1",
        annotation(iscrowd=-1),
        f"annotations whose iscrowd is neither 0 nor 1: ...{HERE}iscrowd -1",
        guard=rule('if annotation.get("iscrowd") not in (None, 0, 1):'),
    ),
    DataCase(
        "iscrowd as text",
        annotation(iscrowd="no"),
        f"annotations whose iscrowd is not a number: ...{HERE}iscrowd 'no'",
        guard=(NUMBER, rule('if annotation.get("iscrowd") not in (None, 0, 1):')),
    ),
    DataCase(
        "a crowd",
        annotation(iscrowd=1),
        "4 images, 0 of them without objects, 7 boxes",
        0,
        guard=table('[rows][~boxes["crowd"]]', "[rows]"),
    ),
    DataCase(
        "images without objects",
        only_first_boxes,
        "4 images, 2 of them without objects, 4 boxes",
        0,
        guard=table('[~boxes["crowd"]], minlength=len(images))', '[~boxes["crowd"]])'),
    ),
    DataCase(
        "more boxes than queries",
        many_boxes,
        "images with more boxes than queries, so that some boxes cannot be learned: 1\n"
        "    image 2: .../images/2.png has 11 boxes, but there are only 6 queries",
        0,
        guard=MANY_NOTED,
    ),
    DataCase(
        "more boxes than detections",
        many_boxes_for(MODEL__DETR__NUM_OBJECT_QUERIES=20, TEST__DETECTIONS_PER_IMAGE=10),
        "images with more boxes than detections, so that some boxes cannot be found: 1\n"
        "    image 2: .../images/2.png has 11 boxes, but there are only 20 queries and 10 detections",
        0,
        guard=MANY_NOTED,
    ),
    DataCase(
        "more boxes in a validation image than queries",
        many_boxes_for(DATASETS__TRAIN=()),
        "images with more boxes than detections, so that some boxes cannot be found: 1\n"
        "    image 2: .../images/2.png has 11 boxes, but there are only 6 queries and 100 detections",
        0,
        guard=MANY_NOTED,
    ),
    DataCase(
        "no annotation in the whole split",
        content(annotations=[]),
        "drawn: no image has an object; are these the right annotations?",
        guard=ANY_OBJECT,
    ),
    DataCase(
        "nothing but crowds", crowds_only, "drawn: no image has an object; are these the right annotations?", guard=ANY_OBJECT
    ),
    DataCase(
        "no section annotations",
        content(annotations=None),
        "drawn: no image has an object; are these the right annotations?",
        guard=ANY_OBJECT,
    ),
    DataCase(
        "annotations that are no list",
        content(annotations={}),
        "set.json is not COCO: its 'annotations' are not a list",
        guard=reader('if not isinstance(content.setdefault("annotations", []), list):', 'if content.get("annotations") is None:'),
    ),
    DataCase("no section categories", content(categories=None), "set.json is not COCO: it has no 'categories'", guard=SECTION),
    DataCase("empty categories", content(categories=[]), "set.json is not COCO: it has no 'categories'", guard=SECTION),
    DataCase("category id twice", repeat("categories", name="tick"), "category ids that are not unique: ...id 3", guard=UNIQUE),
    DataCase("category name twice", repeat("categories", id=4), "category names that are not unique: ...name cell", guard=UNIQUE),
    DataCase(
        "category without name",
        entry("categories", name=None),
        "entries without a field: ...categories[0]: no 'name'",
        guard=rule('fault = _entry_fault(category, ("id", "name"))', 'fault = _entry_fault(category, ("id",))'),
    ),
    DataCase(
        "category ids with gaps, from 0",
        renumber,
        "drawn: 4 images, 0 of them without objects, 8 boxes, 2 classes",
        0,
        guard=table("[label_of[one] for one in ids.tolist()]", "ids"),
        then=labels,
    ),
    DataCase("no section images", content(images=None), "set.json is not COCO: it has no 'images'", guard=SECTION),
    DataCase(
        "image id twice",
        repeat("images"),
        "image ids that are not unique: ...image 1 (1.png)...image 1 (1.png)",
        guard=table("if len({image[at] for image in good}) < len(good):", "if False:"),
    ),
    DataCase(
        "image ids of text",
        entry("images", id="one"),
        "ids that are not whole numbers: ...images[0]: id 'one'",
        guard=rule('if type(entry["id"]) is not int or abs(entry["id"]) > LARGEST_ID:'),
    ),
    DataCase(
        "image without height",
        entry("images", height=None),
        "images[0]: no 'height'",
        guard=rule('("id", "file_name", "height", "width")', '("id", "file_name", "width")'),
    ),
    DataCase(
        "image of height 0",
        entry("images", height=0),
        "images[0]: image 1 (1.png) has size 0 x 60",
        guard=rule("is_number(side) and side % 1 == 0 and 1 <= side <= LARGEST_SIDE", "True"),
    ),
    DataCase(
        "several faults at once",
        lambda d: [change(d) for change in SEVERAL],
        "4 faults in the data",
        guard=Cut(
            "data/validation/check.py",
            'looked.issues.add_fault(fault[0], f"image {image_id}: {fault[1]}")',
            "raise DataError(fault[1])",
        ),
    ),
    DataCase("malformed JSON", file_of(lambda text: text[:-1]), "set.json is not JSON: ", guard=JSON),
    DataCase("empty JSON file", file_of(lambda text: b""), "set.json is not JSON: ", guard=JSON),
    DataCase(
        "JSON that is not UTF-8",
        file_of(lambda text: text.replace(b"cell", b"c\xe9ll")),
        "set.json is not JSON: 'utf-8' codec",
        guard=JSON,
    ),
    DataCase(
        "JSON of 100,000 nested lists",
        file_of(lambda text: b"[" * 100_000),
        "set.json is not JSON: ",
        guard=reader("except (ValueError, RecursionError) as error:", "except ValueError as error:"),
    ),
    DataCase(
        "JSON with a byte order mark",
        file_of(lambda text: b"\xef\xbb\xbf" + text),
        "drawn: 4 images",
        0,
        guard=BYTE_ORDER_MARK,
    ),
    DataCase(
        "a list instead of an object",
        file_of(lambda text: b"[]"),
        "set.json is not COCO: expected an object with images, ",
        guard=reader("if not isinstance(content, dict):"),
    ),
    DataCase(
        "an empty folder instead of the file",
        lambda d: d.files.annotations.mkdir(),
        "set.json is not a data set: expected a COCO JSON file, a YOLO folder with data.yaml",
        guard=Cut(
            "data/formats/format.py",
            "if (data_format := find_format(path)) is None:",
            "if (data_format := find_format(path)) is False:",
        ),
    ),
    Case(
        "what was kept of a large file, cut off",
        lambda folder: twice(folder, lambda kept: kept.write_bytes(kept.read_bytes()[:1000])),
        "drawn: 4 images, 0 of them without objects, 8 boxes, 2 classes",
        0,
        guard=Cut("data/cache.py", "contextlib.suppress(FileNotFoundError, ValueError)", "contextlib.suppress(FileNotFoundError)"),
    ),
    Case(
        "two makers of a cache",
        two_makers,
        "drawn: 4 images, 0 of them without objects, 8 boxes, 2 classes",
        0,
        guard=Cut("data/cache.py", "fcntl.lockf(file, fcntl.LOCK_EX)", "pass"),
    ),
    Case(
        "a killed maker of a cache",
        killed_maker,
        "drawn: 4 images, 0 of them without objects, 8 boxes, 2 classes",
        0,
        guard=Cut("data/cache.py", "unfinished.unlink()", "pass"),
    ),
    Case(
        "a DATASETS.CACHE that is no folder",
        lambda folder: twice(folder, lambda kept: None, cache=folder / "data" / "run.yaml"),
        "drawn: 4 images, 0 of them without objects, 8 boxes, 2 classes",
        0,
        guard=Cut("data/cache.py", "return table or read(files)", "raise"),
    ),
]
SEVERAL = [
    annotation(bbox=[]),
    lambda drawn: drawn.path(2).unlink(),
    lambda drawn: drawn.path(3).write_bytes(b""),
    repeat("annotations", id=8),
]
