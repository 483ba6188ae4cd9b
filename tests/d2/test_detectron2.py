# SPDX-License-Identifier: Apache-2.0
"""The detectron2 runner at its seams: config, model, loader, step, checkpoints, evaluation."""

import itertools
import json

import pytest
import torch
from image_classes import class_words, draw_folders
from test_runner import assert_same_run, losses_of
from tiny import DEFORMABLE, DETECTORS, DFINE, DINO, overrides

from cpvt_det import Predictor, builders
from cpvt_det.common.errors import ConfigError, WeightsError
from cpvt_det.config import get_cfg as get_core_cfg
from cpvt_det.config import load_cfg as load_core_cfg
from cpvt_det.losses import TrainingModel
from cpvt_det.training.evaluate import evaluate
from cpvt_det.training.tasks.task import build_task
from cpvt_det.training.train import run as run_builtin

pytestmark = pytest.mark.detectron2


@pytest.fixture
def d2():
    """The package, imported where detectron2 is."""
    import cpvt_det.d2
    import cpvt_det.d2.run

    return cpvt_det.d2


@pytest.fixture
def runs(d2, drawn_coco, tmp_path):
    """Run in either runner, in a folder of the given name."""
    runners = {"builtin": (load_core_cfg, run_builtin), "detectron2": (d2.run.load_cfg, d2.run.run)}

    def call(runner, name, resume=False, eval_only=False, **more):
        load, run = runners[runner]
        run(load("", overrides(drawn_coco.files, tmp_path / name, **more)), resume=resume, eval_only=eval_only)
        return tmp_path / name

    return call


def test_every_core_key_is_in_detectron2s_config_with_our_default(d2):
    from detectron2.config import get_cfg

    def flat(node, prefix=""):
        for key, value in node.items():
            yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]

    cfg = get_cfg()
    d2.add_cpvt_det_config(cfg)
    theirs = dict(flat(cfg))
    ours = dict(flat(get_core_cfg()))
    assert {key: theirs[key] for key in ours if key != "MODEL.DEVICE"} == {k: v for k, v in ours.items() if k != "MODEL.DEVICE"}
    assert theirs["MODEL.DEVICE"] in ("cpu", "cuda")


def test_yaml_stays_safe_and_unknown_keys_are_named(d2, tmp_path):
    unsafe = tmp_path / "unsafe.yaml"
    unsafe.write_text(f"OUTPUT_DIR: !!python/object/apply:os.mkdir ['{tmp_path / 'made'}']\n")
    with pytest.raises(ConfigError):
        d2.run.load_cfg(str(unsafe))
    assert not (tmp_path / "made").exists()
    with pytest.raises(ConfigError, match=r"did you mean 'SOLVER\.BASE_LR'"):
        d2.run.load_cfg("", ["SOLVER.BASE_LRR", "1"])


@pytest.mark.parametrize(
    ("kind", "position"),
    [
        *itertools.product(("softmax", "focal", "deformable"), ("none", "sine", "learned", "peg", "sine+peg")),
        *itertools.product(("softmax", "deformable"), ("sine_offset", "table", "peg_plain")),
        *itertools.product(("softmax",), ("relative", "rope", "rope_mixed")),
        ("dino", "peg"),
    ],
)
def test_the_same_batch_gives_the_bit_equal_loss(d2, drawn_coco, tmp_path, position, kind):
    from detectron2.modeling import build_model

    of_kind = {"deformable": DEFORMABLE, "dino": DINO}.get(kind, {"MODEL__CRITERION__CLASSIFICATION__NAME": kind})
    more = {"MODEL__POSITION__NAME": position, "SOLVER__IMS_PER_BATCH": 5, **of_kind}
    words = overrides(drawn_coco.files, tmp_path, MODEL__NUM_CLASSES=3, **more)
    core_cfg, d2_cfg = load_core_cfg("", words), d2.run.load_cfg("", words)
    torch.manual_seed(0)
    detector = builders.build_detector(core_cfg)
    torch.manual_seed(0)
    model = build_model(d2_cfg)
    assert list(model.state_dict()) == list(detector.state_dict())
    records = builders.load_splits(core_cfg)[0][0].records
    samples = next(iter(builders.build_train_loader(core_cfg, records, seed=0)))
    torch.manual_seed(1)
    ours = TrainingModel(detector.train(), builders.build_criterion(core_cfg))(samples).losses
    torch.manual_seed(1)
    theirs = model.train()(samples)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        assert torch.equal(value, theirs[name]), name


@pytest.mark.curves
@pytest.mark.parametrize("detector", [*DETECTORS, "dino", "dfine"])
def test_both_runners_take_the_same_run(runs, detector):
    """The last one with denoising and the hybrid branch."""
    more = {
        **{**DETECTORS, "dino": DINO, "dfine": DFINE}[detector],
        "MODEL__DETR__DROPOUT": 0.2,
        "SOLVER__ACCUMULATE": 2,
        "SOLVER__EMA__ENABLED": True,
        "SOLVER__EMA__DECAY": 0.5,
    }
    more |= {"SOLVER__STEPS": (4,), "TEST__EVAL_PERIOD": 3}
    builtin, detectron2 = runs("builtin", "builtin", **more), runs("detectron2", "detectron2", **more)
    assert_same_run(builtin, detectron2)
    results = [json.loads((folder / "results.json").read_text()) for folder in (builtin, detectron2)]
    assert results[0] == results[1]
    found = [json.loads((folder / "inference/coco_instances_results.json").read_text()) for folder in (builtin, detectron2)]
    assert found[0] == found[1]
    assert losses_of(builtin)[0] == losses_of(detectron2)[0]
    lines = [set(json.loads((folder / "metrics.json").read_text().splitlines()[0])) for folder in (builtin, detectron2)]
    assert {"iteration", "total_loss", "loss_class", "loss_l1", "loss_giou", "lr", "grad_norm"} <= lines[0] & lines[1]
    names = "config.yaml log.txt last_checkpoint model_final.pth model_best.pth pictures/detections.png pictures/curves.png"
    assert [name for name in names.split() if not (detectron2 / name).is_file()] == []
    assert load_core_cfg(str(detectron2 / "config.yaml")).MODEL == load_core_cfg(str(builtin / "config.yaml")).MODEL


def test_hooks_of_detectron2_are_called_around_every_step(d2, drawn_coco, tmp_path):
    """The storage has the iteration, and of steps whose line is due the scalars of that line."""
    from detectron2.engine import HookBase

    class Watch(HookBase):
        seen = []

        def after_step(self):
            latest = self.trainer.storage.latest()
            self.seen.append((self.trainer.iter, self.trainer.storage.iter, latest.get("total_loss", (None, None))[1]))

        def after_train(self):
            self.seen.append("end")

    cfg = d2.run.load_cfg("", overrides(drawn_coco.files, tmp_path, SOLVER__MAX_ITER=4, SOLVER__LOG_PERIOD=2, DATASETS__TEST=()))
    d2.run.run(cfg, hooks=[Watch()])
    assert Watch.seen == [(0, 0, None), (1, 1, 1), (2, 2, 1), (3, 3, 3), "end"]


def test_both_runners_train_the_same_classifier(d2, tmp_path):
    """A transformer with two tokens, layers left out at random, Mixup and CutMix."""
    more = {
        "MODEL__BACKBONE__NAME": "cpvt_tiny",
        "MODEL__BACKBONE__STAGES": (4,),
        "MODEL__BACKBONE__EMBED_DIM": 32,
        "MODEL__BACKBONE__DEPTH": 2,
        "MODEL__BACKBONE__NUM_HEADS": 2,
        "MODEL__BACKBONE__NUM_TOKENS": 2,
        "MODEL__BACKBONE__DROP_PATH": 0.3,
        "INPUT__CLASSIFY__MIXUP": 0.8,
        "INPUT__CLASSIFY__CUTMIX": 1.0,
    }
    root = draw_folders(tmp_path / "data")
    run_builtin(load_core_cfg("", class_words(root, tmp_path / "builtin", **more)))
    d2.run.run(d2.run.load_cfg("", class_words(root, tmp_path / "detectron2", **more)))
    assert_same_run(tmp_path / "builtin", tmp_path / "detectron2")
    found = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("builtin", "detectron2")]
    assert found[0] == found[1]


@pytest.mark.parametrize(("first", "second"), [("builtin", "detectron2"), ("detectron2", "builtin"), ("detectron2", "detectron2")])
def test_a_run_of_one_runner_resumes_in_the_other(runs, first, second):
    more = {"MODEL__DETR__DROPOUT": 0.2, "SOLVER__EMA__ENABLED": True, "SOLVER__EMA__DECAY": 0.5, "DATASETS__TEST": ()}
    whole = runs(first, "whole", **more)
    part = runs(first, "part", **more)
    for path in [part / "model_final.pth", part / "model_0000005.pth"]:
        path.unlink()
    (part / "last_checkpoint").write_text("model_0000002.pth")
    runs(second, "part", resume=True, **more)
    assert_same_run(whole, part)


def test_a_run_that_is_longer_than_asked_for_is_not_resumed(runs):
    """And one that was killed after its last numbered checkpoint gets its final one."""
    folder = runs("builtin", "run", DATASETS__TEST=())
    with pytest.raises(ConfigError, match="has 6 iterations already, and the config asks for 5"):
        runs("detectron2", "run", resume=True, SOLVER__MAX_ITER=5)
    (folder / "model_final.pth").unlink()
    (folder / "last_checkpoint").write_text("model_0000005.pth")
    runs("detectron2", "run", resume=True, DATASETS__TEST=())
    assert (folder / "model_final.pth").is_file() and (folder / "last_checkpoint").read_text() == "model_final.pth"


@pytest.mark.parametrize("detector", DETECTORS)
def test_evaluation_gives_the_figures_of_the_other_runner(runs, detector):
    weights = str(runs("builtin", "run", **DETECTORS[detector]) / "model_final.pth")
    more = {**DETECTORS[detector], "MODEL__WEIGHTS": weights}
    folders = [runs(runner, f"eval_{runner}", eval_only=True, **more) for runner in ("builtin", "detectron2")]
    figures = [(folder / "results.json").read_text() for folder in folders]
    assert figures[0] == figures[1]


@pytest.mark.parametrize("detector", DETECTORS)
def test_the_predictor_finds_what_detectron2s_runner_found(runs, drawn_coco, detector):
    """Bit for bit, with the averaged weights; it needs no detectron2 itself."""
    more = {"SOLVER__MAX_ITER": 3, "SOLVER__EMA__ENABLED": True, "SOLVER__EMA__DECAY": 0.5}
    folder = runs("detectron2", "run", **DETECTORS[detector], **more)
    predictor = Predictor.from_checkpoint(folder / "model_final.pth", device="cpu")
    images = drawn_coco.content["images"]
    found = predictor([drawn_coco.files.image_root / image["file_name"] for image in images])
    rows = [row for image, one in zip(images, found, strict=True) for row in one.to_coco(image["id"])]
    assert rows == json.loads((folder / "inference/coco_instances_results.json").read_text())


def test_bf16_autocast_runs_on_the_cpu(runs):
    builtin, detectron2 = (runs(name, name, SOLVER__AMP__ENABLED=True, DATASETS__TEST=()) for name in ("builtin", "detectron2"))
    assert_same_run(builtin, detectron2)


@pytest.mark.parametrize(
    ("more", "match"),
    [
        ({"MODEL__META_ARCHITECTURE": "RetinaNet"}, "CPVTDetr"),
        ({"MODEL__DEVICE": "warp"}, r"MODEL\.DEVICE"),
        ({"MODEL__BACKBONE__NAME": "vgg"}, "unknown backbone 'vgg'"),
    ],
)
def test_bad_input_is_told_as_by_the_other_runner(runs, more, match):
    with pytest.raises(ConfigError, match=match):
        runs("detectron2", "bad", **more)


@pytest.mark.parametrize("detector", DETECTORS)
def test_the_model_speaks_detectron2s_protocol(d2, detector):
    from detectron2.structures import Boxes, Instances

    words = ["MODEL.NUM_CLASSES", "3", "MODEL.BACKBONE.NAME", "resnet10", "MODEL.DEVICE", "cpu"]
    words += [str(word).replace("__", ".") for pair in DETECTORS[detector].items() for word in pair]
    cfg = d2.run.load_cfg("", words)
    from detectron2.modeling import build_model

    model = build_model(cfg)
    image = torch.randint(256, (3, 40, 60), dtype=torch.uint8)
    truth = Instances((40, 60), gt_boxes=Boxes(torch.tensor([[6.0, 4.0, 30.0, 24.0]])), gt_classes=torch.tensor([2]))
    empty = Instances((40, 60), gt_boxes=Boxes(torch.zeros(0, 4)), gt_classes=torch.zeros(0, dtype=torch.int64))
    losses = model.train()([{"image": image, "instances": truth}, {"image": image, "instances": empty}])
    assert {"loss_class", "loss_l1", "loss_giou"} <= set(losses)
    assert ("loss_proposal_class" in losses) == (detector == "deformable")
    sum(losses.values()).backward()
    with torch.no_grad():
        (result,) = model.eval()([{"image": image, "height": 80, "width": 120}])
    found = result["instances"]
    assert found.image_size == (80, 120)
    assert len(found) == 100
    assert found.pred_boxes.tensor.max() > 60  # in pixels of the original
    assert model.device == torch.device("cpu")


def test_targets_of_instances_are_normalised_centres(d2):
    from detectron2.structures import Boxes, Instances

    from cpvt_det.d2.meta_arch import _to_targets

    truth = Instances((40, 60), gt_boxes=Boxes(torch.tensor([[6.0, 4.0, 30.0, 24.0]])), gt_classes=torch.tensor([2]))
    expected = torch.tensor([[18 / 60, 14 / 40, 24 / 60, 20 / 40]])
    torch.testing.assert_close(_to_targets({"instances": truth}, 3).boxes_cxcywh, expected)


def test_a_backbone_of_detectron2s_registry_by_name(d2, runs):
    more = {"MODEL__BACKBONE__NAME": "build_resnet_backbone", "MODEL__BACKBONE__MASK_PADDING": False, "DATASETS__TEST": ()}
    more |= {"MODEL__BACKBONE__NORM": "FrozenBN"}  # ours, which that backbone does not take
    more |= {"MODEL__RESNETS__DEPTH": 18, "MODEL__RESNETS__RES2_OUT_CHANNELS": 64, "MODEL__RESNETS__NORM": "BN"}
    with pytest.raises(ConfigError, match=r"stage 3 needs exactly one map of stride 8, but ResNet has the maps res4 16"):
        runs("detectron2", "no_map", **more)
    more |= {"MODEL__RESNETS__OUT_FEATURES": ["res3", "res5"]}
    folder = runs("detectron2", "foreign", SOLVER__MAX_ITER=2, **more)
    assert len(losses_of(folder)) == 2
    with pytest.raises(ConfigError, match="MASK_PADDING"):
        runs("detectron2", "masked", **{**more, "MODEL__BACKBONE__MASK_PADDING": True})
    with pytest.raises(WeightsError, match=r"'MODEL.RESNETS'.* for detectron2 .use its DefaultPredictor then."):
        Predictor.from_checkpoint(folder / "model_final.pth")


def test_detectron2s_own_evaluator_takes_our_model(d2, drawn_coco, tmp_path):
    """With a model as random as this one, on ground truth without bad boxes: the same AP, AP50 and AP75."""
    from detectron2.evaluation import COCOEvaluator, inference_on_dataset
    from detectron2.modeling import build_model

    bad = ([3, 3, 0, 10], [80, -4, 20, 20], [100, 5, 10, 10])
    drawn_coco.content["annotations"] = [a for a in drawn_coco.content["annotations"] if a["bbox"] not in bad]
    drawn_coco.files.annotations.write_text(json.dumps({**drawn_coco.content, "info": {}}))
    cfg = d2.run.load_cfg("", overrides(drawn_coco.files, tmp_path, MODEL__NUM_CLASSES=3))
    d2.run.find_registered(cfg)
    dataset = builders.load_tests(cfg)[0]
    model, loader = build_model(cfg), builders.build_test_loader(cfg, dataset.records)
    for parameter in model.bbox_embed.layers[-1].parameters():
        torch.nn.init.zeros_(parameter)  # boxes of half the image: some match at IoU 0.5
    ours = evaluate(build_task(cfg), model, [dataset], tmp_path)["bbox"]
    theirs = inference_on_dataset(model, loader, COCOEvaluator("drawn", output_dir=str(tmp_path / "d2")))["bbox"]
    for name in ("AP", "AP50", "AP75"):
        assert ours[name] == pytest.approx(theirs[name], abs=1e-9)


def test_data_sets_registered_in_detectron2_are_found(d2, drawn_coco, tmp_path):
    from detectron2.data import DatasetCatalog
    from detectron2.data.datasets import register_coco_instances

    register_coco_instances("mine", {}, str(drawn_coco.files.annotations), str(drawn_coco.files.image_root))
    try:
        cfg = d2.run.load_cfg("", overrides(drawn_coco.files, tmp_path, DATASETS__TRAIN=("mine",)))
        d2.run.find_registered(cfg)
        assert len(builders.load_splits(cfg)[0][0].records) == 5
    finally:
        DatasetCatalog.remove("mine")
