# SPDX-License-Identifier: Apache-2.0
"""Data sets known to both sides: ours in detectron2's catalogs, those registered there in our config."""

from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from cpvt_det.data.catalog import registered_datasets
from cpvt_det.data.coco import CocoDataset


def share_catalogs(cfg: CfgNode) -> None:
    """Register ``DATASETS.REGISTER`` in detectron2, and add to it the COCO data sets that were registered there.

    Raises:
        ConfigError: entries that are not triples.
    """
    for files in registered_datasets(cfg.DATASETS.REGISTER):
        if files.name in DatasetCatalog.list():
            DatasetCatalog.remove(files.name)
            MetadataCatalog.remove(files.name)
        register_coco_instances(files.name, {}, str(files.annotations), str(files.image_root))
    known = {entry[0] for entry in cfg.DATASETS.REGISTER}
    for name in (*cfg.DATASETS.TRAIN, *cfg.DATASETS.TEST):
        if name not in known and name in DatasetCatalog.list():
            metadata = MetadataCatalog.get(name)
            if metadata.get("json_file") and metadata.get("image_root"):
                cfg.DATASETS.REGISTER.append([name, metadata.json_file, metadata.image_root])


def describe_classes(dataset: CocoDataset) -> None:
    """Tell detectron2's catalog the classes of a data set as we number them."""
    metadata = MetadataCatalog.get(dataset.name)
    if not metadata.get("thing_classes"):
        metadata.thing_classes = list(dataset.classes.names)
        metadata.thing_dataset_id_to_contiguous_id = {category: label for label, category in enumerate(dataset.classes.ids)}
