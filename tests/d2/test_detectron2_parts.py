# SPDX-License-Identifier: Apache-2.0
"""detectron2's backbones, data sets and registries with our models."""

import copy
import json
import shutil
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tiny import SMALL_WORDS, overrides

from cpvt_det import builders
from cpvt_det.common.errors import ConfigError
from cpvt_det.position.encoding import POSITION_REGISTRY

pytestmark = pytest.mark.detectron2


def deformable(backbone, num_levels=3):
    """A small model by keyword."""
    from cpvt_det.d2 import CPVTDeformableDetr
    from cpvt_det.losses import HungarianMatcher, SetCriterion, make_classification
    from cpvt_det.models import DeformableTransformer
    from cpvt_det.position.encoding import build_position

    return CPVTDeformableDetr(
        backbone=backbone,
        position=build_position("peg", 32, num_levels=num_levels, num_layers=1),
        transformer=DeformableTransformer(1, 1, channels=32, num_heads=4, ffn_channels=32, num_levels=num_levels),
        channels=32,
        num_queries=10,
        num_levels=num_levels,
        criterion=SetCriterion(HungarianMatcher(make_classification("focal", 3))),
    )


def foreign_backbones():
    from detectron2.modeling.backbone.fpn import FPN
    from detectron2.modeling.backbone.mvit import MViT
    from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, ResNet
    from detectron2.modeling.backbone.swin import SwinTransformer
    from detectron2.modeling.backbone.vit import SimpleFeaturePyramid, ViT

    widths = (8, 8, 16, 24, 32)
    stages = [
        ResNet.make_stage(BasicBlock, 1, in_channels=widths[i], out_channels=widths[i + 1], stride_per_block=[1 + (i > 0)])
        for i in range(4)
    ]
    resnet = ResNet(BasicStem(3, 8), stages, out_features=["res2", "res3", "res4", "res5"])
    vit = ViT(img_size=128, patch_size=16, embed_dim=24, depth=1, num_heads=2, use_rel_pos=True, pretrain_img_size=64)
    mvit = {"adaptive_window_size": 8, "out_features": ("scale3", "scale4", "scale5"), "pretrain_img_size": 64}
    return {
        "ResNet": (resnet, [3, 4, 5]),
        "FPN": (FPN(copy.deepcopy(resnet), ["res3", "res4", "res5"], 16), [3, 4]),
        "Swin": (SwinTransformer(embed_dim=12, depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2), window_size=4), [3, 4, 5]),
        "MViT": (MViT(img_size=128, embed_dim=12, depth=4, last_block_indexes=(0, 1, 2, 3), **mvit), [3, 4, 5]),
        "ViT": (vit, [4]),
        "ViT with pyramid": (SimpleFeaturePyramid(copy.deepcopy(vit), "last_feat", 16, (2.0, 1.0, 0.5), norm="LN"), [3, 4, 5]),
    }


@pytest.mark.parametrize("name", ["ResNet", "FPN", "Swin", "MViT", "ViT", "ViT with pyramid"])
def test_every_kind_of_backbone_trains_and_detects(name):
    from detectron2.structures import Boxes, Instances

    from cpvt_det.d2 import Detectron2Backbone

    torch.manual_seed(0)
    body, stages = foreign_backbones()[name]
    model = deformable(Detectron2Backbone(body, stages))
    assert model.backbone.strides == [2**stage for stage in stages]
    truth = Instances((90, 70), gt_boxes=Boxes(torch.tensor([[6.0, 4.0, 30.0, 24.0]])), gt_classes=torch.tensor([2]))
    empty = Instances((60, 100), gt_boxes=Boxes(torch.zeros(0, 4)), gt_classes=torch.zeros(0, dtype=torch.int64))
    images = [torch.rand(3, 90, 70) * 255, torch.rand(3, 60, 100) * 255]
    losses = model.train()([{"image": image, "instances": one} for image, one in zip(images, (truth, empty), strict=True)])
    sum(losses.values()).backward()
    without = [key for key, weight in model.named_parameters() if weight.requires_grad and weight.grad is None]
    assert [key for key in without if not key.startswith("backbone.")] == []
    assert any(weight.grad is not None for weight in model.backbone.parameters())
    with torch.no_grad():
        found = model.eval()([{"image": images[0], "height": 180, "width": 140}])[0]["instances"]
    assert len(found) == 30 and found.image_size == (180, 140)


def test_fpn_levels_of_a_yaml_model():
    from detectron2.modeling import build_model

    from cpvt_det.d2.config import load_cfg

    words = [*SMALL_WORDS, "MODEL.BACKBONE.NAME", "build_resnet_fpn_backbone", "MODEL.BACKBONE.MASK_PADDING", "False"]
    words += ["MODEL.BACKBONE.STAGES", "[3, 4]", "MODEL.DETECTOR.NUM_LEVELS", "3", "MODEL.NUM_CLASSES", "3"]
    words += ["MODEL.RESNETS.OUT_FEATURES", "['res3', 'res4', 'res5']", "MODEL.FPN.IN_FEATURES", "['res3', 'res4', 'res5']"]
    words += ["MODEL.BACKBONE.NORM", "FrozenBN", "MODEL.BACKBONE.WIDTH", 64]  # ours, of which that backbone takes neither
    words += ["MODEL.RESNETS.DEPTH", "18", "MODEL.RESNETS.RES2_OUT_CHANNELS", "64", "MODEL.META_ARCHITECTURE", "CPVTDeformableDetr"]
    model = build_model(load_cfg("", [str(word) for word in words]))
    assert model.backbone.names == ["p3", "p4"] and model.backbone.channels == [256, 256]
    assert model.strides == [8, 16, 32] and model.size_divisibility == 32


def test_our_position_registry_is_one_of_detectron2s():
    from detectron2.utils.registry import Registry

    assert isinstance(POSITION_REGISTRY, Registry)
    assert {"none", "sine", "sine_offset", "learned", "peg", "sine+peg", "sine_offset+peg"} <= {
        name for name, _ in POSITION_REGISTRY
    }


def write_voc(root, content, split):
    """The drawn COCO data set as Pascal VOC, in 1-based pixels; image ids are names there."""
    names = {category["id"]: category["name"] for category in content["categories"]}
    for folder in ("Annotations", "ImageSets/Main"):
        (root / folder).mkdir(parents=True)
    for image in content["images"]:
        tree = ElementTree.Element("annotation")
        size = ElementTree.SubElement(tree, "size")
        for side in ("width", "height"):
            ElementTree.SubElement(size, side).text = str(image[side])
        for annotation in content["annotations"]:
            if annotation["image_id"] == image["id"] and not annotation["iscrowd"]:  # VOC has no crowds
                entry = ElementTree.SubElement(tree, "object")
                ElementTree.SubElement(entry, "name").text = names[annotation["category_id"]]
                box = ElementTree.SubElement(entry, "bndbox")
                x, y, width, height = annotation["bbox"]
                for key, value in zip(("xmin", "ymin", "xmax", "ymax"), (x + 1, y + 1, x + width, y + height), strict=True):
                    ElementTree.SubElement(box, key).text = str(value)
        ElementTree.ElementTree(tree).write(root / "Annotations" / f"{Path(image['file_name']).stem}.xml")
    stems = [Path(image["file_name"]).stem for image in content["images"]]
    (root / f"ImageSets/Main/{split}.txt").write_text("\n".join(stems))
    return list(names.values())


@pytest.fixture
def voc(drawn_coco, tmp_path):
    """``drawn_voc`` in detectron2's catalogs."""
    from detectron2.data import DatasetCatalog, MetadataCatalog
    from detectron2.data.datasets import register_pascal_voc
    from PIL import Image

    root = tmp_path / "voc"
    names = write_voc(root, drawn_coco.content, "train")
    (root / "JPEGImages").mkdir()
    for image in drawn_coco.content["images"]:
        source, stem = drawn_coco.files.image_root / image["file_name"], Path(image["file_name"]).stem
        if source.suffix == ".jpg":
            shutil.copy(source, root / "JPEGImages" / f"{stem}.jpg")
        else:
            Image.open(source).convert("RGB").save(root / "JPEGImages" / f"{stem}.jpg")
    register_pascal_voc("drawn_voc", str(root), "train", 2012, names)
    MetadataCatalog.get("drawn_voc").evaluator_type = "pascal_voc"
    yield "drawn_voc"
    DatasetCatalog.remove("drawn_voc")
    MetadataCatalog.remove("drawn_voc")


def test_pascal_voc_trains_in_our_runner(voc, drawn_coco, tmp_path):
    from detectron2.data import DatasetCatalog

    import cpvt_det.d2.run as runner

    words = overrides(drawn_coco.files, tmp_path / "run", DATASETS__TRAIN=(voc,), DATASETS__TEST=(voc,), SOLVER__MAX_ITER=2)
    cfg = runner.load_cfg("", words)
    results = runner.run(cfg)
    assert 0 <= results["bbox"]["AP"] <= 100
    (dataset,) = builders.load_splits(cfg)[0]
    expected = builders.load_splits(runner.load_cfg("", overrides(drawn_coco.files, tmp_path)))[0][0]
    assert dataset.classes.names == tuple(category["name"] for category in drawn_coco.content["categories"])
    assert [record.image_id for record in dataset.records] == [1, 2, 3, 4, 5]
    for record, other in zip(dataset.records, expected.records, strict=True):
        assert (record.height, record.width) == (other.height, other.width)
        torch.testing.assert_close(torch.from_numpy(record.boxes_xyxy), torch.from_numpy(other.boxes_xyxy))
    assert DatasetCatalog.get(voc)[0]["image_id"] != 1  # detectron2's own registration stays as it is


def test_a_function_of_the_users_is_a_data_set(drawn_coco, tmp_path):
    """Category ids are those of the metadata where it has them, as in LVIS."""
    from detectron2.data import DatasetCatalog, MetadataCatalog
    from detectron2.structures import BoxMode

    from cpvt_det.d2.data import to_coco

    image = {"file_name": "a.jpg", "image_id": 7, "height": 40, "width": 60}
    box = {"bbox": [6, 4, 30, 24], "bbox_mode": BoxMode.XYXY_ABS, "category_id": 1}
    DatasetCatalog.register("mine", lambda: [{**image, "annotations": [box]}])
    try:
        with pytest.raises(ConfigError, match="no class names"):
            to_coco("mine")
        MetadataCatalog.get("mine").set(thing_classes=["cat", "dog"], thing_dataset_id_to_contiguous_id={3: 0, 9: 1})
        content = to_coco("mine")
        assert content["categories"] == [{"id": 3, "name": "cat"}, {"id": 9, "name": "dog"}]
        assert content["images"][0]["id"] == 7
        assert content["annotations"] == [{"id": 1, "image_id": 7, "category_id": 9, "bbox": [6.0, 4.0, 24.0, 20.0], "iscrowd": 0}]
    finally:
        DatasetCatalog.remove("mine")
        MetadataCatalog.remove("mine")


def test_lvis_names_train_in_our_runner(drawn_coco, tmp_path):
    pytest.importorskip("lvis")
    from detectron2.data import DatasetCatalog, MetadataCatalog
    from detectron2.data.datasets import register_lvis_instances

    import cpvt_det.d2.run as runner

    root = drawn_coco.files.image_root
    content = copy.deepcopy(drawn_coco.content)
    for image in content["images"]:
        image["coco_url"] = f"http://somewhere/{image['file_name']}"
        image |= {"not_exhaustive_category_ids": [], "neg_category_ids": []}
    rows = {category["id"]: row for row, category in enumerate(content["categories"], start=1)}  # LVIS counts from 1
    for annotation in content["annotations"]:
        annotation |= {"segmentation": [[1, 1, 2, 1, 2, 2]], "area": 4, "category_id": rows[annotation["category_id"]]}
    content["categories"] = [{"id": rows[category["id"]], "name": category["name"]} for category in content["categories"]]
    path = tmp_path / "lvis.json"
    path.write_text(json.dumps(content))
    meta = {"thing_classes": [category["name"] for category in content["categories"]]}
    register_lvis_instances("drawn_lvis", meta, str(path), f"{root}/")
    try:
        with pytest.MonkeyPatch.context() as patch:
            # detectron2 knows the classes of LVIS itself and of no other data in its format.
            patch.setattr("detectron2.data.datasets.lvis.get_lvis_instances_meta", lambda name: meta)
            words = overrides(drawn_coco.files, tmp_path / "run", DATASETS__TRAIN=("drawn_lvis",), DATASETS__TEST=())
            cfg = runner.load_cfg("", [*words, "SOLVER.MAX_ITER", "1"])
            runner.run(cfg)
        assert (tmp_path / "run/datasets/drawn_lvis.json").is_file()
    finally:
        DatasetCatalog.remove("drawn_lvis")
        MetadataCatalog.remove("drawn_lvis")


@pytest.mark.parametrize(("filtered", "count"), [(False, 5), (True, 4)])
def test_images_without_annotations_follow_the_key_in_detectron2s_loader_too(drawn_coco, tmp_path, filtered, count):
    from detectron2.data import build_detection_train_loader

    import cpvt_det.d2.run as runner
    from cpvt_det.d2.data import find_registered

    cfg = runner.load_cfg("", overrides(drawn_coco.files, tmp_path, DATALOADER__FILTER_EMPTY_ANNOTATIONS=filtered))
    find_registered(cfg)
    loader = build_detection_train_loader(cfg)
    seen, empty = set(), 0
    batches = iter(loader)
    for _ in range(20):
        for sample in next(batches):
            seen.add(sample["image_id"])
            empty += not len(sample["instances"])
    assert len(seen) == count
    assert (empty > 0) == (not filtered)


def test_number_of_classes_comes_from_detectron2s_catalog(drawn_coco, tmp_path):
    from detectron2.modeling import build_model

    import cpvt_det.d2.run as runner

    cfg = runner.load_cfg("", overrides(drawn_coco.files, tmp_path))
    assert cfg.MODEL.NUM_CLASSES == 0
    assert build_model(cfg).class_embed.out_features == len(drawn_coco.content["categories"]) + 1
    assert cfg.MODEL.NUM_CLASSES == 0
    cfg.DATASETS.TRAIN, cfg.DATASETS.TEST = ("nothing",), ()
    with pytest.raises(ConfigError, match=r"unknown data set .*'nothing'"):
        build_model(cfg)


def test_labels_of_a_users_data_set_stay_detectron2s():
    """Ids that fall where labels rise would turn the classes round in our order, by id."""
    from detectron2.data import DatasetCatalog, MetadataCatalog

    from cpvt_det.d2.data import to_coco

    DatasetCatalog.register("turned", lambda: [])
    try:
        MetadataCatalog.get("turned").set(
            thing_classes=["dog", "cat", "bird"], thing_dataset_id_to_contiguous_id={18: 0, 17: 1, 16: 2}
        )
        assert [category["name"] for category in sorted(to_coco("turned")["categories"], key=lambda c: c["id"])] == [
            "dog",
            "cat",
            "bird",
        ]
    finally:
        DatasetCatalog.remove("turned")
        MetadataCatalog.remove("turned")


def test_a_registered_name_of_other_files_is_refused(drawn_coco, tmp_path):
    import cpvt_det.d2.run as runner
    from cpvt_det.d2.data import find_registered

    entry = ["coco_2017_val", str(drawn_coco.files.annotations), str(drawn_coco.files.image_root)]
    cfg = runner.load_cfg("", overrides(drawn_coco.files, tmp_path, DATASETS__REGISTER=[entry]))
    with pytest.raises(ConfigError, match="already registered in detectron2, for .*; use another name"):
        find_registered(cfg)


def test_a_label_beyond_the_classes_is_refused():
    from detectron2.structures import Boxes, Instances

    from cpvt_det.common.errors import DataError
    from cpvt_det.d2.meta_arch import _to_targets

    truth = Instances((40, 60), gt_boxes=Boxes(torch.tensor([[6.0, 4.0, 30.0, 24.0]])), gt_classes=torch.tensor([3]))
    with pytest.raises(DataError, match=r"a\.jpg \(id 5\) has an object of class 3, but the model has 3 classes"):
        _to_targets({"instances": truth, "file_name": "a.jpg", "image_id": 5}, 3)
    with pytest.raises(DataError, match="no 'instances'"):
        _to_targets({"file_name": "a.jpg", "image_id": 5}, 3)


def test_a_backbone_that_is_handed_over_replaces_that_of_the_config():
    from cpvt_det.d2 import CPVTDetr
    from cpvt_det.d2.config import load_cfg
    from cpvt_det.models import ResNetBackbone

    cfg = load_cfg("", ["MODEL.NUM_CLASSES", "3", "MODEL.DEVICE", "cpu"])
    with torch.device("meta"):
        model = CPVTDetr(cfg, backbone=ResNetBackbone("resnet18", stages=[5]))
    assert model.backbone.channels == [512]


@pytest.mark.parametrize(
    ("key", "value"), [("BACKBONE.DC5", "True"), ("BACKBONE.NORM", "BN"), ("BACKBONE.WIDTH", "32"), ("CHECKPOINTING", "True")]
)
def test_keys_that_backbones_of_detectron2_do_not_read_are_refused(key, value):
    from cpvt_det.d2.backbones import build_detector_backbone
    from cpvt_det.d2.config import load_cfg

    cfg = load_cfg("", ["MODEL.BACKBONE.NAME", "build_resnet_backbone", f"MODEL.{key}", value])
    with pytest.raises(ConfigError, match=rf"backbones of detectron2 do not support MODEL\.{key}, got"):
        build_detector_backbone(cfg)
