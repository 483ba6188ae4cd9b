# SPDX-License-Identifier: Apache-2.0
"""Files by the names that people and tools write for them: the one way from a name, or from a label file, to its image.

A name is compared letter by letter first, then in the forms of ``FORMS``, one after the other, and the first form in which a file
has it decides. What was found in another form than the first is reported.
"""

import os
import re
import unicodedata
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote, urlsplit

from cpvt_det.data.listing import IMAGES, Listing
from cpvt_det.data.validation.rules import FAULT
from cpvt_det.errors import DataError

KINDS = {"image", "images", "img", "imgs", "jpegimages", "jpg", "png", "label", "labels", "annotation", "annotations", "annots"}
KINDS |= {"xml", "xmls", "txt", "txts", "bbox", "bboxes"}
"""Names of folders that tell what kind of files is in them, not which images these are of."""


def _composed(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _lower(name: str) -> str:
    return _composed(_composed(name).casefold())


def _decoded(name: str) -> str:
    return _lower(unquote(name))


def _joined(name: str) -> str:
    return re.sub(r"[\s_]+", "_", _decoded(name).strip())


def _unprefixed(name: str) -> str:
    return re.sub(r"^[0-9a-f]{8}-(?=.)", "", _joined(name))


FORMS: tuple[tuple[str, Callable[[str], str], Callable[[str], str]], ...] = (
    ("", str, str),
    ("in another Unicode form", _composed, _composed),
    ("in other upper or lower case", _lower, _lower),
    ("percent-encoded", _decoded, _decoded),
    ("with underscores for blanks", _joined, _joined),
    ("with the prefix of an upload", _unprefixed, _joined),
    ("without the prefix of an upload", _joined, _unprefixed),
)
"""How a name differs from that of the file; what is made of the name, and of the file's, before they are compared.

Label Studio percent-encodes names, writes underscores for blanks, and puts eight hexadecimal digits and a hyphen before them.
"""


class Names:
    """Files that are looked for by name.

    Args:
        files: files to find, images or others.
        listing: the folder that they are in.
    """

    def __init__(self, files: Sequence[Path], listing: Listing):
        self.files = files
        self.listing = listing
        self._found: dict[str, dict[str, None]] = defaultdict(dict)
        self._known = set(files)
        self._indices: dict[tuple[int, bool], Mapping[str, list[Path]]] = {}
        self._bases: dict[Path, Path] = {}
        self._folders: dict[Path, tuple[str, ...]] = {}

    def find(self, written: str, source: Path, loosely: bool = True) -> Path | None:
        """The file that an annotation file names, perhaps below folders of another machine; ``None`` where there is none.

        Args:
            written: name or path, as the annotation file has it; with or without suffix.
            source: the annotation file.
            loosely: compare it in all forms, not letter by letter alone.

        Raises:
            DataError: several files that it could be.
        """
        name = re.sub(r"^.*[?&]d=", "", written).replace("\\", "/")  # Label Studio's /data/local-files/?d=PATH
        name = urlsplit(name).path if "://" in name else name
        *folders, last = [part for part in name.split("/") if part not in ("", ".", "..")] or [""]
        for base in (self._bases.get(source, source.parent), source.parent, self.listing.root):
            if (path := base / name) in self._known:
                self._bases[source] = base
                return path
        if last and os.path.isfile(source.parent / name) and not self.listing.parts_of(source.parent / name):
            return source.parent / name  # outside the folder
        known = next((name for name in map(_lower, reversed(folders)) if name in self._known_folders), None)
        for number, (differs, form, _) in enumerate(FORMS[: len(FORMS) if loosely else 1] if last else ()):
            candidates = [path for path in self._called(number, last) if known is None or known in self._folder(path)]
            if candidates:
                path = self._nearest(candidates, [form(folder) for folder in folders], source, form)
                differs = differs or (
                    "with another suffix" if path.suffix.lower() in IMAGES and last not in (path.name, path.stem) else ""
                )
                self._report(differs, f"{source}: {written} is {path}")
                return path
        return None

    def entry(self, written: str, source: Path) -> dict[str, Any]:
        """The entry of an image in a data set's sections, without id: with the path that :meth:`find` finds, or as a fault."""
        path = self.find(written, source)
        if path is not None:
            return {"file_name": str(path)}
        stem = Path(written.replace("\\", "/")).stem
        why = f"{source} names {written!r}, and no image below {self.listing.root} is called so"
        why += "".join(
            f"; {path} cannot be read here: convert it to JPEG or PNG" for path in self.listing.unreadable if path.stem == stem
        )
        split = self.listing.split_of(source, with_name=True)
        return {"file_name": written, "split": split, FAULT: ["image files that are missing", why]}

    def pair(self, labels: Sequence[Path], written: Mapping[Path, str] = MappingProxyType({})) -> dict[Path, Path]:
        """The file of each label file, by their names without suffix, each file at most once.

        Args:
            labels: label files.
            written: the name of its image that a label file has in it, which decides between several.

        Folders have to agree, too: ``labels/train/1.txt`` is of ``images/train/1.jpg``, and never of ``images/val/1.jpg``. Only
        where no label file at all finds its image in this way, folders may have other names.

        Raises:
            DataError: a label file that could be of several.
        """
        return self._pair(labels, written, self._agreement) or self._pair(labels, written, self._no_contradiction)

    def notes(self) -> list[dict[str, str]]:
        """Notes of a data set's sections on what was found in another form."""
        return [note for differs, places in self._found.items() for note in notes_of(f"names found {differs}", places)]

    def _report(self, differs: str, place: str) -> None:
        if differs:
            self._found[differs][place] = None

    def _index(self, number: int, whole: bool) -> Mapping[str, list[Path]]:
        """Files by a form of their whole names, or of their names without suffix."""
        if (number, whole) not in self._indices:
            found, form = defaultdict(list), FORMS[number][2]
            for path in self.files:
                found[form(path.name if whole else path.stem)].append(path)
            self._indices[number, whole] = found
        return self._indices[number, whole]

    def _called(self, number: int, name: str, is_stem: bool = False) -> Sequence[Path]:
        """Files of a name in one form: of the name with its suffix, without one, or with another one."""
        form, (start, suffix) = FORMS[number][1], os.path.splitext(name)
        tried = [(name, not is_stem), (name, is_stem), *([(start, False)] if suffix.lower() in IMAGES else [])]
        return next((paths for one, whole in tried if (paths := self._index(number, whole).get(form(one)))), ())

    def _nearest(self, candidates: Sequence[Path], folders: Sequence[str], source: Path, form: Callable[[str], str]) -> Path:
        """Of files of one name, the one whose folders end as the written ones, then one of the file's split, then the closest."""
        split, around = self.listing.split_of(source, with_name=True), set(source.parent.parts)

        def rank(path: Path) -> tuple[int, bool, int, int]:
            own = [form(part) for part in path.parent.parts]
            alike = max((n for n in range(len(folders) + 1) if own[len(own) - n :] == folders[len(folders) - n :]), default=0)
            return -alike, self.listing.split_of(path) != split, -len(around & set(path.parent.parts)), len(path.parts)

        return candidates[0] if len(candidates) == 1 else _lowest(source, candidates, rank)

    def _pair(
        self, labels: Sequence[Path], written: Mapping[Path, str], agreement: Callable[[Path, Path], int | None]
    ) -> dict[Path, Path]:
        pairs: dict[Path, Path] = {}
        taken: set[Path] = set()
        for number, (differs, *_) in enumerate(FORMS):
            found = []
            for label in labels:
                candidates = () if label in pairs else self._called(number, label.stem, is_stem=True)
                ranks = {path: rank for path in candidates if path not in taken and (rank := agreement(label, path)) is not None}
                if ranks:
                    name = os.path.basename(written.get(label, "").replace("\\", "/"))
                    path = _lowest(label, [path for path in ranks if path.name == name] or list(ranks), ranks.__getitem__)
                    found.append((ranks[path], label, path))
            for _, label, path in sorted(found):  # of several of one image, the one in the usual folder
                if path not in taken:
                    taken.add(path)
                    pairs[label] = path
                    self._report(differs, f"{label} is of {path}")
        return pairs

    def _agreement(self, label: Path, path: Path) -> int | None:
        """How well the folders of a label file and of an image go together, 0 best; ``None``: not at all.

        Ultralytics' ``labels`` in the place of ``images`` is best, then the same folder.
        """
        if self._folder(label) == self._folder(path):
            return 0 if "labels" in map(str.lower, self.listing.parts_of(label.parent)) else 1 if label.parent == path.parent else 2
        return 3 if set(self._folder(label)) < set(self._folder(path)) else None

    def _no_contradiction(self, label: Path, path: Path) -> int | None:
        """0, unless the two are of other splits, or the label file is in a folder of a name that folders of images have."""
        splits = {self.listing.split_of(label), self.listing.split_of(path)} - {""}
        return 0 if len(splits) < 2 and set(self._folder(label)) & self._known_folders <= set(self._folder(path)) else None

    @cached_property
    def _known_folders(self) -> set[str]:
        return {name for path in self.files for name in self._folder(path)}

    def _folder(self, path: Path) -> tuple[str, ...]:
        """The names of a file's folders below the root, without those of ``KINDS``."""
        if path.parent not in self._folders:
            parts = map(_lower, self.listing.parts_of(path.parent))
            self._folders[path.parent] = tuple(part for part in parts if part not in KINDS)
        return self._folders[path.parent]


def _lowest(source: Path, candidates: Sequence[Path], rank: Callable[[Path], object]) -> Path:
    """The candidate of the lowest rank.

    Raises:
        DataError: two that share it.
    """
    ranked = sorted(candidates, key=lambda path: (rank(path), path))
    if len(ranked) > 1 and rank(ranked[0]) == rank(ranked[1]):
        raise DataError(f"{source} belongs to {ranked[0]} or to {ranked[1]}; give only one of them this name")
    return ranked[0]


def notes_of(heading: str, places: Iterable[object]) -> list[dict[str, str]]:
    """A note of a data set's sections for each of some places."""
    return [{"heading": heading, "where": str(place)} for place in places]
