# SPDX-License-Identifier: Apache-2.0
"""The smallest run: a detector of a few thousand weights on five drawn images, as KEY VALUE pairs over the defaults."""

from pathlib import Path
from typing import Any

import torch
from fvcore.common.config import CfgNode

from cpvt_det.builders import build_detector
from cpvt_det.config import load_cfg
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import CocoDataset
from cpvt_det.position import POSITION_REGISTRY

MODEL = {
    "MODEL.DEVICE": "cpu",
    "MODEL.BACKBONE.NAME": "resnet10",
    "MODEL.BACKBONE.NORM": "BN",
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.BACKBONE.STAGES": (3,),
    "MODEL.DETR.HIDDEN_DIM": 16,
    "MODEL.DETR.NHEADS": 2,
    "MODEL.DETR.DIM_FEEDFORWARD": 32,
    "MODEL.DETR.ENC_LAYERS": 1,
    "MODEL.DETR.DEC_LAYERS": 2,
    "MODEL.DETR.NUM_OBJECT_QUERIES": 6,
}
# As ``more`` of :func:`overrides`: a two-stage Deformable-DETR of the same size.
DEFORMABLE = {
    "MODEL__META_ARCHITECTURE": "CPVTDeformableDetr",
    "MODEL__DETECTOR__NUM_LEVELS": 2,
    "MODEL__DETECTOR__BOX_REFINEMENT": True,
    "MODEL__DETECTOR__TWO_STAGE": True,
    "MODEL__CRITERION__CLASSIFICATION__NAME": "focal",
}
# The same with all that training can add.
DINO = {
    **DEFORMABLE,
    "MODEL__DETECTOR__LOOK_FORWARD_TWICE": True,
    "MODEL__DETECTOR__FINAL_NORM": True,
    "MODEL__QUERIES__NAME": "mixed",
    "MODEL__QUERIES__CLASS_PROPOSALS": True,
    "MODEL__QUERIES__REFINED_POSITIONS": True,
    "MODEL__QUERIES__DENOISING": 4,
    "MODEL__QUERIES__HYBRID": 5,
}
# A D-FINE with all that it has.
DFINE = {
    "MODEL__META_ARCHITECTURE": "CPVTRealTimeDetr",
    "MODEL__BACKBONE__STAGES": (3, 4),
    "MODEL__DETECTOR__FUSION": "elan",
    "MODEL__DETECTOR__EXPANSION": 0.5,
    "MODEL__DETECTOR__DEPTH": 1,
    "MODEL__DETECTOR__POINTS": (2, 3),
    "MODEL__DETECTOR__BINS": 8,
    "MODEL__QUERIES__NAME": "mixed",
    "MODEL__QUERIES__CLASS_PROPOSALS": True,
    "MODEL__QUERIES__TOKEN_CONTENT": True,
    "MODEL__QUERIES__REFINED_POSITIONS": True,
    "MODEL__QUERIES__POSITION_SINES": False,
    "MODEL__QUERIES__DENOISING": 4,
    "MODEL__CRITERION__CLASSIFICATION__NAME": "varifocal",
    "MODEL__CRITERION__LOSSES": [["fgl", 0.15], ["ddf", 1.5]],
}
# An RT-DETR of the same size.
RTDETR = {
    **DFINE,
    "MODEL__DETECTOR__FUSION": "csp",
    "MODEL__DETECTOR__POINTS": (4,),
    "MODEL__DETECTOR__BINS": 0,
    "MODEL__DETECTOR__LOOK_FORWARD_TWICE": True,
    "MODEL__CRITERION__LOSSES": [],
}
DETECTORS = {"detr": {}, "deformable": DEFORMABLE}
IN_ATTENTION = ("relative", "rope", "rope_mixed")
"""The encodings that need products of queries and keys."""
INSIDE_LAYERS = (*IN_ATTENTION, "peg_ffn")
"""The encodings that act inside layers, which Deformable-DETR refuses."""
OF_DETR = [name for name in POSITION_REGISTRY.names if name != "sine_scrambled"]
"""Those that are for others than hybrid encoders too."""
ADDED_OR_INJECTED = [name for name in OF_DETR if name not in INSIDE_LAYERS]
ENCODED = [*(("detr", name) for name in OF_DETR), *(("deformable", name) for name in ADDED_OR_INJECTED)]
"""Every kind of detector with every registered encoding that it takes."""
SMALL_WORDS = [
    word
    for pair in {
        "MODEL.BACKBONE.NAME": "resnet10",
        "MODEL.BACKBONE.WEIGHTS": "",
        "MODEL.BACKBONE.NORM": "BN",
        "MODEL.BACKBONE.FREEZE_AT": 0,
        "MODEL.BACKBONE.WIDTH": 16,
        "MODEL.DETR.HIDDEN_DIM": 32,
        "MODEL.DETR.NHEADS": 4,
        "MODEL.DETR.ENC_LAYERS": 1,
        "MODEL.DETR.DEC_LAYERS": 1,
        "MODEL.DETR.NUM_OBJECT_QUERIES": 10,
        "MODEL.DEVICE": "cpu",
    }.items()
    for word in pair
]
"""A small model, for the ``merge_from_list`` of detectron2's config."""
RUN = {
    "INPUT.MIN_SIZE_TRAIN": (32, 40),
    "INPUT.MAX_SIZE_TRAIN": 64,
    "INPUT.MIN_SIZE_TEST": 32,
    "INPUT.MAX_SIZE_TEST": 64,
    "INPUT.RESIZE_CROP.SIZES": (40, 48),
    "INPUT.RESIZE_CROP.RANGE": (24, 32),
    "DATALOADER.NUM_WORKERS": 0,
    "SEED": 11,
    "SOLVER.EPOCHS": 0,
    "SOLVER.MAX_ITER": 6,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.CHECKPOINT_PERIOD": 3,
    "SOLVER.LOG_PERIOD": 1,
    "TEST.PICTURES": 2,
}


def overrides(files: DatasetFiles, output: Path, **more: object) -> list[str]:
    """KEY VALUE words; ``more`` has ``__`` for the dots of a key."""
    pairs = {
        **MODEL,
        **RUN,
        "OUTPUT_DIR": str(output),
        "DATASETS.TRAIN": ("drawn",),
        "DATASETS.TEST": ("drawn",),
        "DATASETS.REGISTER": [[files.name, str(files.annotations), str(files.image_root)]],
        **{key.replace("__", "."): value for key, value in more.items()},
    }
    return [str(word) for pair in pairs.items() for word in pair]


def save_random(path: Path, **more: object) -> Path:
    """A checkpoint of the smallest detector, untrained; ``more`` as of :func:`overrides`."""
    cfg = random_config(**more)
    torch.manual_seed(0)
    detector = build_detector(cfg)
    node = {"config": cfg.dump(), "classes": {"ids": [3, 17, 90], "names": ["red", "green", "blue"]}}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"model": detector.state_dict(), "cpvt_det": node}, path)
    return path


def random_config(**more: object) -> CfgNode:
    """The config of the smallest detector, of three classes; ``more`` as of :func:`overrides`."""
    pairs = {**MODEL, **RUN, "MODEL.NUM_CLASSES": 3, **{key.replace("__", "."): value for key, value in more.items()}}
    return load_cfg("", [str(word) for pair in pairs.items() for word in pair])


def coco_dict(dataset: CocoDataset) -> dict[str, Any]:
    """A data set as COCO JSON has it: the boxes that count, crowds included, with ``area`` and ``iscrowd`` filled in."""
    records, (image_of, boxes) = dataset.records, dataset.records.boxes()
    ids, sizes = records.image_ids.tolist(), records.sizes.tolist()
    images = [
        {"id": image_id, "file_name": records.name(index), "height": height, "width": width}
        for index, (image_id, (height, width)) in enumerate(zip(ids, sizes, strict=True))
    ]
    annotations = [
        {
            "image_id": ids[image],
            "category_id": dataset.classes.ids[label],
            "bbox": box.tolist(),
            "area": area,
            "iscrowd": int(crowd),
            "id": number + 1,  # COCO's evaluation takes id 0 for "unmatched"
        }
        for image, (box, area, number, label, crowd) in zip(image_of.tolist(), boxes.tolist(), strict=True)
    ]
    categories = [{"id": i, "name": name} for i, name in zip(dataset.classes.ids, dataset.classes.names, strict=True)]
    return {"images": images, "annotations": annotations, "categories": categories}
