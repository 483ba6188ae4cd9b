# SPDX-License-Identifier: Apache-2.0
"""Data sets known to both sides: ours in detectron2's catalogs, those registered there in our config."""

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

from cpvt_det.data.catalog import DatasetFiles, registered_datasets
from cpvt_det.data.coco import CocoDataset, load_coco
from cpvt_det.errors import ConfigError, DataError, UnknownNameError
from cpvt_det.files import atomic_file


def register_datasets(datasets: Iterable[DatasetFiles]) -> None:
    """Register data sets in detectron2.

    One takes the place of an earlier one of ours; a name that detectron2 has in another format than COCO's stays detectron2's.

    Raises:
        ConfigError: a name that was registered in detectron2 with other COCO files.
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
                raise ConfigError(f"DATASETS.REGISTER: {files.name} is registered in detectron2 as {there[0]}; take another name")
            DatasetCatalog.remove(files.name)
            MetadataCatalog.remove(files.name)
        if files.is_coco:
            register_coco_instances(files.name, {"from_cpvt_det": files}, annotations, root)
        else:  # without json_file: detectron2's evaluator writes its own
            DatasetCatalog.register(files.name, partial(_read_foreign, files))
            MetadataCatalog.get(files.name).set(evaluator_type="coco", from_cpvt_det=files)


def _read_foreign(files: DatasetFiles) -> list[dict]:
    """A data set that is not in COCO format, as detectron2's."""
    dataset = load_coco(files)
    MetadataCatalog.get(files.name).set(thing_classes=list(dataset.classes.names))
    return [
        {
            "file_name": record.file_name,
            "image_id": record.image_id,
            "height": record.height,
            "width": record.width,
            "annotations": [
                {"bbox": box, "bbox_mode": BoxMode.XYXY_ABS, "category_id": label, "iscrowd": 0}
                for box, label in zip(record.boxes_xyxy.tolist(), record.labels.tolist(), strict=True)
            ],
        }
        for record in dataset.records
    ]


def find_registered(cfg: CfgNode) -> None:
    """Register ``DATASETS.REGISTER``, and add to it those of the run's data sets that only detectron2's catalogs know.

    One in COCO format stays where it is; of any other (LVIS, Pascal VOC, a function of the user's) a COCO JSON is written to
    ``OUTPUT_DIR/datasets/``.

    Raises:
        ConfigError: entries that are not triples, a data set without class names, an image without a size, a label beyond the
            classes.
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
            path = Path(cfg.OUTPUT_DIR) / "datasets" / f"{name}.json"
            if comm.is_main_process():
                path.parent.mkdir(parents=True, exist_ok=True)
                with atomic_file(path) as file:  # check-data may read what a living run wrote
                    file.write(json.dumps(to_coco(name)).encode())
            comm.synchronize()
            found.append([name, str(path), ""])
    cfg.DATASETS.REGISTER = [*cfg.DATASETS.REGISTER, *found]


def to_coco(name: str) -> dict[str, Any]:
    """A data set of detectron2's catalogs as a COCO dict.

    File names are as registered; image ids that are no whole numbers (Pascal VOC) are counted from 1. Category ids are those of
    the data where detectron2 knows them and they rise with the label, else labels + 1: so our labels are detectron2's.

    Raises:
        ConfigError: as :func:`find_registered`.
    """
    records = _read(name)
    names = class_names(name)
    ids = _category_ids(name, len(names))
    images, annotations = [], []
    for number, record in enumerate(records, start=1):
        image_id = record.get("image_id", number)
        image_id = int(image_id) if isinstance(image_id, Integral) else number
        if "height" not in record or "width" not in record:
            raise ConfigError(f"data set {name}: {record['file_name']} has no height and width")
        image = {"id": image_id, "file_name": str(Path(record["file_name"]).absolute())}
        images.append({**image, "height": record["height"], "width": record["width"]})
        for annotation in record.get("annotations", ()):
            missing = {"category_id", "bbox", "bbox_mode"} - annotation.keys()
            if missing:
                raise ConfigError(f"data set {name}: an annotation of {record['file_name']} has no {missing.pop()!r}")
            if annotation["bbox_mode"] == BoxMode.XYWHA_ABS:
                raise ConfigError(
                    f"data set {name}: the boxes of {record['file_name']} are rotated, which our models do not detect"
                )
            label = annotation["category_id"]
            if not 0 <= label < len(ids):
                raise ConfigError(f"data set {name}: {record['file_name']} has category_id {label}; there are {len(ids)} classes")
            box = BoxMode.convert(annotation["bbox"], annotation["bbox_mode"], BoxMode.XYWH_ABS)
            place = {"bbox": [float(side) for side in box], "iscrowd": int(annotation.get("iscrowd", 0))}
            annotations.append({"image_id": image_id, "category_id": ids[label], **place})
    categories = [{"id": category_id, "name": name} for category_id, name in zip(ids, names, strict=True)]
    numbered = [{"id": number, **annotation} for number, annotation in enumerate(annotations, start=1)]
    return {"images": images, "annotations": numbered, "categories": categories}


def _category_ids(name: str, count: int) -> list[int]:
    """The ids of the data by label, where they are known for every label and rise; else labels + 1."""
    label_of = MetadataCatalog.get(name).get("thing_dataset_id_to_contiguous_id") or {}
    rising = sorted(label_of)
    return rising if [label_of[category_id] for category_id in rising] == list(range(count)) else list(range(1, count + 1))


def class_names(name: str) -> list[str]:
    """The classes of a data set in detectron2's catalogs, which is read where they are not known before.

    Raises:
        ConfigError: none are known even then, or it cannot be read.
    """
    metadata = MetadataCatalog.get(name)
    if not metadata.get("thing_classes"):
        _read(name)
    if not metadata.get("thing_classes"):
        raise ConfigError(f"data set {name} has no class names: MetadataCatalog.get({name!r}).thing_classes says them")
    return list(metadata.thing_classes)


def _read(name: str) -> list[dict]:
    try:
        return DatasetCatalog.get(name)
    except KeyError as error:
        raise UnknownNameError("data set (DATASETS.REGISTER adds your own)", name, DatasetCatalog.list()) from error
    except ModuleNotFoundError as error:  # LVIS
        raise ConfigError(f"data set {name} needs the package {error.name}, which is not installed") from error
    except OSError as error:
        raise DataError(f"data set {name}: {error}") from error


def describe_classes(dataset: CocoDataset) -> None:
    """Tell detectron2's catalog the classes of a data set as we number them.

    Raises:
        ConfigError: it has others.
    """
    metadata = MetadataCatalog.get(dataset.name)
    if metadata.get("thing_classes") and tuple(metadata.thing_classes) != dataset.classes.names:
        raise ConfigError(
            f"data set {dataset.name}: MetadataCatalog has the classes {', '.join(metadata.thing_classes[:5])}, "
            f"its JSON has {', '.join(dataset.classes.names[:5])}, by rising id"
        )
    if not metadata.get("thing_classes"):
        metadata.thing_classes = list(dataset.classes.names)
        metadata.thing_dataset_id_to_contiguous_id = {category: label for label, category in enumerate(dataset.classes.ids)}
