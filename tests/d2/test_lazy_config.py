# SPDX-License-Identifier: Apache-2.0
"""LazyConfig: the networks of the YAML, training by its script, and configs that fail."""

import builtins
import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from test_checkpoint import Payload

from cpvt_det import builders
from cpvt_det.config import config_root
from cpvt_det.errors import ConfigError, WeightsError
from cpvt_det.solver.schedule import LRSchedule

pytestmark = pytest.mark.detectron2
COCO = sorted(path.name for path in (config_root() / "coco").glob("*.yaml") if not path.stem.startswith("_"))
DETR, DEFORMABLE = "coco/detr_r50_sine+peg_50ep.yaml", "coco/deformable_detr_r50_official_two_stage_50ep.yaml"
WORDS = ["MODEL.NUM_CLASSES", "80", "MODEL.BACKBONE.WEIGHTS", ""]


@pytest.mark.parametrize("name", COCO)
def test_a_yaml_s_lazy_config_has_its_network_rates_and_length(name):
    """Data by detectron2's parts, of which the sizes and the random crop are those of the YAML."""
    from detectron2.config import instantiate

    from cpvt_det.d2.config import load_cfg
    from cpvt_det.d2.lazy import lazy_config

    words = [*WORDS, "MODEL.DEVICE", "meta"]
    lazy, cfg = lazy_config(f"coco/{name}", words), load_cfg(f"coco/{name}", words)
    with torch.device("meta"):
        model, expected = instantiate(lazy.model), builders.build_detector(cfg)
    shapes = [{key: tensor.shape for key, tensor in one.state_dict().items()} for one in (model, expected)]
    assert shapes[0] == shapes[1]
    lazy.optimizer.params.model = model
    rates = [
        sorted((group["lr"], group["weight_decay"], len(group["params"])) for group in optimizer.param_groups)
        for optimizer in (instantiate(lazy.optimizer), builders.build_optimizer(cfg, expected))
    ]
    assert rates[0] == rates[1]
    length = builders.build_schedule(cfg, 118287)
    assert (lazy.train.max_iter, lazy.train.eval_period) == (length.max_iter, length.eval_period)
    assert instantiate(lazy.optimizer).clip_norm == cfg.SOLVER.CLIP_NORM
    factor, solver = instantiate(lazy.lr_multiplier), cfg.SOLVER
    schedule = LRSchedule(length, solver.SCHEDULE, solver.GAMMA, solver.COSINE_END)
    for iteration in (0, length.max_iter // 2, *length.steps, length.max_iter - 1):
        assert factor(iteration / length.max_iter) == schedule.factor(iteration), iteration
    mapper, test = lazy.dataloader.train.mapper, lazy.dataloader.test.mapper.augmentations[0]
    sizes = [list(one.short_edge_length) for one in mapper.augmentations if "short_edge_length" in one]
    assert sizes == [list(cfg.INPUT.MIN_SIZE_TRAIN)]
    assert any("tfm_or_aug" in one for one in mapper.augmentations) == cfg.INPUT.RESIZE_CROP.ENABLED
    assert (test.short_edge_length, test.max_size) == (cfg.INPUT.MIN_SIZE_TEST, cfg.INPUT.MAX_SIZE_TEST)
    instantiate(mapper.augmentations)
    train = lazy.dataloader.train
    assert (train.total_batch_size, list(train.dataset.names)) == (cfg.SOLVER.IMS_PER_BATCH, list(cfg.DATASETS.TRAIN))
    assert lazy.dataloader.evaluator.dataset_name == cfg.DATASETS.TEST[0]


@pytest.mark.parametrize("name", [DETR, DEFORMABLE])
def test_a_lazy_config_draws_the_weights_of_the_yaml(name):
    from detectron2.config import instantiate
    from detectron2.modeling import build_model

    from cpvt_det.d2.config import load_cfg
    from cpvt_det.d2.lazy import lazy_config

    torch.manual_seed(0)
    by_lazy = instantiate(lazy_config(name, WORDS).model).state_dict()
    torch.manual_seed(0)
    by_yaml = build_model(load_cfg(name, [*WORDS, "MODEL.DEVICE", "cpu"])).state_dict()
    assert all(torch.equal(by_lazy[key], by_yaml[key]) for key in by_yaml)


def test_parts_and_keys_of_a_lazy_config_replace_those_of_the_yaml():
    from detectron2.config import LazyCall, instantiate

    from cpvt_det.d2.lazy import lazy_config
    from cpvt_det.models import ResNetBackbone
    from cpvt_det.position import SineEncoding, build_position

    cfg = lazy_config("coco/detr_r50_peg_50ep.yaml", WORDS)
    cfg.model.yaml.MODEL.DETR.NUM_OBJECT_QUERIES = 7
    cfg.model.backbone = LazyCall(ResNetBackbone)(name="resnet18", stages=[5])
    cfg.model.position = LazyCall(build_position)(name="sine", channels=256)
    with torch.device("meta"):
        model = instantiate(cfg.model)
    assert (model.num_queries, model.backbone.channels, type(model.position)) == (7, [512], SineEncoding)


def test_one_test_set_is_evaluated_and_several_are_refused():
    from cpvt_det.d2.lazy import lazy_config

    with pytest.raises(ConfigError, match=r"DATASETS.TEST: a LazyConfig evaluates on one data set, got \['a', 'b'\]"):
        lazy_config(DETR, ["DATASETS.TEST", "('a', 'b')"])


@pytest.mark.parametrize(
    "words",
    [
        ["SOLVER.EMA.ENABLED", "True"],
        ["SOLVER.ACCUMULATE", "2"],
        ["INPUT.AUGMENTATIONS", "['mosaic']"],
        ["SOLVER.AMP.ENABLED", "True"],
    ],
)
def test_what_these_trainers_have_nothing_for_is_refused(words):
    from cpvt_det.d2.lazy import lazy_config

    key = "SOLVER.AMP.DTYPE" if "AMP" in words[0] else words[0]
    with pytest.raises(ConfigError, match=f"{key}: detectron2's trainers of LazyConfigs have nothing for it"):
        lazy_config(DETR, words)


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
        load_lazy_config(DETR, ["no_value"])


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
    "model.yaml.MODEL.BACKBONE.NAME=resnet10",
    "model.yaml.MODEL.BACKBONE.WEIGHTS=''",
    "model.yaml.MODEL.BACKBONE.NORM=BN",
    "model.yaml.MODEL.BACKBONE.FREEZE_AT=0",
    "model.yaml.MODEL.BACKBONE.WIDTH=16",
    "model.yaml.MODEL.DETR.HIDDEN_DIM=32",
    "model.yaml.MODEL.DETR.NHEADS=4",
    "model.yaml.MODEL.DETR.ENC_LAYERS=1",
    "model.yaml.MODEL.DETR.DEC_LAYERS=1",
    "model.yaml.MODEL.DETR.NUM_OBJECT_QUERIES=10",
    "model.yaml.MODEL.NUM_CLASSES=3",
    "dataloader.train.total_batch_size=2",
    "dataloader.train.num_workers=0",
    "dataloader.test.num_workers=0",
    "dataloader.train.dataset.names=[drawn]",
    "dataloader.test.dataset.names=[drawn]",
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
    command += ["--config-file", f"coco/{model}_r50_peg_50ep.yaml", *words]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "AP " in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.json").read_text().splitlines()]
    assert {"loss_class", "loss_l1", "loss_giou"} <= set(lines[0])
    state = torch.load(tmp_path / "run/model_final.pth", weights_only=True)
    assert "criterion" not in " ".join(state["model"])
    if processes == 1:
        command = [*command[: -len(words)], "--resume", *words, "train.max_iter=3"]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        assert torch.load(tmp_path / "run/model_final.pth", weights_only=True)["iteration"] == 2


def test_a_lazy_config_of_the_user_s_is_run_and_its_words_are_checked(tmp_path):
    """As detectron2's own script takes it, too."""
    from cpvt_det.d2.lazy import load_lazy_config

    path = str(tmp_path / "mine.py")
    text = f"from cpvt_det.d2.lazy import lazy_config\n\ncfg = lazy_config({DETR!r})\n"
    Path(path).write_text(text + "model, train = cfg.model, cfg.train\ntrain.max_iter = 7\n")
    cfg = load_lazy_config(path)
    assert cfg.train.max_iter == 7 and cfg.model.yaml.MODEL.POSITION.NAME == "sine+peg"
    with pytest.raises(ConfigError, match=r"unknown key train\.max_itre; to add it, write \+train\.max_itre"):
        load_lazy_config(path, ["train.max_itre=4"])
    assert load_lazy_config(path, ["+train.extra=4"]).train.extra == 4


@pytest.mark.parametrize("suffix", [".pkl", ".pth"])
def test_weights_of_a_lazy_config_run_no_code(tmp_path, suffix):
    from cpvt_det.d2.lazy import SafeCheckpointer

    path = tmp_path / f"x{suffix}"
    content = {"model": {}, "x": Payload(tmp_path / "ran"), "__author__": "somebody"}
    path.write_bytes(pickle.dumps(content)) if suffix == ".pkl" else torch.save(content, path)
    with pytest.raises(WeightsError, match=r"refused, because it contains a Python object \(\w+\.mkdir\)"):
        SafeCheckpointer(torch.nn.Linear(2, 1)).load(str(path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("suffix", [".pkl", ".pth", ".safetensors"])
def test_a_lazy_config_starts_from_weights_of_every_format(tmp_path, suffix, nested):
    from cpvt_det.d2.lazy import SafeCheckpointer

    path, model, other = tmp_path / f"x{suffix}", torch.nn.Linear(2, 1), torch.nn.Linear(2, 1)
    weights = model.state_dict()
    if suffix == ".safetensors":
        save_file(weights, path)
    elif suffix == ".pkl":
        arrays = {name: tensor.numpy() for name, tensor in weights.items()}
        path.write_bytes(pickle.dumps({"model": arrays, "__author__": "somebody"} if nested else arrays))
    else:
        torch.save({"model": weights} if nested else weights, path)
    SafeCheckpointer(other).load(str(path))
    assert all(torch.equal(weights[name], tensor) for name, tensor in other.state_dict().items())


def test_clipped_adamw_refuses_what_would_not_clip():
    from cpvt_det.d2.lazy import ClippedAdamW

    for options in ({"clip_norm": -0.1}, {"fused": True}):
        with pytest.raises(ValueError, match="clip_norm"):
            ClippedAdamW([torch.nn.Parameter(torch.zeros(1))], **options)
