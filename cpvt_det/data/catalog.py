# SPDX-License-Identifier: Apache-2.0
"""The files of data sets, by name."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.data.formats.format import find_format
from cpvt_det.data.storage import is_url


@dataclass(frozen=True)
class DatasetFiles:
    """The files of a data set.

    Attributes:
        name: registered name of the data set.
        annotations: path of the COCO JSON, or of a folder or YAML file in another format.
        image_root: folder, tar files or URL that COCO's file names are relative to, as described in ``data/images.py``.
        split: name of the split, for formats other than COCO.
    """

    name: str
    annotations: Path
    image_root: Path | str = Path()
    split: str = ""

    @property
    def is_coco(self) -> bool:
        """Whether ``annotations`` is, or should be, a COCO JSON."""
        return not self.annotations.is_dir() and find_format(self.annotations) is None


def find_datasets(names: Sequence[str], registered: Sequence[Sequence[str]] = ()) -> list[DatasetFiles]:
    """Find data sets by name: those registered in the config, and the built-in ``coco_2017_train``, ``coco_2017_val``,
    ``shapes_train`` and ``shapes_val``.

    The built-in ones must be in the folder that the environment variable ``DETECTRON2_DATASETS`` names, by default ``./datasets``.

    Args:
        names: ``DATASETS.TRAIN`` or ``DATASETS.TEST``.
        registered: ``DATASETS.REGISTER``, in the form that :func:`registered_datasets` takes.

    Raises:
        ConfigError: an entry that is not a triple.
        UnknownNameError: a name that is neither built-in nor registered.
    """
    known = {files.name: files for files in [*builtin_datasets(), *registered_datasets(registered)]}
    for name in names:
        if name not in known:
            raise UnknownNameError("data set", name, known, "register your own in DATASETS.REGISTER")
    return [known[name] for name in names]


def builtin_datasets() -> list[DatasetFiles]:
    """COCO 2017 in its standard layout, and the shapes data set as ``cpvt-det shapes datasets/shapes`` draws it."""
    root = Path(os.environ.get("DETECTRON2_DATASETS", "datasets")).expanduser()
    coco, shapes = root / "coco", root / "shapes"
    jsons = {split: coco / f"annotations/instances_{split}2017.json" for split in ("train", "val")}
    found = [DatasetFiles(f"coco_2017_{split}", path, coco / f"{split}2017") for split, path in jsons.items()]
    return found + [DatasetFiles(f"shapes_{split}", shapes / f"annotations/{split}.json", shapes / split) for split in jsons]


def registered_datasets(registered: Sequence[Sequence[str]]) -> list[DatasetFiles]:
    """The data sets of ``DATASETS.REGISTER``.

    Args:
        registered: triples. Each consists either of a name, a COCO JSON and an image root (a folder, tar files or a URL), or of a
            name, a path and a split. In the second case, the path is the folder of a YOLO or a Pascal VOC data set, or YOLO's
            YAML file.

    Raises:
        ConfigError: an entry that is not a triple of strings.
    """
    found = []
    for entry in registered:
        if not isinstance(entry, (list, tuple)) or len(entry) != 3 or not all(isinstance(part, str) for part in entry):
            raise ConfigError(
                f"DATASETS.REGISTER must contain [name, COCO JSON, image folder] or [name, folder, split] triples, got {entry!r}"
            )
        name, annotations, root_or_split = entry
        files = DatasetFiles(name, Path(annotations).expanduser())
        if files.is_coco:
            root = root_or_split.rstrip("/") if is_url(root_or_split) else Path(root_or_split).expanduser()
            found.append(replace(files, image_root=root))
        else:
            found.append(replace(files, split=root_or_split))
    return found
