# SPDX-License-Identifier: Apache-2.0
"""From a file, a folder or a dict to weights under our names, and what the rows of their class heads mean."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from cpvt_det.checkpoint.convert import convert_state_dict, detect_source
from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.data.coco import Classes
from cpvt_det.data.coco_classes import COCO_ROWS
from cpvt_det.errors import WeightsError

CLASS_HEAD = re.compile(r"(^|\.)class_embed\.(\d+\.)?(weight|bias)$")
FOLDER_FILES = ("model.safetensors", "pytorch_model.bin")


@dataclass
class Weights:
    """Weights under our names.

    Attributes:
        state_dict: names -> tensors, on the CPU where they come from a file.
        classes: one for each row of a class head but that of "no object"; ``None`` where that is not known.
        source: whose names they had, a key of ``CONVERSIONS``; ``None``: ours.
        origin: what messages call them.
    """

    state_dict: dict[str, Tensor]
    classes: Classes | None
    source: str | None
    origin: str

    def as_checkpoint(self) -> dict[str, Any]:
        """The layout of our checkpoints, with the classes where they are known."""
        if self.classes is None:
            return {"model": self.state_dict}
        classes = {"ids": list(self.classes.ids), "names": list(self.classes.names)}
        return {"model": self.state_dict, "cpvt_det": {"classes": classes}}


def read_weights(weights: str | Path | Mapping[str, Any], source: str = "auto") -> Weights:
    """Read weights of ours or of a known source.

    Args:
        weights: a file; a folder with ``model.safetensors`` or ``pytorch_model.bin``, and perhaps a ``config.json``; or what
            such a file holds.
        source: whose names they have, a key of ``CONVERSIONS``; ``auto`` looks at the names.

    Returns:
        Under our names. Classes are those the checkpoint tells; else COCO's, with ids as rows, for heads of 91 or 92 rows.

    Raises:
        WeightsError: what cannot be read, or does not agree with itself.
        UnknownNameError: an unknown source.
    """
    if isinstance(weights, Mapping):
        origin, checkpoint, classes = "the given weights", weights, None
    else:
        path = _file_of(Path(weights)) if Path(weights).is_dir() else weights
        origin, checkpoint, classes = str(path), read_checkpoint(path), _folder_classes(Path(path).with_name("config.json"))
    state_dict = state_dict_of(checkpoint, origin)
    found = detect_source(state_dict) if source == "auto" else source
    if found is not None:
        state_dict = convert_state_dict(state_dict, found)
    return Weights(state_dict, _classes_of(checkpoint, state_dict, classes, origin), found, origin)


def _file_of(folder: Path) -> Path:
    for name in FOLDER_FILES:
        if (folder / name).is_file():
            return folder / name
    raise WeightsError(f"the folder {folder} has neither {' nor '.join(FOLDER_FILES)}")


def _folder_classes(config: Path) -> Classes | None:
    """``id2label`` of the ``config.json`` that transformers writes beside weights; rows without a class are "N/A" there."""
    if not config.is_file():
        return None
    try:
        labels = {int(row): str(name) for row, name in json.loads(config.read_text(encoding="utf-8"))["id2label"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None  # some other config.json
    names = [labels.get(row, "N/A") for row in range(max(labels, default=-1) + 1)]
    names = [f"unused_{row}" if name == "N/A" else name for row, name in enumerate(names)]
    return Classes(tuple(range(len(names))), tuple(names))


def _classes_of(checkpoint: Mapping, state_dict: Mapping[str, Tensor], classes: Classes | None, origin: str) -> Classes | None:
    rows = next((len(tensor) for name, tensor in state_dict.items() if CLASS_HEAD.search(name)), None)
    if rows is None:
        return None
    node = checkpoint.get("cpvt_det")
    node = node.get("classes") if isinstance(node, Mapping) else None
    if isinstance(node, Mapping):
        classes = Classes(tuple(node.get("ids", ())), tuple(node.get("names", ())))
        if len(classes.ids) != len(classes.names) or rows - len(classes) not in (0, 1):
            raise WeightsError(
                f"{origin}: a class head of {rows} rows, but {len(classes.names)} class names and {len(classes.ids)} ids"
            )
    if classes is None and rows in (len(COCO_ROWS), len(COCO_ROWS) + 1):
        classes = COCO_ROWS
    return classes if classes is not None and rows - len(classes) in (0, 1) and _unique(classes.names) else None


def _unique(names: tuple[str, ...]) -> bool:
    return len(set(names)) == len(names)
