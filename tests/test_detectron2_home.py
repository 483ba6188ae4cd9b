# SPDX-License-Identifier: Apache-2.0
"""What a detectron2 user finds where detectron2 keeps it: the variable, LazyConfig, its data sets, backbones, trainer and tools."""

import builtins
import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from tiny import overrides

from cpvt_det import build
from cpvt_det.config import config_root, get_cfg
from cpvt_det.errors import ConfigError
from cpvt_det.layers.position import POSITION_REGISTRY

pytestmark = pytest.mark.detectron2

ROOT = Path(__file__).parent.parent
LAZY = sorted(path.name for path in (config_root() / "lazy").glob("*.py"))
COCO = sorted(path.stem for path in (config_root() / "coco").glob("*_r50_*.yaml") if not path.stem.startswith("_"))


def flat(node, prefix=""):
    for key, value in node.items():
        yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]


def run_python(code, *arguments, **environment):
    """Run code in a fresh process with ``DETECTRON2_ENV_MODULE``; what it prints."""
    environment = {**os.environ, "DETECTRON2_ENV_MODULE": "cpvt_det.d2", "OMP_NUM_THREADS": "1", **environment}
    done = subprocess.run([sys.executable, "-c", code, *arguments], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture
def small_words():
    """A small model, in key-value words for detectron2's ``merge_from_list``."""
    keys = {
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
    }
    return [word for key, value in keys.items() for word in (key, value)]


# The variable


def test_the_variable_adds_our_keys_and_changes_none_of_detectron2s():
    code = """
import json, detectron2
from detectron2.config import get_cfg
from detectron2.data import DatasetCatalog
print(json.dumps([get_cfg(), [n for n in DatasetCatalog.list() if "shapes" in n]]))
"""
    with_keys, shapes = json.loads(run_python(code))
    without, _ = json.loads(run_python(code, DETECTRON2_ENV_MODULE=""))
    with_keys, without = dict(flat(with_keys)), dict(flat(without))
    ours = dict(flat(get_cfg()))
    assert {key: with_keys[key] for key in without} == without
    new = {key for key in with_keys if key not in without}
    assert new == {key for key in ours if key not in without} | {key for key in new if key.startswith("MODEL.PEG.")}
    assert shapes == ["shapes_train", "shapes_val"]


def test_the_base_of_our_yaml_states_what_detectron2_has_with_another_default():
    """``MODEL.DEVICE`` is left to detectron2, whose torch knows no ``auto``."""
    import yaml
    from detectron2.config import get_cfg as get_theirs

    theirs, ours = dict(flat(get_theirs())), dict(flat(get_cfg()))
    different = {key: value for key, value in ours.items() if key in theirs and theirs[key] != value and key != "MODEL.DEVICE"}
    stated = dict(flat(yaml.safe_load((config_root() / "_detectron2.yaml").read_text())))
    assert stated.pop("VERSION") == 2
    listed = {key: list(value) if isinstance(value, tuple) else value for key, value in different.items()}
    assert stated == listed


def test_detectron2_itself_takes_every_yaml_of_ours_to_the_same_values():
    code = """
import json, sys
from detectron2.config import get_cfg
for name in sys.argv[1:]:
    cfg = get_cfg()
    cfg.merge_from_file(name)
    print(json.dumps(cfg))
"""
    names = [path for path in sorted(config_root().rglob("*.yaml")) if path.parent.name != "plug"]
    printed = run_python(code, *map(str, names)).splitlines()
    for name, line in zip(names, printed, strict=True):
        theirs, ours = dict(flat(json.loads(line))), get_cfg()
        ours.merge_from_file(str(name))
        for key, value in flat(json.loads(json.dumps(ours))):
            assert key == "MODEL.DEVICE" or theirs[key] == value, (name, key)
        assert theirs["SOLVER.MAX_ITER"] > 0 or name.name == "_detectron2.yaml", name


def test_the_length_for_detectron2s_trainer_is_that_of_the_epochs():
    images = {"coco_2017_train": 118287, "shapes_train": 4000, "bccd_train": 205}
    for path in sorted(config_root().rglob("*.yaml")):
        cfg = get_cfg()
        if path.parent.name == "plug" or path.name.startswith("_"):
            continue
        cfg.merge_from_file(str(path))
        count = 4 if path.name.startswith("overfit") else images[cfg.DATASETS.TRAIN[0]]
        length = build.build_length(cfg, count)
        assert (cfg.SOLVER.MAX_ITER, tuple(cfg.SOLVER.STEPS)) == (length.max_iter, tuple(length.steps)), path
        assert length.warmup == cfg.SOLVER.WARMUP_ITERS, path


def test_every_plug_yaml_builds_with_and_without_peg():
    code = """
import sys
from detectron2.config import get_cfg
from detectron2.modeling import build_model
for name in sys.argv[1:]:
    cfg = get_cfg()
    cfg.merge_from_file(name)
    print(sum("peg" in key for key in build_model(cfg).state_dict()))
"""
    names = sorted(path for path in (config_root() / "plug").glob("*.yaml") if not path.name.startswith("_"))
    counts = [int(line) for line in run_python(code, *map(str, names)).splitlines()]
    assert [count > 0 for count in counts] == ["_peg_" in path.name for path in names] and len(names) == 4


# detectron2's trainer, predictor and evaluator


DEFAULT_TRAINER = """
import json, sys
from detectron2.config import get_cfg
from detectron2.engine import DefaultPredictor, DefaultTrainer
from detectron2.evaluation import COCOEvaluator

class Trainer(DefaultTrainer):
    @classmethod
    def build_evaluator(cls, cfg, name):
        return COCOEvaluator(name, output_dir=cfg.OUTPUT_DIR)

cfg = get_cfg()
cfg.merge_from_file(sys.argv[1])
cfg.merge_from_list(json.loads(sys.argv[2]))
trainer = Trainer(cfg)
trainer.resume_or_load(resume=False)
trainer.train()
cfg.MODEL.WEIGHTS = cfg.OUTPUT_DIR + "/model_final.pth"
import cv2
found = DefaultPredictor(cfg)(cv2.imread(sys.argv[3]))["instances"]
ap, boxes = trainer._last_eval_results["bbox"]["AP"], found.pred_boxes.tensor
print(json.dumps([ap, len(found), list(found.image_size), boxes.max().item()]))
"""


@pytest.mark.parametrize("model", ["detr", "deformable_detr"])
def test_default_trainer_predictor_and_evaluator(drawn_coco, tmp_path, small_words, model):
    drawn_coco.files.annotations.write_text(json.dumps({**drawn_coco.content, "info": {}}))  # pycocotools wants it
    name, annotations, root = (str(part) for part in vars(drawn_coco.files).values())
    words = [*small_words, "DATASETS.REGISTER", [[name, annotations, root]], "DATASETS.TRAIN", (name,), "DATASETS.TEST", (name,)]
    words += ["OUTPUT_DIR", str(tmp_path), "SOLVER.MAX_ITER", 3, "SOLVER.STEPS", (2,), "SOLVER.IMS_PER_BATCH", 2]
    words += ["INPUT.MIN_SIZE_TRAIN", (64,), "INPUT.MIN_SIZE_TEST", 64, "DATALOADER.NUM_WORKERS", 0]
    config = str(config_root() / f"coco/{model}_r50_peg_50ep.yaml")
    image = drawn_coco.content["images"][0]
    printed = run_python(DEFAULT_TRAINER, config, json.dumps(words), f"{root}/{image['file_name']}").splitlines()[-1]
    average_precision, found, size, largest = json.loads(printed)
    assert 0 <= average_precision <= 100
    assert found == (10 if model == "detr" else 30)  # DETR: one for each query; focal: the best pairs of query and class
    assert size == [image["height"], image["width"]]
    assert 0 < largest <= max(size)
    assert {"model_final.pth", "metrics.json", "coco_instances_results.json"} <= {path.name for path in tmp_path.iterdir()}


def test_operations_and_activations_are_counted():
    from detectron2.utils.analysis import FlopCountAnalysis, activation_count_operators

    from cpvt_det.d2 import CPVTDeformableDetr, CPVTDetr
    from cpvt_det.d2.config import load_cfg

    inputs = [{"image": torch.zeros(3, 64, 96), "height": 64, "width": 96}]
    for name, model_class in (("detr", CPVTDetr), ("deformable_detr", CPVTDeformableDetr)):
        words = ["MODEL.NUM_CLASSES", "3", "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.NAME", "resnet18", "MODEL.BACKBONE.WEIGHTS", ""]
        model = model_class(load_cfg(f"coco/{name}_r50_peg_50ep.yaml", words)).eval()
        total = FlopCountAnalysis(model, inputs).unsupported_ops_warnings(False).total()
        assert 0.9e9 < total < 10e9, name  # ResNet-18: 0.9 GFLOP at 64 x 96 with its stem
        assert sum(activation_count_operators(model, inputs).values()) > 0.5


# LazyConfig


def test_every_coco_yaml_has_its_lazy_config():
    assert [Path(name).stem for name in LAZY] == COCO and len(COCO) == 14


@pytest.mark.parametrize("name", LAZY)
def test_lazy_config_builds_the_network_of_the_yaml(name):
    """The same modules with the same arguments; weights of the same names and shapes; the same loss."""
    from detectron2.config import instantiate
    from detectron2.modeling import build_model

    from cpvt_det.d2.config import load_cfg
    from cpvt_det.d2.lazy import load_lazy_config

    lazy = load_lazy_config(name, ["model.backbone.weights=''"])
    cfg = load_cfg(
        f"coco/{Path(name).stem}.yaml", ["MODEL.NUM_CLASSES", "80", "MODEL.BACKBONE.WEIGHTS", "", "MODEL.DEVICE", "meta"]
    )
    with torch.device("meta"):
        by_lazy, by_yaml = instantiate(lazy.model), build_model(cfg)
    assert str(by_lazy) == str(by_yaml)
    shapes = [{key: tensor.shape for key, tensor in model.state_dict().items()} for model in (by_lazy, by_yaml)]
    assert shapes[0] == shapes[1]
    for attribute in ("num_queries", "box_refinement", "mask_padding", "strides", "decoder_same", "size_divisibility"):
        assert getattr(by_lazy, attribute, None) == getattr(by_yaml, attribute, None), attribute
    lazy.optimizer.params.model = by_lazy
    rates = [
        sorted((group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups)
        for optimizer in (instantiate(lazy.optimizer), build.build_optimizer(cfg, by_yaml))
    ]
    assert rates[0] == rates[1]
    length = build.build_length(cfg, 118287)
    assert (lazy.train.max_iter, lazy.train.eval_period) == (length.max_iter, length.eval_period)
    assert instantiate(lazy.optimizer).clip_norm == cfg.SOLVER.CLIP_NORM
    criterion, expected = by_lazy.criterion, build.build_criterion(cfg)
    assert criterion.weights == expected.weights
    assert vars(criterion.classification) == vars(expected.classification)
    costs = [(m.class_cost, m.l1_cost, m.giou_cost) for m in (criterion.matcher, expected.matcher)]
    assert costs[0] == costs[1]


@pytest.mark.parametrize("name", ["detr_r50_sine+peg_50ep.py", "deformable_detr_r50_official_two_stage_50ep.py"])
def test_lazy_config_draws_the_weights_of_the_yaml(name):
    from detectron2.config import instantiate
    from detectron2.modeling import build_model

    from cpvt_det.d2.config import load_cfg
    from cpvt_det.d2.lazy import load_lazy_config

    lazy = load_lazy_config(name, ["model.backbone.weights=''"])
    cfg = load_cfg(f"coco/{Path(name).stem}.yaml", ["MODEL.NUM_CLASSES", "80", "MODEL.BACKBONE.WEIGHTS", "", "MODEL.DEVICE", "cpu"])
    torch.manual_seed(0)
    by_lazy = instantiate(lazy.model).state_dict()
    torch.manual_seed(0)
    by_yaml = build_model(cfg).state_dict()
    assert all(torch.equal(by_lazy[key], by_yaml[key]) for key in by_yaml)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("from .nothing import x\n", "nothing"),
        ("raise RuntimeError('on purpose')\n", "RuntimeError: on purpose"),
        ("x = (\n", "SyntaxError"),
        ("x = 1 / 0\n", "ZeroDivisionError"),
    ],
)
def test_a_lazy_config_that_fails_leaves_no_patched_import(tmp_path, text, match):
    from cpvt_det.d2.lazy import load_lazy_config

    imported = builtins.__import__
    path = tmp_path / "bad.py"
    path.write_text(text)
    with pytest.raises(ConfigError, match=match):
        load_lazy_config(str(path))
    assert builtins.__import__ is imported


def test_lazy_words_and_files_that_are_not_there_are_told():
    from cpvt_det.d2.lazy import load_lazy_config

    with pytest.raises(ConfigError, match=r"LazyConfig nothing\.py"):
        load_lazy_config("nothing.py")
    with pytest.raises(ConfigError, match="no_value"):
        load_lazy_config(LAZY[0], ["no_value"])


def test_clipped_adamw_bounds_the_norm_of_all_gradients():
    from cpvt_det.d2.lazy import ClippedAdamW

    parameters = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.full((3,), value)
    ClippedAdamW(parameters, clip_norm=0.5, lr=0.1).step()
    gradients = torch.cat([parameter.grad for parameter in parameters])
    torch.testing.assert_close(gradients.norm(), torch.tensor(0.5))
    torch.testing.assert_close(gradients[3] / gradients[0], torch.tensor(4 / 3))


LAZY_WORDS = [
    "model.backbone.name=resnet10",
    "model.backbone.weights=''",
    "model.backbone.norm=BN",
    "model.backbone.freeze_at=0",
    "+model.backbone.width=16",
    "model.channels=32",
    "model.transformer.num_heads=4",
    "model.transformer.encoder_layers=1",
    "model.transformer.decoder_layers=1",
    "model.num_queries=10",
    "model.criterion.matcher.classification.num_classes=3",
    "dataloader.train.total_batch_size=2",
    "dataloader.train.num_workers=0",
    "dataloader.test.num_workers=0",
    "dataloader.train.dataset.names=drawn",
    "dataloader.test.dataset.names=drawn",
    "dataloader.train.mapper.augmentations.2.short_edge_length=[64]",
    "dataloader.test.mapper.augmentations.0.short_edge_length=64",
    "train.max_iter=2",
    "train.eval_period=2",
    "train.device=cpu",
]
LAZY_RUN = """
import sys
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import default_argument_parser, launch
from cpvt_det.d2.lazy import run

def start(args):
    register_coco_instances("drawn", {}, sys.argv[1], sys.argv[2])
    print("AP", run(args)["bbox"]["AP"] if __import__("detectron2.utils.comm").utils.comm.is_main_process() else run(args))

if __name__ == "__main__":
    launch(start, int(sys.argv[3]), dist_url="auto", args=(default_argument_parser().parse_args(sys.argv[4:]),))
"""


@pytest.mark.parametrize(("model", "processes"), [("detr", 1), ("deformable_detr", 2)])
def test_lazy_config_trains_and_evaluates_in_one_process_or_two(drawn_coco, tmp_path, model, processes):
    script = tmp_path / "train.py"
    script.write_text(LAZY_RUN)
    drawn_coco.files.annotations.write_text(json.dumps({**drawn_coco.content, "info": {}}))
    words = [*LAZY_WORDS, f"train.output_dir={tmp_path / 'run'}"]
    annotations, root = str(drawn_coco.files.annotations), str(drawn_coco.files.image_root)
    command = [sys.executable, str(script), annotations, root, str(processes)]
    command += ["--config-file", str(config_root() / f"lazy/{model}_r50_peg_50ep.py"), *words]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "AP " in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.json").read_text().splitlines()]
    assert {"loss_class", "loss_l1", "loss_giou"} <= set(lines[0])
    state = torch.load(tmp_path / "run/model_final.pth", weights_only=True)
    assert "criterion" not in " ".join(state["model"])


LAUNCHED = """
import json, sys
from detectron2.engine import launch
from cpvt_det.d2.run import load_cfg, run

def start(words):
    run(load_cfg("", words))

if __name__ == "__main__":
    launch(start, 2, dist_url="auto", args=(json.loads(sys.argv[1]),))
"""


def test_our_runner_in_two_processes_of_detectron2s_launch(drawn_coco, tmp_path):
    script = tmp_path / "launched.py"
    script.write_text(LAUNCHED)
    words = overrides(drawn_coco.files, tmp_path / "run", SOLVER__MAX_ITER=2, MODEL__BACKBONE__NORM="GN")
    done = subprocess.run(
        [sys.executable, str(script), json.dumps(words)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert 0 <= json.loads((tmp_path / "run/results.json").read_text())["bbox"]["AP"] <= 100
    assert "2 process(es)" in done.stderr


# Its backbones and data sets


def deformable(backbone, num_levels=3):
    """A small model by keyword."""
    from cpvt_det.d2 import CPVTDeformableDetr
    from cpvt_det.layers.position import build_position
    from cpvt_det.losses import HungarianMatcher, SetCriterion, make_classification
    from cpvt_det.models import DeformableTransformer

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


def test_fpn_levels_of_a_yaml_model(small_words):
    from detectron2.modeling import build_model

    from cpvt_det.d2.config import load_cfg

    words = [*small_words, "MODEL.BACKBONE.NAME", "build_resnet_fpn_backbone", "MODEL.BACKBONE.MASK_PADDING", "False"]
    words += ["MODEL.BACKBONE.STAGES", "[3, 4]", "MODEL.DEFORMABLE.NUM_LEVELS", "3", "MODEL.NUM_CLASSES", "3"]
    words += ["MODEL.RESNETS.OUT_FEATURES", "['res3', 'res4', 'res5']", "MODEL.FPN.IN_FEATURES", "['res3', 'res4', 'res5']"]
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
    import shutil

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
    (dataset,) = build.load_splits(cfg)[0]
    expected = build.load_splits(runner.load_cfg("", overrides(drawn_coco.files, tmp_path)))[0][0]
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


# Found in review


@pytest.mark.parametrize("first", ["cpvt_det.d2", "detectron2", "detectron2.config", "cpvt_det.d2.run", "cpvt_det.d2.lazy"])
def test_the_variable_works_whichever_is_imported_first(first):
    code = f"import {first}\nfrom detectron2.config import get_cfg\nimport cpvt_det.d2\nprint(get_cfg().MODEL.POSITION.NAME)"
    assert run_python(code).split()[-1] == "peg"


def test_our_script_runs_with_the_variable_set(drawn_coco, tmp_path):
    words = overrides(drawn_coco.files, tmp_path / "run", SOLVER__MAX_ITER=1, DATASETS__TEST=())
    config = ["--config-file", "coco/overfit_detr_r18_peg.yaml"]
    command = [sys.executable, "tools/train_net.py", "--runner", "detectron2", *config, *words]
    environment = {**os.environ, "DETECTRON2_ENV_MODULE": "cpvt_det.d2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


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
    with pytest.raises(ConfigError, match="take another name"):
        find_registered(cfg)


def test_a_label_beyond_the_classes_is_refused():
    from detectron2.structures import Boxes, Instances

    from cpvt_det.d2.meta_arch import _to_targets
    from cpvt_det.errors import DataError

    truth = Instances((40, 60), gt_boxes=Boxes(torch.tensor([[6.0, 4.0, 30.0, 24.0]])), gt_classes=torch.tensor([3]))
    with pytest.raises(DataError, match=r"a\.jpg \(id 5\) has an object of class 3, the model has 3"):
        _to_targets({"instances": truth, "file_name": "a.jpg", "image_id": 5}, 3)
    with pytest.raises(DataError, match="no 'instances'"):
        _to_targets({"file_name": "a.jpg", "image_id": 5}, 3)


def test_backbone_weights_are_loaded_without_a_trainer_of_ours(tmp_path):
    from detectron2.modeling import build_model

    from cpvt_det.d2.config import load_cfg
    from cpvt_det.errors import BadInputError
    from cpvt_det.models import ResNetBackbone

    other = ResNetBackbone("resnet18", norm="BN").body.state_dict()
    torch.save(other, tmp_path / "weights.pth")
    words = ["MODEL.NUM_CLASSES", "3", "MODEL.DEVICE", "cpu", "MODEL.BACKBONE.NAME", "resnet18", "MODEL.BACKBONE.NORM", "BN"]
    model = build_model(load_cfg("", [*words, "MODEL.BACKBONE.WEIGHTS", str(tmp_path / "weights.pth")]))
    assert torch.equal(model.backbone.body.conv1.weight, other["conv1.weight"])
    with pytest.raises(BadInputError, match="nothing"):
        build_model(load_cfg("", [*words, "MODEL.BACKBONE.WEIGHTS", "nothing.pth"]))


@pytest.mark.parametrize(
    ("key", "value"),
    [("SOLVER.CLIP_GRADIENTS.ENABLED", "True"), ("INPUT.CROP.ENABLED", "True"), ("TEST.AUG.ENABLED", "True")],
)
def test_settings_that_only_detectron2s_own_trainer_reads_are_refused(drawn_coco, tmp_path, key, value):
    import cpvt_det.d2.run as runner

    cfg = runner.load_cfg("", [*overrides(drawn_coco.files, tmp_path), key, value])
    with pytest.raises(ConfigError, match=key.rpartition(".")[0]):
        runner.run(cfg)


def test_a_lazy_config_of_the_users_comes_before_ours_and_its_words_are_checked(tmp_path, monkeypatch):
    from cpvt_det.d2.lazy import load_lazy_config

    monkeypatch.chdir(tmp_path)
    (tmp_path / LAZY[0]).write_text("train = dict(max_iter=7)\n")
    assert load_lazy_config(LAZY[0]).train.max_iter == 7
    with pytest.raises(ConfigError, match=r"no key train\.max_itre"):
        load_lazy_config(LAZY[0], ["train.max_itre=4"])
    assert load_lazy_config(LAZY[0], ["+train.extra=4"]).train.extra == 4


def test_clipped_adamw_refuses_what_would_not_clip():
    from cpvt_det.d2.lazy import ClippedAdamW

    for options in ({"clip_norm": -0.1}, {"fused": True}):
        with pytest.raises(ValueError, match="clip_norm"):
            ClippedAdamW([torch.nn.Parameter(torch.zeros(1))], **options)
