# SPDX-License-Identifier: Apache-2.0
"""Find files by the names that people and tools give them, such as the image that a label file belongs to.

A name is first compared letter by letter, then in each of the other ``FORMS``. The first form in which the name matches a file
decides. A match in any form but the first is reported.
"""

import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any
from urllib.parse import unquote

from cpvt_det.common.errors import DataError
from cpvt_det.data.listing import IMAGES, Listing, cannot_read, split_named
from cpvt_det.data.text import composed
from cpvt_det.data.validation.rules import FAULT

KINDS = {"image", "images", "img", "imgs", "jpegimages", "jpg", "png", "label", "labels", "annotation", "annotations", "annots"}
KINDS |= {"xml", "xmls", "txt", "txts", "bbox", "bboxes"}
"""Folder names that describe the kind of files in a folder, not which images they belong to."""


def _lower(name: str) -> str:
    return composed(composed(name).casefold())


def _decoded(name: str) -> str:
    return _lower(unquote(name))


def _joined(name: str) -> str:
    return re.sub(r"[\s_]+", "_", _decoded(name).strip())


def _unprefixed(name: str) -> str:
    return re.sub(r"^(?!\d{8})[0-9a-f]{8}-(?=.)", "", _joined(name))  # eight digits are a date


FORMS: tuple[tuple[str, Callable[[str], str], Callable[[str], str]], ...] = (
    ("", str, str),
    ("in another Unicode form", composed, composed),
    ("in different upper or lower case", _lower, _lower),
    ("percent-encoded", _decoded, _decoded),
    ("with underscores instead of blanks", _joined, _joined),
    ("with the prefix of an upload", _unprefixed, _joined),
    ("without the prefix of an upload", _joined, _unprefixed),
)
"""How a written name differs from a file's name, and functions that convert the written name and the file's name for comparison.

Label Studio percent-encodes names, writes underscores for blanks, and puts eight hexadecimal digits and a hyphen before them.
"""

Folder = tuple[str, ...]
"""Names of folders, from the root down."""
Ranks = dict[str, int]
"""Path -> rank of the match, 0 for the best."""


class Names:
    """Files that can be found by name.

    Args:
        files: files to find, images or others.
        listing: listing of the folder that they are in.
    """

    def __init__(self, files: Sequence[Path], listing: Listing):
        self.listing = listing
        self._files = {str(path): path for path in files}  # text is ten times faster to split than paths
        self._found: dict[str, dict[str, None]] = defaultdict(dict)
        self._bases: dict[Path, str] = {}
        self._indices: dict[tuple[int, bool], dict[str, dict[Folder, list[str]]]] = {}
        self._folders: dict[str, Folder] = {}

    def find(self, written: str, source: Path, loosely: bool = True) -> Path | None:
        """The file that an annotation file names, perhaps by a path on another machine; ``None`` if there is no such file.

        Args:
            written: name or path as it stands in the annotation file, with or without suffix.
            source: the annotation file.
            loosely: whether to compare the name in all forms, not only letter by letter.

        Raises:
            DataError: a name that could mean several files.
        """
        name = unquote(written.partition("/local-files/?d=")[2]) or written  # Label Studio's
        name = re.sub(r"^\w+://[^/]*/([^?]*).*$", r"\1", name.replace("\\", "/"))  # URLs
        *folders, last = parts = [part for part in name.split("/") if part not in ("", ".", "..")] or [""]
        for base in (self._bases.get(source, source.parent), source.parent, self.listing.root):
            if (path := os.path.normpath(os.path.join(base, name))) in self._files:
                return self._files[path]
        outside = source.parent / name
        if last and os.path.isfile(outside) and not self.listing.parts_of(outside):
            return outside
        wanted = (split_named(name) or _lower(name) for name in reversed(folders))
        known = next((name for name in wanted if name in self._known_folders), None)
        for number, (differs, form, _) in enumerate(FORMS[: len(FORMS) if loosely else 1] if last else ()):
            groups = self._called(number, last)
            candidates = [path for folder, paths in groups.items() if known is None or known in folder for path in paths]
            if candidates:
                path = self._files[self._nearest(candidates, list(map(form, folders)), f"{written!r} in {source}", source, form)]
                if path.parts[-len(parts) :] == tuple(parts):
                    self._bases[source] = str(path.parents[len(parts) - 1])
                differs = differs or "with another suffix" * (path.suffix.lower() in IMAGES and last not in (path.name, path.stem))
                own, split = self.listing.parts_of(path)[:-1], self.listing.split_of(source, with_name=True)
                compared = folders[-1:] if re.match(r"/|\w:/", name) else folders  # not the folders of another machine
                is_else = any(form(one) != form(other) for one, other in zip(compared[::-1], own[::-1], strict=False))
                elsewhere = "in another folder" * (is_else or bool(split and self.listing.split_of(path) not in ("", split)))
                if differs or elsewhere:
                    self._found[differs or elsewhere][f"{source}: {written} is {path}"] = None
                return path
        return None

    def entry(self, written: str, source: Path) -> dict[str, Any]:
        """The entry of an image in a data set's sections, without id: the path that :meth:`find` returns, or else a fault."""
        if path := self.find(written, source):
            return {"file_name": str(path)}
        unreadable = self._unreadable[os.path.splitext(os.path.basename(written.replace("\\", "/")))[0]]
        why = f"{source} names {written!r}, and no image below {self.listing.root} has this name{cannot_read(unreadable)}"
        name = written.encode("utf-8", "replace").decode().replace("\0", "?") or "?"
        split = self.listing.split_of(source, with_name=True)
        return {"file_name": name, "split": split, FAULT: ["image files that are missing", why]}

    def pair(self, labels: Sequence[Path], written: Mapping[Path, str] = MappingProxyType({})) -> dict[Path, Path]:
        """The file that each label file belongs to, matched by names without suffix; each file is used at most once.

        Folders must agree, too: ``labels/train/1.txt`` belongs to ``images/train/1.jpg``, and never to ``images/val/1.jpg``.
        Other differences between folders are ignored only if no label file finds an image otherwise.

        Args:
            labels: label files.
            written: label file -> the image name in its content, which decides if several images are possible.

        Raises:
            DataError: a label file that could belong to several files.
        """
        return self._pair(labels, written, self._in_agreement) or self._pair(labels, written, self._without_contradiction)

    @property
    def notes(self) -> dict[str, Iterable[str]]:
        """Notes, for a data set's sections, on names found in another form."""
        return {f"names found {differs}": places for differs, places in self._found.items()}

    def _index(self, number: int, is_whole: bool) -> dict[str, dict[Folder, list[str]]]:
        """Files by their folder and by one form of their names, with or without suffix."""
        if (number, is_whole) not in self._indices:
            found, form = defaultdict(lambda: defaultdict(list)), FORMS[number][2]
            for path in self._files:
                folder, name = os.path.split(path)
                found[form(name if is_whole else os.path.splitext(name)[0])][self._folder(folder)].append(path)
            self._indices[number, is_whole] = found
        return self._indices[number, is_whole]

    def _called(self, number: int, name: str, is_stem: bool = False) -> Mapping[Folder, Sequence[str]]:
        """Files with a given name in one form. The suffix of such a file may be the name's, a different one, or missing."""
        form, (start, suffix) = FORMS[number][1], os.path.splitext(name)
        tried = [(name, not is_stem), (name, is_stem), *([(start, False)] if suffix.lower() in IMAGES else [])]
        return next((groups for one, is_whole in tried if (groups := self._index(number, is_whole).get(form(one)))), {})

    def _nearest(
        self, candidates: Sequence[str], folders: Sequence[str], what: str, source: Path, form: Callable[[str], str]
    ) -> str:
        """The best of several files with the same name, chosen by matching parent folders, then by split, then by distance."""
        split, around = self.listing.split_of(source, with_name=True), set(source.parent.parts)

        def rank(path: str) -> tuple[int, bool, int, int]:
            parts = Path(path).parent.parts
            own = [form(part) for part in parts]
            alike = max((n for n in range(len(folders) + 1) if own[len(own) - n :] == folders[len(folders) - n :]), default=0)
            return -alike, self.listing.split_of(Path(path)) != split, -len(around & set(parts)), len(parts)

        return candidates[0] if len(candidates) == 1 else _lowest(what, {path: rank(path) for path in candidates})

    def _pair(self, labels: Sequence[Path], written: Mapping[Path, str], ranked: Callable[..., Ranks]) -> dict[Path, Path]:
        pairs: dict[Path, Path] = {}
        left, taken = {str(label): label for label in labels}, set()
        for number, (differs, *_) in enumerate(FORMS):
            found = []
            for text, label in left.items():
                folder, name = os.path.split(text)
                ranks = ranked(folder, self._called(number, os.path.splitext(name)[0], is_stem=True))
                ranks = {path: rank for path, rank in ranks.items() if path not in taken}
                if ranks:
                    said = os.path.basename(written.get(label, "").replace("\\", "/"))
                    path = _lowest(text, {path: ranks[path] for path in ranks if os.path.basename(path) == said} or ranks)
                    found.append((ranks[path], text, path))
            for _, text, path in sorted(found):  # several label files of one image: the usual folder first
                if path not in taken:
                    taken.add(path)
                    pairs[left.pop(text)] = self._files[path]
                    if differs:
                        self._found[differs][f"{text} belongs to {path}"] = None
        return pairs

    def _in_agreement(self, folder: str, groups: Mapping[Folder, Sequence[str]]) -> Ranks:
        """Files whose folder agrees with the folder of a label file, and how well the two agree; 0 is best.

        The best agreement is a folder ``labels`` in place of ``images``, as in Ultralytics' layout. The next best is the same
        folder.
        """
        own = self._folder(folder)
        if own in groups:
            is_usual = "labels" in folder.removeprefix(str(self.listing.root)).lower().split(os.sep)
            return {path: 0 if is_usual else 1 if os.path.dirname(path) == folder else 2 for path in groups[own]}
        return {path: 3 for other, paths in groups.items() if set(own) < set(other) for path in paths}

    def _without_contradiction(self, folder: str, groups: Mapping[Folder, Sequence[str]]) -> Ranks:
        """Files that are not in another split, and that are below every known folder in the label file's path."""
        own, split = set(self._folder(folder)) & self._known_folders, self.listing.split_of(Path(folder, "x"))
        paths = [path for other, paths in groups.items() if own <= set(other) for path in paths]
        return {path: 0 for path in paths if not split or self.listing.split_of(Path(path)) in ("", split)}

    @cached_property
    def _unreadable(self) -> Mapping[str, list[Path]]:
        """Images that cannot be read here, by their names without suffix."""
        found = defaultdict(list)
        for path in self.listing.unreadable:
            found[path.stem].append(path)
        return found

    @cached_property
    def _known_folders(self) -> set[str]:
        return {name for folder in {os.path.dirname(path) for path in self._files} for name in self._folder(folder)}

    def _folder(self, folder: str) -> Folder:
        """The names of the folders from the root down to this one, without those in ``KINDS``."""
        if folder not in self._folders:
            parts = map(_lower, self.listing.parts_of(Path(folder)))
            self._folders[folder] = tuple(split_named(part) or part for part in parts if part not in KINDS)
        return self._folders[folder]


def _lowest(what: str, ranks: Mapping[str, Any]) -> str:
    """The file with the lowest rank.

    Raises:
        DataError: two files share the lowest rank.
    """
    first, *others = sorted(ranks, key=lambda path: (ranks[path], path))
    if others and ranks[first] == ranks[others[0]]:
        raise DataError(f"{what} could belong to {first} or to {others[0]}; give only one of them this name")
    return first
