# SPDX-License-Identifier: Apache-2.0
"""What a detectron2 user finds where detectron2 keeps it: our keys by its variable, its trainer, predictor, evaluator, launch."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from tiny import SMALL_WORDS, overrides

from cpvt_det import builders
from cpvt_det.common.errors import ConfigError
from cpvt_det.config import config_root, get_cfg

pytestmark = pytest.mark.detectron2


def flat(node, prefix=""):
    for key, value in node.items():
        yield from flat(value, f"{prefix}{key}.") if isinstance(value, dict) else [(prefix + key, value)]


SERVER = """
import contextlib, importlib, json, os, sys
for name in ("torch", "torchvision.transforms", "torch._dynamo", "torch.utils.tensorboard", "cv2", "matplotlib.pyplot"):
    with contextlib.suppress(ImportError):
        importlib.import_module(name)
for line in sys.stdin:
    code, arguments, environment, *printed = json.loads(line)
    child = os.fork()
    if child:
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        continue
    for stream, path in enumerate(printed, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    os.environ.update(environment)
    sys.argv[1:] = arguments
    exec(code, {"__name__": "__main__"})
    break
"""
"""Runs code in processes that have imported torch and the like, but neither detectron2 nor this package."""


@pytest.fixture(scope="module")
def server():
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", SERVER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=ROOT) as process:
        yield process
        process.stdin.close()


@pytest.fixture
def run_python(server, tmp_path):
    """Run code in a process of its own with ``DETECTRON2_ENV_MODULE``; what it prints."""

    def call(code, *arguments, **environment):
        printed = [tmp_path / name for name in ("stdout", "stderr")]
        for path in printed:
            path.unlink(missing_ok=True)
        request = [code, arguments, {"DETECTRON2_ENV_MODULE": "cpvt_det.d2", **environment}, *map(str, printed)]
        server.stdin.write(f"{json.dumps(request)}\n")
        server.stdin.flush()
        assert server.stdout.readline() == "0\n", printed[1].read_text()[-3000:]
        return printed[0].read_text()

    return call


# The variable


def test_the_variable_adds_our_keys_and_changes_none_of_detectron2s(run_python):
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
    options = {key for key in new if key not in ours and with_keys[key] is None}
    assert new - options == {key for key in ours if key not in without} | {key for key in new if key.startswith("MODEL.PEG.")}
    assert {"MODEL.POSITION.KERNEL_SIZE", "MODEL.DETECTOR.TWO_STAGE", "MODEL.BACKBONE.PATCH_SIZE"} <= options
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


def of_classifier(path):
    """Configs of classifiers are for our two runners: detectron2's own scripts have no images with one class each."""
    if path.name == "_starts.yaml":  # no config
        return True
    cfg = get_cfg()
    cfg.merge_from_file(str(path))
    return cfg.TASK == "classification"


def test_detectron2_itself_takes_every_yaml_of_ours_to_the_same_values(run_python):
    code = """
import json, sys
from detectron2.config import get_cfg
for name in sys.argv[1:]:
    cfg = get_cfg()
    cfg.merge_from_file(name)
    print(json.dumps(cfg))
"""
    names = [path for path in sorted(config_root().rglob("*.yaml")) if path.parent.name != "plug" and not of_classifier(path)]
    printed = run_python(code, *map(str, names)).splitlines()
    for name, line in zip(names, printed, strict=True):
        theirs, ours = dict(flat(json.loads(line))), get_cfg()
        ours.merge_from_file(str(name))
        for key, value in flat(json.loads(json.dumps(ours))):
            assert key == "MODEL.DEVICE" or theirs[key] == value, (name, key)
        assert theirs["SOLVER.MAX_ITER"] > 0 or name.name.startswith("_"), name


def test_the_length_for_detectron2s_trainer_is_that_of_the_epochs():
    images = {"coco_2017_train": 118287, "shapes_train": 4000, "bccd_train": 205, "aquarium_train": 448}
    for path in sorted(config_root().rglob("*.yaml")):
        cfg = get_cfg()
        if path.parent.name == "plug" or path.name.startswith("_") or of_classifier(path):
            continue
        cfg.merge_from_file(str(path))
        count = 4 if path.name.startswith("overfit") else images[cfg.DATASETS.TRAIN[0]]
        length = builders.build_schedule(cfg, count)
        assert (cfg.SOLVER.MAX_ITER, tuple(cfg.SOLVER.STEPS)) == (length.max_iter, tuple(length.steps)), path
        assert length.warmup == cfg.SOLVER.WARMUP_ITERS, path


def test_every_plug_yaml_builds_with_and_without_peg(run_python):
    code = """
import sys
from detectron2.config import get_cfg
from detectron2.modeling import build_model
for name in sys.argv[1:]:
    cfg = get_cfg()
    cfg.merge_from_file(name)
    print(sum("peg" in key for key in build_model(cfg).state_dict()))
"""
    names = sorted(path for path in (config_root() / "plug").glob("*_r50_*.yaml"))
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
def test_default_trainer_predictor_and_evaluator(run_python, drawn_coco, tmp_path, model):
    drawn_coco.files.annotations.write_text(json.dumps({**drawn_coco.content, "info": {}}))  # pycocotools wants it
    name, annotations, root = drawn_coco.files.name, str(drawn_coco.files.annotations), str(drawn_coco.files.image_root)
    words = [*SMALL_WORDS, "DATASETS.REGISTER", [[name, annotations, root]], "DATASETS.TRAIN", (name,), "DATASETS.TEST", (name,)]
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


@pytest.mark.parametrize("first", ["cpvt_det.d2", "detectron2", "detectron2.config", "cpvt_det.d2.run"])
def test_the_variable_works_whichever_is_imported_first(run_python, first):
    code = f"import {first}\nfrom detectron2.config import get_cfg\nimport cpvt_det.d2\nprint(get_cfg().MODEL.POSITION.NAME)"
    assert run_python(code).split()[-1] == "peg"


def test_our_script_runs_with_the_variable_set(drawn_coco, tmp_path):
    words = overrides(drawn_coco.files, tmp_path / "run", SOLVER__MAX_ITER=1, DATASETS__TEST=())
    config = ["--config-file", "coco/overfit_detr_r18_peg.yaml"]
    command = [sys.executable, "tools/train_net.py", "--runner", "detectron2", *config, *words]
    environment = {**os.environ, "DETECTRON2_ENV_MODULE": "cpvt_det.d2", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]


def test_backbone_weights_are_loaded_without_a_trainer_of_ours(tmp_path):
    from detectron2.modeling import build_model

    from cpvt_det.common.errors import BadInputError
    from cpvt_det.d2.config import load_cfg
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
