# SPDX-License-Identifier: Apache-2.0
"""Data: folders as tools and machines write them.

Each row is a folder of eight pictures in one of seven layouts, with one oddity. Rows with exit code 0 also compare files, class
names and boxes with the intended ones. `tests/whole/test_random_folders.py` combines one to three oddities at random: 200
folders in the suite, more with `PYTHONPATH=tests python -m faults.fuzz 10000 test_random_folders.py`.
"""

import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from urllib.parse import quote

from cpvt_det.data import read_folder
from faults.case import Case, Cut, Ending, call
from faults.odd_folder import KINDS, OddFolder, draw, plain

YOLO, VOC, COCO = (tuple(kind for kind in KINDS if kind.startswith(name)) for name in ("yolo", "voc", "coco"))


@dataclass(frozen=True)
class Quirk:
    """Something odd about a folder.

    Attributes:
        what: the oddity, in words.
        kinds: formats that can have it.
        change: makes it.
        says: part of what check-data prints; of several, with exit code 2, any.
        code: the exit code.
        touches: parts of a folder that it changes; two that change the same one are not tried together.
        guard: what reads or refuses it.
    """

    what: str
    kinds: Sequence[str]
    change: Callable[[OddFolder], object]
    says: str = ""
    code: int = 0
    touches: Sequence[str] = ()
    guard: Cut | tuple[Cut, ...] | str = ""


def meet(folder: Path, odd: OddFolder) -> Ending:
    """Write a folder and check it; what is read is compared with what was meant."""
    top = odd.write(folder)
    ending = call("check-data", top)
    if ending.code == 0:
        different = difference(top, odd.meant(folder))
        assert not different, different
    return ending


def difference(folder: Path, meant: dict[str, list[tuple]]) -> str:
    """How images, classes and boxes that are read differ from what was meant; empty where they do not."""
    found = {}
    for data in read_folder(folder):
        for record in data.records:
            boxes = [
                (data.classes.names[label], x0, y0, x1 - x0, y1 - y0)
                for label, (x0, y0, x1, y1) in zip(record.labels, record.boxes_xyxy.tolist(), strict=True)
            ]
            path = str(Path(record.file_name).resolve())
            if path in found:
                return f"{path} is there twice"
            found[path] = sorted(boxes)
    if found.keys() != {path for path, boxes in meant.items() if boxes or path in found}:
        return f"images {sorted(found)}, meant {sorted(meant)}"
    for path, boxes in found.items():
        names, sides = [one[0] for one in boxes], [side for one in boxes for side in one[1:]]
        if names != [one[0] for one in meant[path]]:
            return f"{path}: classes {names}, meant {[one[0] for one in meant[path]]}"
        if any(abs(a - b) > 0.06 for a, b in zip(sides, (side for one in meant[path] for side in one[1:]), strict=True)):
            return f"{path}: boxes {boxes}, meant {meant[path]}"
    return ""


def nfd(text: str) -> str:
    return unicodedata.normalize("NFD", text)


def rename(odd: OddFolder, stem: str, label: Callable[[str], str] = str, written: Callable[[str], str] = str) -> None:
    """Other names for the pictures: of their files, of their label files, and in the annotations."""
    for picture in odd.pictures:
        new = stem.format(picture.stem)
        picture.image = with_stem(picture, picture.image, new)
        picture.label = with_stem(picture, picture.label, label(new))
        picture.written = with_stem(picture, picture.written, written(new))
        picture.stem = new


def with_stem(picture, name: str, new: str) -> str:
    """Another stem in a name, whose suffix stays: p2 is in .jp2, too."""
    start, dot, end = name.rpartition(".") if "." in name[-6:] else (name, "", "")
    return start.replace(picture.stem, new) + dot + end


def each(change: Callable[[OddFolder, object], object], every: int = 1) -> Callable[[OddFolder], None]:
    """A change of every picture, or of every second one."""
    return lambda odd: [change(odd, picture) for number, picture in enumerate(odd.pictures) if number % every == 0]


def put(**values: object) -> Callable[[OddFolder], None]:
    return lambda odd: [setattr(odd, key, value) for key, value in values.items()]


def encode(kind: str, encoding: str) -> Callable[[OddFolder], None]:
    return lambda odd: odd.encodings.update({kind: encoding})


def in_folder(odd: OddFolder, picture) -> None:
    """Pictures and labels below two further folders of one kind."""
    place = f"cam{int(picture.stem[-1]) % 2}"
    picture.image, picture.label = (f"{Path(p).parent}/{place}/{Path(p).name}" if p else "" for p in (picture.image, picture.label))
    picture.written = f"{place}/{picture.written}"


def beside(odd: OddFolder, picture) -> None:
    picture.label = str(Path(picture.image).with_suffix(".txt"))


def suffix(end: str, odd: OddFolder, picture) -> None:
    picture.image = str(Path(picture.image).with_suffix(end))
    picture.written = str(Path(picture.written).with_suffix(end))


def add(odd: OddFolder, *places: str) -> None:
    """Copies of a picture that are no data."""
    for place in places:
        odd.extra[place] = draw(0, ".png")


def number_names(odd: OddFolder) -> None:
    """shot, shot 1, shot 2, ..., as copies on a desktop are called."""
    for number, picture in enumerate(odd.pictures):
        new = "shot" if not number else f"shot {number}"
        picture.image, picture.label = (with_stem(picture, name, new) for name in (picture.image, picture.label))
        picture.written, picture.stem = with_stem(picture, picture.written, new), new


def of_macos(odd: OddFolder) -> None:
    for picture in odd.pictures:
        for path in filter(None, (Path(picture.image), picture.label and Path(picture.label))):
            odd.extra[str(path.with_name(f"._{path.name}"))] = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X" + bytes(40)


def of_jupyter(odd: OddFolder) -> None:
    add(odd, str(Path(odd.pictures[0].image).parent / ".ipynb_checkpoints/p0-checkpoint.png"))


def of_synology(odd: OddFolder) -> None:
    add(odd, str(Path(odd.pictures[0].image).parent / "@eaDir/p0.png/SYNOPHOTO_THUMB_M.png"))


def listed(text: str) -> Callable[[OddFolder], None]:
    """Lists of the splits with lines of this text."""
    return put(listed=lambda picture: text.format(image=picture.image, back=picture.image.replace("/", "\\"), stem=picture.stem))


def list_in_yaml(odd: OddFolder) -> None:
    for split in odd.entries:
        odd.entries[split] = "".join(f"\n  - {picture.image}" for picture in odd.pictures if picture.split == split)


def names_in(name: str, odd: OddFolder) -> None:
    odd.name_file = name.partition(",")[0]
    odd.extra |= {"obj.data": f"classes = 2\nnames = /home/ann/{odd.name_file}\n".encode()} if "obj.data" in name else {}


def named(*names: str, text: str = "") -> Callable[[OddFolder], None]:
    def change(odd: OddFolder) -> None:
        odd.classes = list(names)
        odd.names = text or f"names: [{', '.join(names)}]\n"

    return change


def encoded(encoding: str, declared: str, *names: str) -> Callable[[OddFolder], None]:
    """XML in an encoding."""

    def change(odd: OddFolder) -> None:
        odd.classes, odd.head = list(names), f"<?xml version='1.0' encoding='{declared}'?>\n" * bool(declared)
        odd.encodings["xml"] = encoding

    return change


def twice(odd: OddFolder) -> None:
    write = odd.line
    odd.line = lambda *numbers: f"{write(*numbers)}\n{write(*numbers)}"


def json_twice(content: dict) -> None:
    content["annotations"] += [{**box, "id": 1000 + box["id"]} for box in content["annotations"]]


def ids(content: dict, kinds: dict[tuple[str, str], Callable]) -> None:
    for (section, key), kind in kinds.items():
        for entry in content[section]:
            entry[key] = kind(entry[key])


def of_first(section: str, **values: object) -> Callable[[OddFolder], None]:
    """Other values of the first entry of a section of COCO's JSON."""
    return lambda odd: odd.change.append(lambda content: content[section][0].update(values))


def of_all(section: str, **values: object) -> Callable[[OddFolder], None]:
    return lambda odd: odd.change.append(lambda content: [entry.update(values) for entry in content[section]])


def with_url_alone(content: dict) -> None:
    for image in content["images"]:
        image["coco_url"] = f"http://images.cocodataset.org/train2017/{image.pop('file_name')}"


def one_more(odd: OddFolder, **values: object) -> None:
    def change(content: dict) -> None:
        number = 1 + max(int(image["id"]) for image in content["images"])
        content["images"].append({**content["images"][0], "id": number, **values})
        content["annotations"].append({**content["annotations"][0], "id": 5000, "image_id": number, "bbox": [1, 2, 9, 8]})

    odd.change.append(change)


def without_label(odd: OddFolder) -> None:
    odd.pictures[1].boxes, odd.pictures[1].label = [], ""


def at_zero(odd: OddFolder) -> None:
    """Coordinates that count from 0, one of them there."""
    for picture in (odd.pictures[0], odd.pictures[5]):
        picture.boxes[0] = (0, 0, 0, 20, 15)
    corners = odd.objects
    odd.objects = lambda x0, y0, x1, y1: corners(x0 - 1, y0 - 1, x1, y1)


def text_of(file: str, old: str, new: str) -> Cut:
    return Cut(f"data/{file}", old, new)


yolo = partial(text_of, "formats/yolo.py")
voc = partial(text_of, "formats/xml_files.py")
names = partial(text_of, "names.py")
listing = partial(text_of, "listing.py")
coco = partial(text_of, "folders/coco_files.py")
text = partial(text_of, "text.py")
table = partial(text_of, "annotations.py")

LENGTH = yolo("if keypoints or count < 6 or count % 2:", "if False:")
MATCHED = names("return self._pair(labels, written, self._in_agreement) or self._pair(", "return {} and self._pair(")
TAIL = names("groups = self._called(number, last)", "groups = {}")
HIDDEN = listing('if not name.startswith(".") and name not in NOT_THE_USERS)\n', "if name not in NOT_THE_USERS)\n")
CODER = text(
    "encoding, declared = json.detect_encoding(content), DECLARED.match(content)",
    'encoding, declared = "utf-8", DECLARED.match(content)',
)
DECLARED = text('if encoding == "utf-8" and declared and', "if False and")


def form(words: str, old: str) -> Cut:
    """A form of a name that is not tried."""
    return names(f'("{words}", {old}),', f'("{words}", str, str),')


QUIRKS = [
    # lines of YOLO
    Quirk(
        "YOLO: 12 keypoints of two numbers behind each box",
        ("yolo",),
        put(yaml="kpt_shape: [12, 2]\n", tail=lambda n: " 0.2 0.9" * 12),
        touches=("tail", "yaml"),
        guard=yolo("if count == 4 or (keypoints and count == 4 + keypoints):", "if count == 4:"),
    ),
    Quirk(
        "YOLO: 17 keypoints of three numbers behind each box",
        ("yolo",),
        put(yaml="kpt_shape: [17, 3]\n", tail=lambda n: " 0.2 0.9 2" * 17),
        touches=("tail", "yaml"),
        guard=yolo("if count == 4 or (keypoints and count == 4 + keypoints):", "if count == 4:"),
    ),
    Quirk(
        "YOLO: keypoints without kpt_shape",
        YOLO,
        put(tail=lambda n: " 0.2 0.9" * 12),
        "lines that may be keypoints: ...all lines have 28 numbers after the class, so they may be boxes with keypoints or "
        "polygons",
        2,
        ("tail",),
        yolo("if not is_known and len(polygons) ==", "if False and len(polygons) =="),
    ),
    Quirk(
        "YOLO: a confidence behind each box",
        YOLO,
        put(tail=lambda n: " 0.87"),
        "boxes followed by a confidence, which is not read: ",
        touches=("tail",),
        guard=yolo("if by_start == [True, False] and", "if False and"),
    ),
    Quirk(
        "YOLO: confidence and track behind each box",
        YOLO,
        put(tail=lambda n: f" 0.87 {n + 1}"),
        "boxes followed by a confidence and a track, which is not read: ",
        touches=("tail",),
        guard=yolo('if polygons or not all(box["numbers"][-1] % 1 == 0 for box in of_count[6]):', "if True:"),
    ),
    Quirk(
        "YOLO: a confidence before each box",
        YOLO,
        put(line=lambda label, *box: " ".join(map(str, (label, 0.87, *box)))),
        "lines of another length: ...line 1: 5 numbers after the class; expected class cx cy w h",
        2,
        ("line", "tail"),
        yolo("by_start == [True, False] and", "True and"),
    ),
    Quirk(
        "YOLO: class as 1.0",
        YOLO,
        put(line=lambda label, *box: " ".join([f"{label}.0", *map(str, box)])),
        touches=("line",),
        guard=yolo("= [float(word) for word in words if word]", "= [int(words[0]), *map(float, words[1:])]"),
    ),
    Quirk(
        "YOLO: numbers as numpy.savetxt writes them",
        YOLO,
        put(line=lambda *numbers: " ".join(f"{n:.18e}" for n in numbers)),
        touches=("line",),
        guard=yolo("= [float(word) for word in words if word]", "= [int(words[0]), *map(float, words[1:])]"),
    ),
    Quirk(
        "YOLO: commas between the numbers",
        YOLO,
        put(line=lambda *numbers: ",".join(map(str, numbers))),
        touches=("line", "tail"),
        guard=yolo(r're.split(r"[\s,;]+", line) if', "line.split() if"),
    ),
    Quirk(
        "YOLO: commas in the numbers",
        YOLO,
        put(line=lambda *numbers: " ".join(map(str, numbers)).replace(".", ",")),
        touches=("line", "tail"),
        guard=yolo('line.replace(",", ".").split()', "line.split()"),
    ),
    Quirk(
        "YOLO: NaN in each line",
        YOLO,
        put(line=lambda label, *box: f"{label} nan {box[1]} {box[2]} {box[3]}"),
        "lines that are not numbers: ",
        2,
        ("line",),
        yolo("if not all(map(math.isfinite, (number, *numbers))):", "if False:"),
    ),
    Quirk(
        "YOLO: blanks and tabs behind the lines",
        YOLO,
        put(tail=lambda n: "  \t"),
        touches=("tail",),
        guard="words are taken apart at blanks",
    ),
    Quirk(
        "YOLO: each line twice",
        YOLO,
        twice,
        "boxes that repeat another one of the same image and class, left out",
        touches=("twice", "tail"),
        guard=table("rows = self._without_copies(", "rows = (lambda rows, *_: rows)("),
    ),
    Quirk("text files with CRLF", (*YOLO, "voc lists"), put(ends="\r\n"), touches=("ends",), guard="line.strip()"),
    Quirk(
        "text files with CR alone",
        (*YOLO, "voc lists"),
        put(ends="\r"),
        touches=("ends",),
        guard=text(r're.split(r"\r\n|\r|\n", read_text(path))', r're.split(r"\r\n|\n", read_text(path))'),
    ),
    # which label file is of which image
    Quirk(
        "YOLO: label files beside the images, in a folder images", ("yolo",), each(beside), touches=("label place",), guard=MATCHED
    ),
    Quirk("YOLO: half of the label files beside the images", ("yolo",), each(beside, 2), touches=("label place",), guard=MATCHED),
    Quirk(
        "YOLO: the data set below a folder images, with label files beside",
        ("yolo",),
        lambda odd: [each(beside)(odd), put(root="images/pets")(odd)],
        touches=("label place", "root"),
        guard=MATCHED,
    ),
    Quirk(
        "label files of half of the images in upper case",
        YOLO + VOC[:1],
        each(lambda odd, picture: setattr(picture, "label", picture.label.replace(picture.stem, picture.stem.upper())), 2),
        "names found in different upper or lower case: ",
        touches=("names",),
        guard=form("in different upper or lower case", "_lower, _lower"),
    ),
    Quirk(
        "label files in another Unicode form",
        YOLO + VOC[:1],
        partial(rename, stem="café_{}", label=nfd, written=nfd),
        "names found in another Unicode form: ",
        touches=("names",),
        guard=form("in another Unicode form", "composed, composed"),
    ),
    Quirk(
        "label files with percent-encoded names",
        YOLO + VOC[:1],
        partial(rename, stem="Capture décran {}", label=quote, written=quote),
        "names found percent-encoded: ",
        touches=("names",),
        guard=form("percent-encoded", "_decoded, _decoded"),
    ),
    Quirk(
        "label files with underscores instead of blanks",
        YOLO + VOC[:1],
        partial(rename, stem="my photo {}", label=lambda name: name.replace(" ", "_"), written=lambda name: name.replace(" ", "_")),
        "names found with underscores instead of blanks: ",
        touches=("names",),
        guard=form("with underscores instead of blanks", "_joined, _joined"),
    ),
    Quirk(
        "label files with the prefix of an upload",
        YOLO + VOC[:1],
        partial(rename, stem="{}", label="ab12cd34-{}".format, written="ab12cd34-{}".format),
        "names found with the prefix of an upload: ",
        touches=("names",),
        guard=form("with the prefix of an upload", "_unprefixed, _joined"),
    ),
    Quirk(
        "images with the prefix of an upload",
        YOLO + VOC[:1],
        lambda odd: [setattr(p, "image", p.image.replace(f"{p.stem}.", f"ab12cd34-{p.stem}.")) for p in odd.pictures],
        "names found without the prefix of an upload: ",
        touches=("names",),
        guard=form("without the prefix of an upload", "_joined, _unprefixed"),
    ),
    Quirk(
        "label files in .TXT",
        YOLO,
        each(lambda odd, picture: setattr(picture, "label", picture.label.replace(".txt", ".TXT"))),
        touches=("label suffix",),
        guard=listing("if path.suffix.lower() in suffixes]", "if path.suffix in suffixes]"),
    ),
    Quirk(
        "label files called p0.png.txt",
        YOLO + VOC[:1],
        each(
            lambda odd, picture: setattr(
                picture, "label", str(Path(picture.label).with_name(Path(picture.image).name + Path(picture.label).suffix))
            )
        ),
        touches=("names", "label suffix", "suffix"),
        guard=names(
            "tried = [(name, not is_stem), (name, is_stem), *([(start, False)] if suffix.lower() in IMAGES else [])]",
            "tried = [(name, not is_stem)]",
        ),
    ),
    Quirk(
        "YOLO: a label file without image",
        YOLO,
        lambda odd: odd.extra.update({str(Path(odd.pictures[0].label).with_name("gone.txt")): b"0 .5 .5 .1 .1"}),
        "label files that belong to no image: 1",
        touches=("extra",),
        guard=yolo("for path in orphans if _is_like_labels", "for path in () if _is_like_labels"),
    ),
    Quirk(
        "YOLO: an image without label file",
        YOLO,
        without_label,
        "images without a label file, which are taken to show no object: 1",
        touches=("boxes", "names", "label suffix", "suffix"),
        guard=yolo('alone = (image["file_name"] for image in images if', 'alone = (image["file_name"] for image in () if'),
    ),
    Quirk(
        "names of bytes that are not UTF-8, as unzip leaves them",
        YOLO,
        lambda odd: [rename(odd, os.fsdecode(b"\xd5\xd5") + "{}"), without_label(odd)],
        "images without a label file, which are taken to show no object: 1",
        touches=("names", "boxes", "lists", "label suffix", "suffix"),
        guard="names are what the system gives",
    ),
    Quirk(
        "names with blanks and brackets",
        KINDS,
        partial(rename, stem="IMG [{}] (1)"),
        touches=("names",),
        guard="names are compared, and no patterns",
    ),
    Quirk(
        "images in deeper folders",
        YOLO + VOC + COCO[:1] + ("cvat",),
        each(in_folder),
        touches=("names", "label place"),
        guard=listing(
            "for folder, names, files in os.walk(top, onerror=errors.append, followlinks=True):",
            "for folder, names, files in [next(os.walk(top))]:",
        ),
    ),
    # what is an image
    Quirk(
        "files of macOS, called ._p0.png",
        KINDS,
        of_macos,
        touches=("extra macos",),
        guard=listing('yield folder, sorted(name for name in files if not name.startswith("."))', "yield folder, sorted(files)"),
    ),
    Quirk("a copy of an image in .ipynb_checkpoints", KINDS, of_jupyter, touches=("extra hidden",), guard=HIDDEN),
    Quirk(
        "a thumbnail in Synology's @eaDir",
        KINDS,
        of_synology,
        touches=("extra eadir",),
        guard=listing('if not name.startswith(".") and name not in NOT_THE_USERS)', 'if not name.startswith("."))'),
    ),
    *(
        Quirk(f"images in {end}", KINDS, each(partial(suffix, end)), touches=("suffix",), guard=listing(f'"{end}"', '"."'))
        for end in (".jfif", ".gif", ".jp2", ".avif", ".webp", ".tga", ".tif")
    ),
    Quirk(
        "half of the images in .jfif",
        KINDS,
        each(partial(suffix, ".jfif"), 2),
        touches=("suffix",),
        guard=listing('".jfif"', '"."'),
    ),
    Quirk(
        "images in .PNG",
        KINDS,
        each(partial(suffix, ".PNG")),
        touches=("suffix",),
        guard=listing("if path.suffix.lower() in suffixes]", "if path.suffix in suffixes]"),
    ),
    # names of classes
    *(
        Quirk(f"YOLO: class names in {name}", ("yolo flat",), partial(names_in, name), touches=("name file",), guard=guard)
        for name, guard in (
            ("_darknet.labels", yolo(', "_darknet.labels")', ")")),
            ("pets.names", yolo('or path.suffix.lower() == ".names"]', "]")),
            ("obj.names", yolo('or path.suffix.lower() == ".names"]', 'and path.suffix.lower() != ".names"]')),
            ("cat.txt, which obj.data names", yolo("ends_of(path, 2**12), re.M)", '"", re.M)')),
            ("Classes.txt", yolo("if path.name.lower() in NAME_FILES or", "if path.name in NAME_FILES or")),
        )
    ),
    *(
        Quirk(
            f"YOLO: classes called {' and '.join(words)}",
            ("yolo",),
            named(*words),
            touches=("classes",),
            guard=yolo("yaml.load(read_text(self.path), yaml.BaseLoader)", "yaml.safe_load(read_text(self.path))"),
        )
        for words in (("mask", "no"), ("on", "off"), ("010", "1_0"))
    ),
    Quirk(
        "YOLO: text as numbers of the names",
        ("yolo",),
        named("cat", "dog", text="names: {'0': cat, '1': dog}\n"),
        touches=("classes",),
        guard=yolo(
            "return {int(number): str(name) for number, name in sorted(", "return {number: str(name) for number, name in sorted("
        ),
    ),
    Quirk(
        "class names with blanks behind them",
        COCO,
        put(classes=["cat ", "dog "]),
        touches=("classes",),
        guard="names are taken as they are",
    ),
    # encodings
    *(
        Quirk(f"{kind} with a byte order mark", kinds, encode(kind, "utf-8-sig"), touches=(f"encoding of {kind}",), guard=guard)
        for kind, kinds, guard in (
            ("labels", YOLO, CODER),
            ("names", ("yolo flat",), CODER),
            ("lists", ("voc lists",), CODER),
            ("yaml", ("yolo",), "PyYAML skips it"),
            ("xml", (*VOC, "cvat"), "expat skips it"),
            ("json", COCO, (CODER, text_of("json_stream.py", 'encoding="utf-8-sig"', 'encoding="utf-8"'))),
        )
    ),
    *(
        Quirk(f"{kind} in UTF-16", kinds, encode(kind, "utf-16"), touches=(f"encoding of {kind}",), guard=CODER)
        for kind, kinds in (
            ("labels", YOLO),
            ("names", ("yolo flat",)),
            ("lists", ("voc lists",)),
            ("yaml", ("yolo",)),
            ("json", COCO),
        )
    ),
    *(
        Quirk(
            f"XML that declares {declared}",
            VOC,
            encoded(encoding, declared, *words),
            touches=("names", "classes", "encoding of xml"),  # names of files are written in it, too
            guard=guard,
        )
        for encoding, declared, words, guard in (
            ("utf-8", "utf8", ("Käfer", "Mücke"), text("ET.fromstring(text)", "ET.fromstring(path.read_bytes())")),
            ("gbk", "gbk", ("猫", "狗"), DECLARED),
            ("gbk", "gb2312", ("镕", "狗"), text("LARGER.get(encoding, encoding)", "encoding")),
            ("cp1252", "windows-1252", ("Käfer", "Mücke"), DECLARED),
            ("utf-16", "utf-16", ("Käfer", "Mücke"), CODER),
        )
    ),
    Quirk(
        "XML of an encoding that is not declared",
        VOC,
        encoded("gbk", "", "猫", "狗"),
        "; save it as UTF-8",
        2,
        ("names", "classes", "encoding of xml"),
        text("except (UnicodeDecodeError, LookupError) as error:", "except ZeroDivisionError as error:"),
    ),
    Quirk(
        "XML of an encoding that does not exist",
        VOC,
        encoded("utf-8", "ansi-x", "cat", "dog"),
        "unknown encoding: ansi-x; save it as UTF-8",
        2,
        ("names", "classes", "encoding of xml"),
        text("except (UnicodeDecodeError, LookupError) as error:", "except UnicodeDecodeError as error:"),
    ),
    # lists
    *(
        Quirk(f"YOLO: lists with lines such as {line}", ("yolo",), listed(line), touches=("lists",), guard=guard)
        for line, guard in (
            ("data/{image}", TAIL),
            ("{back}", names('name.replace("\\\\", "/"))  # URLs', "name)  # URLs")),
            ("/home/ann/sets/pets/{image}", TAIL),
            ("./{image}", "a path is taken as it is"),
        )
    ),
    Quirk(
        "YOLO: images listed in the YAML file",
        ("yolo",),
        list_in_yaml,
        touches=("lists", "names", "suffix"),
        guard=yolo("if place.is_dir() or place.suffix.lower() in IMAGES:", "if place.is_dir():"),
    ),
    Quirk(
        "YOLO: backslashes in the YAML file",
        ("yolo",),
        put(entries={"train": "images\\train", "val": "images\\val"}),
        touches=("lists",),
        guard=yolo('words = place.replace("\\\\", "/").split("/")', 'words = place.split("/")'),
    ),
    Quirk(
        "YOLO: path of another machine in the YAML file",
        ("yolo",),
        put(yaml="path: /home/ann/sets/pets\n"),
        touches=("yaml",),
        guard=yolo("self.root = root if os.path.isdir(root) else self.path.parent", "self.root = root"),
    ),
    Quirk(
        "VOC: blanks in listed names",
        ("voc lists",),
        lambda odd: [rename(odd, "my photo {}"), listed("{stem}")(odd)],
        touches=("names", "lists"),
        guard=voc(r"""for name in (whole, re.sub(r"\s+-?[01]$", "", whole).strip('"')):""", "for name in (whole.split()[0],):"),
    ),
    Quirk(
        "VOC: quotes around listed names",
        ("voc lists",),
        lambda odd: [rename(odd, "my photo {}"), listed('"{stem}"')(odd)],
        touches=("names", "lists"),
        guard=(
            voc("whole = line[1:-1].strip() if line[:1] == line[-1:] == '\"' else line", "whole = line"),
            voc("""whole).strip('"')):""", "whole)):"),
        ),
    ),
    Quirk(
        "VOC: a number behind listed names",
        ("voc lists",),
        listed("{stem}  1"),
        touches=("lists",),
        guard=voc(r're.sub(r"\s+-?[01]$", "", whole)', "whole"),
    ),
    Quirk(
        "VOC: names that are others with a number behind",
        ("voc lists",),
        lambda odd: [number_names(odd), listed("{stem}")(odd)],
        touches=("names", "lists"),
        guard=voc("for name in (whole, re.sub", "for name in (re.sub"),
    ),
    Quirk(
        "VOC: listed names of another case",
        ("voc lists",),
        put(listed=lambda picture: picture.stem.upper()),
        "names found in different upper or lower case: ",
        touches=("lists",),
        guard=form("in different upper or lower case", "_lower, _lower"),
    ),
    Quirk(
        "VOC: listed names with suffix",
        ("voc lists",),
        listed("{stem}.png"),
        touches=("lists",),
        guard=names("*([(start, False)] if suffix.lower() in IMAGES else [])", ""),
    ),
    Quirk(
        "VOC: lists called Train and Validation",
        ("voc lists",),
        put(lists={"train": "Train.txt", "val": "Validation.txt"}),
        "splits Train, Validation..._train: 5 images",
        touches=("lists",),
        guard=text_of(
            "folders/layouts.py",
            'of_split[{"trainval": "train", "dev": "val"}.get(one.lower(), split_named(one))].append(one)',
            "of_split[one].append(one)",
        ),
    ),
    # XML
    Quirk(
        "VOC: minimum above maximum",
        VOC,
        lambda odd: put(objects=lambda x0, y0, x1, y1, write=odd.objects: write(x1, y1, x0, y0))(odd),
        "boxes whose minimum is above their maximum, sorted: ",
        touches=("objects",),
        guard=voc("(x0, x1), (y0, y1) = sorted((x0, x1)), sorted((y0, y1))", "pass"),
    ),
    Quirk(
        "VOC: coordinates from 0 on",
        VOC,
        at_zero,
        "coordinates taken to start at 0, because one of them is 0: ",
        touches=("objects", "boxes"),
        guard=voc("first = 0 if any(_number(start) == 0 for start in starts) else 1", "first = 1"),
    ),
    Quirk(
        "VOC: sides of a box in another order",
        VOC,
        put(
            objects=lambda x0, y0, x1, y1: (
                f"<bndbox><ymax>{y1}</ymax><xmax>{x1}</xmax><ymin>{y0}</ymin><xmin> {x0} </xmin></bndbox>"
            )
        ),
        touches=("objects",),
        guard="sides are found by name",
    ),
    Quirk(
        "VOC: rotated boxes of roLabelImg",
        VOC,
        put(
            objects=lambda x0, y0, x1, y1: (
                f"<robndbox><cx>{(x0 - 1 + x1) / 2}</cx><cy>{(y0 - 1 + y1) / 2}</cy>"
                f"<w>{x1 - x0 + 1}</w><h>{y1 - y0 + 1}</h><angle>0</angle></robndbox>"
            )
        ),
        touches=("objects",),
        guard=voc("if rotated is not None:", "if False:"),
    ),
    Quirk(
        "VOC: polygons of LabelMe",
        VOC,
        put(
            objects=lambda x0, y0, x1, y1: (
                "<polygon>"
                + "".join(f"<pt><x>{x}</x><y>{y}</y></pt>" for x, y in ((x0 - 1, y0 - 1), (x1, y0 - 1), (x0 + 2, y1)))
                + "</polygon>"
            )
        ),
        touches=("objects",),
        guard=voc("if polygon is not None:", "if False:"),
    ),
    Quirk(
        "VOC: polygons with numbered sides",
        VOC,
        put(
            objects=lambda x0, y0, x1, y1: (
                "<polygon>"
                + "".join(
                    f"<x{n}>{x}</x{n}><y{n}>{y}</y{n}>"
                    for n, (x, y) in enumerate(((x0 - 1, y0 - 1), (x1, y0 - 1), (x0 + 2, y1)), 1)
                )
                + "</polygon>"
            )
        ),
        touches=("objects",),
        guard=voc("if polygon is not None:", "if False:"),
    ),
    Quirk(
        "VOC: objects without a box",
        VOC,
        put(objects=lambda *corners: "<pose>left</pose>"),
        "objects without a box: ...object 1 ('cat'): it has no <bndbox>, <robndbox> or <polygon>",
        2,
        ("objects", "classes"),
        voc('return {FAULT: ["objects without a box",', 'return {"bbox": [1, 1, 9, 9]} or {FAULT: ["",'),
    ),
    Quirk(
        "VOC: a side that is no number",
        VOC,
        put(
            objects=lambda x0, y0, x1, y1: f"<bndbox><xmin>left</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox>"
        ),
        "boxes that are not numbers: ...<xmin> in <bndbox> is 'left', not a number",
        2,
        ("objects",),
        voc("if (number := _number(text)) is None:", "if (number := _number(text)) is False:"),
    ),
    Quirk(
        "VOC: NaN as a side",
        VOC,
        put(objects=lambda x0, y0, x1, y1: f"<bndbox><xmin>nan</xmin><ymin>{y0}</ymin><xmax>{x1}</xmax><ymax>{y1}</ymax></bndbox>"),
        "boxes that are not numbers: ...<xmin> in <bndbox> is 'nan', not a number",
        2,
        ("objects",),
        voc("None if not math.isfinite(value) else", ""),
    ),
    Quirk(
        "VOC: a size of 0",
        VOC,
        put(size="<size><width>0</width><height>0</height></size>"),
        touches=("size",),
        guard=text_of("formats/format.py", 'not (image.get("height") and image.get("width"))]', '"height" not in image]'),
    ),
    Quirk(
        "VOC: a size with decimals",
        VOC,
        put(size="<size><width>96.0</width><height>72.0</height></size>"),
        touches=("size",),
        guard=voc("int(value) if value.is_integer() else value", "str(value)"),
    ),
    Quirk(
        "VOC: image names without suffix in the XML",
        VOC,
        lambda odd: [setattr(p, "written", p.stem) for p in odd.pictures],
        touches=("names", "written"),
        guard="an XML file's own name comes first",
    ),
    Quirk(
        "VOC: image names of other files in the XML",
        VOC,
        lambda odd: [setattr(p, "written", "x.png") for p in odd.pictures],
        touches=("names", "written"),
        guard="an XML file's own name comes first",
    ),
    Quirk(
        "VOC: XML files called otherwise than their images",
        VOC[:1],
        lambda odd: [setattr(p, "label", f"Annotations/note{n}.xml") for n, p in enumerate(odd.pictures)],
        touches=("names",),
        guard=voc("else names.entry(written[path], path)", "else names.entry(path.stem, path)"),
    ),
    Quirk(
        "VOC: & in a class name",
        VOC,
        put(classes=["cat & kitten", "dog"]),
        "is not XML: not well-formed",
        2,
        ("classes",),
        text("except (ET.ParseError, ValueError) as error:", "except ZeroDivisionError as error:"),
    ),
    # COCO
    *(
        Quirk(
            f"COCO: file names such as {text}",
            (*COCO, "cvat"),
            lambda odd, text=text: [setattr(p, "written", text.format(p.written)) for p in odd.pictures],
            touches=("names", "written"),
            guard=guard,
        )
        for text, guard in (
            ("/data/local-files/?d={}", names('unquote(written.partition("/local-files/?d=")[2]) or written', "written")),
            ("..\\..\\media\\upload\\4\\{}", names('name.replace("\\\\", "/"))  # URLs', "name)  # URLs")),
            ("/home/ann/pets/{}", TAIL),
            ("https://host/pets/{}?token=1", names(r"""re.sub(r"^\w+://[^/]*/([^?]*).*$", r"\1", name.replace""", "(name.replace")),
            ("ab12cd34-{}", form("with the prefix of an upload", "_unprefixed, _joined")),
        )
    ),
    Quirk(
        "COCO: percent-encoded file names",
        (*COCO, "cvat"),
        partial(rename, stem="Capture décran {}", written=quote),
        "names found percent-encoded: ",
        touches=("names", "written"),
        guard=form("percent-encoded", "_decoded, _decoded"),
    ),
    Quirk(
        "COCO: file names in another Unicode form",
        (*COCO, "cvat"),
        partial(rename, stem="café_{}", written=nfd),
        "names found in another Unicode form: ",
        touches=("names", "written"),
        guard=form("in another Unicode form", "composed, composed"),
    ),
    Quirk(
        "COCO: file names of another case",
        (*COCO, "cvat"),
        lambda odd: [setattr(p, "written", p.written.upper()) for p in odd.pictures],
        "names found in different upper or lower case: ",
        touches=("names", "written"),
        guard=form("in different upper or lower case", "_lower, _lower"),
    ),
    Quirk(
        "COCO: file names with another suffix",
        (*COCO, "cvat"),
        lambda odd: [setattr(p, "written", f"{p.stem}.jpeg") for p in odd.pictures],
        "names found with another suffix: ",
        touches=("names", "written"),
        guard=names("*([(start, False)] if suffix.lower() in IMAGES else [])", ""),
    ),
    Quirk(
        "COCO: file names without suffix",
        (*COCO, "cvat"),
        lambda odd: [setattr(p, "written", p.stem) for p in odd.pictures],
        touches=("names", "written"),
        guard=names("(name, is_stem), *([", "*(["),
    ),
    Quirk(
        "COCO: coco_url in the place of file names",
        COCO,
        lambda odd: odd.change.append(with_url_alone),
        touches=("names", "written"),
        guard=coco('url.rpartition("/")[2] if isinstance(url, str) else', "None if isinstance(url, str) else"),
    ),
    Quirk(
        "COCO: null as a file name",
        COCO,
        of_first("images", file_name=None),
        "file names that are not text: ",
        2,
        ("names", "written"),
        coco("if isinstance(written, str):", "if True:"),
    ),
    Quirk(
        "COCO: an image that is not there",
        COCO,
        partial(one_more, file_name="/home/ann/pets/gone.png"),
        "image files that are missing: ",
        2,
        ("images",),
        (
            names("if path := self.find(written, source):", "if (path := self.find(written, source)) or True:"),
            text_of("validation/check.py", '"are missing" if isinstance', '"are there" if isinstance'),
        ),
    ),
    Quirk(
        "COCO: an image under two ids",
        COCO,
        one_more,
        "images that are listed more than once: ",
        2,
        ("images",),
        table(
            'for at, heading in enumerate(("image ids that are not unique", "images that are listed more than once")):',
            'for at, heading in enumerate(("image ids that are not unique",)):',
        ),
    ),
    Quirk(
        "COCO: each annotation twice",
        COCO,
        lambda odd: odd.change.append(json_twice),
        "boxes that repeat another one of the same image and class, left out",
        touches=("boxes",),
        guard=table("rows = self._without_copies(", "rows = (lambda rows, *_: rows)("),
    ),
    Quirk(
        "COCO: ids as 1.0",
        COCO,
        lambda odd: odd.change.append(
            lambda content: ids(content, {("annotations", "image_id"): float, ("annotations", "category_id"): float})
        ),
        touches=("ids",),
        guard=coco("else isinstance(value, float) and value.is_integer()", "else False"),
    ),
    Quirk(
        "COCO: ids of images as text",
        COCO,
        lambda odd: odd.change.append(lambda content: ids(content, {("annotations", "image_id"): str, ("images", "id"): str})),
        touches=("ids",),
        guard=coco("ids[key].get(str(_whole(value)), -1)", "ids[key].get(value, -1)"),
    ),
    Quirk(
        "COCO: category_id as text",
        COCO,
        lambda odd: odd.change.append(lambda content: ids(content, {("annotations", "category_id"): str})),
        touches=("ids",),
        guard=coco("ids[key].get(str(_whole(value)), -1)", "ids[key].get(value, -1)"),
    ),
    Quirk(
        "COCO: ids of categories as text",
        COCO,
        lambda odd: odd.change.append(
            lambda content: ids(content, {("annotations", "category_id"): str, ("categories", "id"): str})
        ),
        touches=("ids",),
        guard=coco("value.isdecimal() if isinstance(value, str) else", "False if isinstance(value, str) else"),
    ),
    Quirk(
        "COCO: words as ids of categories",
        COCO,
        lambda odd: odd.change.append(lambda content: ids(content, {("categories", "id"): "c{}".format})),
        "ids that are not whole numbers: categories[0]: id 'c1'",
        2,
        ("ids",),
        coco("if fault := category_fault(category):", "if False:"),
    ),
    Quirk(
        "COCO: a category 0",
        COCO,
        lambda odd: odd.change.append(
            lambda content: ids(
                content,
                {("annotations", "category_id"): lambda number: number - 1, ("categories", "id"): lambda number: number - 1},
            )
        ),
        touches=("ids",),
        guard="ids are any whole numbers",
    ),
    Quirk("COCO: true and false as iscrowd", COCO, of_all("annotations", iscrowd=False), touches=("iscrowd",), guard="False is 0"),
    Quirk(
        "COCO: null as iscrowd",
        COCO,
        of_all("annotations", iscrowd=None),
        touches=("iscrowd",),
        guard=text_of("validation/rules.py", "not in (None, 0, 1):", "not in (0, 1):"),
    ),
    Quirk(
        "COCO: NaN in a box",
        COCO,
        of_first("annotations", bbox=[4, float("nan"), 20, 12]),
        "boxes that are not finite: ",
        2,
        ("boxes",),
        text_of("validation/rules.py", "if not all(map(is_number, box)):", "if False:"),
    ),
    Quirk(
        "COCO: NaN as area",
        COCO,
        of_all("annotations", area=float("nan")),
        "annotations whose area is not a number: ",
        2,
        ("boxes",),
        (
            text_of("validation/rules.py", "if value is not None and not is_number(value):", "if False:"),
            text_of("validation/rules.py", "if area is not None and not 0 <= area <= LARGEST_AREA:", "if False:"),
        ),
    ),
    Quirk(
        "COCO: NaN in a field that is not read",
        COCO,
        lambda odd: [of_all("images", score=float("nan"))(odd), of_all("annotations", score=float("nan"))(odd)],
        touches=("fields",),
        guard=coco('for side in ("height", "width") if side in image}', "for side in image}"),
    ),
]


def case(quirk: Quirk, kind: str) -> Case:
    """The row of a quirk, in one of its formats."""

    def run(folder: Path) -> Ending:
        odd = plain(kind)
        quirk.change(odd)
        return meet(folder, odd)

    return Case(quirk.what, run, quirk.says, quirk.code, guard=quirk.guard)


def on_a_strict_terminal(folder: Path) -> Ending:
    """Names that no encoding has are printed by a process whose terminal refuses them."""
    odd = plain("yolo flat")
    rename(odd, os.fsdecode(b"\xd5\xd5") + "{}")
    without_label(odd)
    words = [sys.executable, "-m", "cpvt_det", "check-data", str(odd.write(folder))]
    ended = subprocess.run(words, env={**os.environ, "PYTHONIOENCODING": "utf-8:strict"}, capture_output=True, text=True)
    return Ending(ended.returncode, ended.stdout + ended.stderr)


CASES = [
    *(case(quirk, quirk.kinds[0]) for quirk in QUIRKS),
    Case(
        "names of bytes that are not UTF-8, on a terminal of UTF-8",
        on_a_strict_terminal,
        "images without a label file, which are taken to show no object: 1, such as ...\\udcd5\\udcd5p1.png",
        0,
        guard=Cut("cli/__init__.py", 'stream.reconfigure(errors="backslashreplace")', "pass"),
    ),
]
