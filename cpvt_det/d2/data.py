# SPDX-License-Identifier: Apache-2.0
"""Data sets in both directions: ours are registered in detectron2's catalogs, and those registered there are added to our
config."""

import json
from collections.abc import Iterable
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances
from detectron2.structures import BoxMode
from detectron2.utils import comm

from cpvt_det.common.errors import ConfigError, DataError, UnknownNameError
from cpvt_det.common.files import atomic_file
from cpvt_det.data.catalog import DatasetFiles, registered_datasets
from cpvt_det.data.coco import load_coco
from cpvt_det.data.mapper import named


def register_datasets(datasets: Iterable[DatasetFiles]) -> None:
    """Register data sets in detectron2.

    A data set replaces an earlier one that we registered under its name. A name registered in detectron2 with a format other than
    COCO keeps detectron2's data.

    Raises:
        ConfigError: a name that is registered in detectron2 with other COCO files.
    """
    for files in datasets:
        annotations, root = str(files.annotations), str(files.image_root)
        if files.name in DatasetCatalog.list():
            metadata = MetadataCatalog.get(files.name)
            there = metadata.get("json_file"), metadata.get("image_root")
            same = files == metadata.get("from_cpvt_det") or there == (annotations, root)
            if same or metadata.get("evaluator_type") != "coco":
                continue
            if not metadata.get("from_cpvt_det"):
                raise ConfigError(
                    f"DATASETS.REGISTER: the name {files.name} is already registered in detectron2, for {there[0]}; "
                    "use another name"
                )
            DatasetCatalog.remove(files.name)
            MetadataCatalog.remove(files.name)
        if files.is_coco:
            register_coco_instances(files.name, {"from_cpvt_det": files}, annotations, root)
        else:  # without json_file, because detectron2's evaluator writes its own
            DatasetCatalog.register(files.name, partial(_read_foreign, files))
            MetadataCatalog.get(files.name).set(evaluator_type="coco", from_cpvt_det=files)


def _read_foreign(files: DatasetFiles) -> list[dict]:
    """A data set that is not in COCO format, as a list of detectron2's dicts."""
    dataset = load_coco(files)
    MetadataCatalog.get(files.name).set(thing_classes=list(dataset.classes.names))
    found = []
    for record in dataset.records:
        objects = zip(record.boxes_xyxy.tolist(), record.labels.tolist(), strict=True)
        annotations = [{"bbox": box, "bbox_mode": BoxMode.XYXY_ABS, "category_id": label, "iscrowd": 0} for box, label in objects]
        found.append({**named(record), "annotations": annotations})
    return found


def find_registered(cfg: CfgNode) -> None:
    """Register ``DATASETS.REGISTER``, and add to it the run's data sets that are only in detectron2's catalogs.

    A data set in COCO format is used directly; for any other (LVIS, Pascal VOC, a user's function) a COCO JSON is written to
    ``OUTPUT_DIR/datasets/``.

    Raises:
        ConfigError: entries that are not triples, a data set without class names, an image without a size, or a label above the
            number of classes.
    """
    register_datasets(registered_datasets(cfg.DATASETS.REGISTER))
    known = {entry[0] for entry in cfg.DATASETS.REGISTER}
    found = []
    for name in dict.fromkeys((*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST)):
        if name in known or name not in DatasetCatalog.list():
            continue
        metadata = MetadataCatalog.get(name)
        if metadata.get("evaluator_type") == "coco" and metadata.get("json_file"):
            found.append([name, metadata.json_file, metadata.image_root])
        else:
            path = Path(cfg.OUTPUT_DIR).expanduser() / "datasets" / f"{name}.json"
            if comm.is_main_process():
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(path) as file:  # check-data may read the file of a run in progress
                    file.write(json.dumps(to_coco(name)).encode())
            comm.synchronize()
            found.append([name, str(path), ""])
    cfg.DATASETS.REGISTER = [*cfg.DATASETS.REGISTER, *found]


def to_coco(name: str) -> dict[str, Any]:
    """A data set of detectron2's catalogs as a COCO dict.

    File names are made absolute; image ids that are not whole numbers (Pascal VOC) are replaced by 1, 2, ... Category ids are the
    data's own if detectron2 knows them and they increase with the label; otherwise they are the labels + 1. In both cases our
    labels equal detectron2's.

    Raises:
        ConfigError: as in :func:`find_registered`.
    """
    records, names = _read(name), class_names(name)
    label_of = MetadataCatalog.get(name).get("thing_dataset_id_to_contiguous_id") or {}
    ids = sorted(label_of)
    if [label_of[category_id] for category_id in ids] != list(range(len(names))):
        ids = list(range(1, len(names) + 1))
    images, annotations = [], []
    for number, record in enumerate(records, start=1):
        image_id = record.get("image_id", number)
        image_id = int(image_id) if isinstance(image_id, Integral) else number
        where = f"data set {name}: {record['file_name']}"
        try:
            sides = {side: record[side] for side in ("height", "width")}
            images.append({"id": image_id, "file_name": str(Path(record["file_name"]).absolute()), **sides})
            for annotation in record.get("annotations", ()):
                box, mode, label = (annotation[key] for key in ("bbox", "bbox_mode", "category_id"))
                if mode == BoxMode.XYWHA_ABS:
                    raise ConfigError(f"{where} has rotated boxes (XYWHA_ABS), which our models cannot detect")
                if not 0 <= label < len(ids):
                    raise ConfigError(f"{where} has category_id {label}, but the classes are 0 to {len(ids) - 1}")
                box = [float(side) for side in BoxMode.convert(box, mode, BoxMode.XYWH_ABS)]
                crowd, one = int(annotation.get("iscrowd", 0)), {"id": len(annotations) + 1, "image_id": image_id}
                annotations.append({**one, "category_id": ids[label], "bbox": box, "iscrowd": crowd})
        except KeyError as error:
            raise ConfigError(f"{where}, or an annotation of it, has no {error}; add it") from error
    categories = [{"id": category_id, "name": name} for category_id, name in zip(ids, names, strict=True)]
    return {"images": images, "annotations": annotations, "categories": categories}


def class_names(name: str) -> list[str]:
    """The classes of a data set in detectron2's catalogs. The data set is read only if its classes are not known otherwise.

    Raises:
        ConfigError: a data set without class names, or one that cannot be read.
    """
    metadata = MetadataCatalog.get(name)
    if not metadata.get("thing_classes"):
        _read(name)
    if not metadata.get("thing_classes"):
        raise ConfigError(f"data set {name} has no class names; set MetadataCatalog.get({name!r}).thing_classes to a list of them")
    return list(metadata.thing_classes)


def _read(name: str) -> list[dict]:
    try:
        return DatasetCatalog.get(name)
    except KeyError as error:
        raise UnknownNameError("data set (DATASETS.REGISTER adds your own)", name, DatasetCatalog.list()) from error
    except ModuleNotFoundError as error:  # LVIS
        raise ConfigError(f"data set {name} needs the package {error.name}; install it with pip") from error
    except OSError as error:
        raise DataError(f"data set {name}: {error}") from error
