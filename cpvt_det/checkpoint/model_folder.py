# SPDX-License-Identifier: Apache-2.0
"""A trained model as a folder: ``config.yaml``, ``model.safetensors`` and ``classes.json``, each readable without this package.

``classes.json`` is ``[{"id": 1, "name": "circle"}, ...]``, the categories of the data; the index in the list is the label.
If its score thresholds are known, the folder also has ``thresholds.json``: ``{"overall": 0.31, "classes": [0.29, ...]}``.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fvcore.common.config import CfgNode
from torch import Tensor

from cpvt_det.checkpoint.files import write_checkpoint
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import WeightsError, first_line
from cpvt_det.common.files import atomic_file, write_json
from cpvt_det.common.structures import Thresholds
from cpvt_det.config import get_cfg

CONFIG, WEIGHTS, CLASSES, THRESHOLDS = "config.yaml", "model.safetensors", "classes.json", "thresholds.json"


def save_model(
    folder: str | Path, state_dict: Mapping[str, Tensor], classes: Classes, config: str, thresholds: Thresholds | None = None
) -> None:
    """Write a model folder. If config, weights or classes cannot be written, the old files stay.

    Args:
        folder: path of the folder; it is created if it does not exist.
        state_dict: tensors under our names, on any device.
        classes: classes that the labels stand for.
        config: config of the model, as YAML.
        thresholds: score thresholds of the model, if they are known.

    Raises:
        WeightsError: a folder that cannot be created or written to.
        RunStoppedError: weights that cannot be written, for example because the disk is full.
    """
    folder = Path(folder).expanduser()
    # Cloned, because heads shared by several decoder layers have several names, which safetensors refuses.
    tensors = {name: tensor.detach().cpu().clone() for name, tensor in state_dict.items()}
    categories = [{"id": class_id, "name": name} for class_id, name in zip(classes.ids, classes.names, strict=True)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_file(folder / CONFIG) as config_file, atomic_file(folder / CLASSES) as classes_file:
            config_file.write(config.encode())
            classes_file.write((json.dumps(categories, indent=1, ensure_ascii=False) + "\n").encode())
            write_checkpoint(tensors, folder / WEIGHTS)
        (folder / THRESHOLDS).unlink(missing_ok=True)  # thresholds of an earlier model
        if thresholds is not None:
            write_json(thresholds.state_dict(), folder / THRESHOLDS, indent=1)
    except OSError as error:
        raise WeightsError(f"cannot write the model folder {folder}: {error.strerror}") from error


def without_places(cfg: CfgNode) -> CfgNode:
    """A copy of a config without local paths, data addresses or callbacks. Names of weights stay, except ``MODEL.WEIGHTS``."""
    cfg, default = cfg.clone(), get_cfg()
    cfg.OUTPUT_DIR, cfg.DATASETS.REGISTER, cfg.MODEL.WEIGHTS = default.OUTPUT_DIR, [], ""
    cfg.MODEL.WEIGHTS_SHA256 = ""
    cfg.DATASETS.CACHE, cfg.CALLBACKS = default.DATASETS.CACHE, []
    backbone, classifier = cfg.MODEL.BACKBONE, cfg.MODEL.CLASSIFIER
    for node, key in ((backbone, "WEIGHTS"), (classifier, "TEACHER"), (classifier, "TEACHER_WEIGHTS")):
        value = node[key].removeprefix("timm/")  # prefix of a teacher's name
        if Path(value).parent != Path() or os.path.exists(value):  # a file, not a name
            node[key] = ""
    return cfg


def is_in_folder(path: Path) -> bool:
    """Whether a file of weights belongs to a model folder."""
    return path.name == WEIGHTS and path.with_name(CLASSES).is_file()


def read_node(folder: Path) -> dict[str, Any]:
    """The content of a checkpoint's node ``cpvt_det``, from the files of a model folder.

    Raises:
        WeightsError: a file that is missing or has a different format.
    """
    classes, config = folder / CLASSES, folder / CONFIG
    try:
        categories = json.loads(classes.read_text(encoding="utf-8"))
        node = {"ids": [category["id"] for category in categories], "names": [category["name"] for category in categories]}
        found = {"classes": node, "config": config.read_text(encoding="utf-8")}
    except OSError as error:
        raise WeightsError(f"cannot read the model folder {folder}: {first_line(error)}") from error
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise WeightsError(f'{classes} must be a JSON list of classes such as [{{"id": 1, "name": "circle"}}, ...]') from error
    try:
        return {**found, "thresholds": json.loads((folder / THRESHOLDS).read_text(encoding="utf-8"))}
    except FileNotFoundError:
        return found
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(
            f"cannot read {folder / THRESHOLDS}: {first_line(error)}; remove the file to use no stored thresholds"
        ) from error
