# SPDX-License-Identifier: Apache-2.0
"""LazyConfig: the networks of the YAML, training as detectron2's script does it, and keys that it has nothing for."""

import json
import os
import subprocess
import sys

import pytest
import torch
from conftest import ROOT

from cpvt_det import builders
from cpvt_det.common.errors import ConfigError
from cpvt_det.config import config_root
from cpvt_det.solver.schedule import LRSchedule

pytestmark = pytest.mark.detectron2
COCO = sorted(
    path.name for path in (config_root() / "coco").glob("*.yaml") if not path.stem.startswith(("_", "dfine", "rtdetr"))
)  # those have an average of weights
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
    with pytest.raises(ConfigError, match=f"{key}: detectron2's trainers for LazyConfigs do not support it"):
        lazy_config(DETR, words)


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
from detectron2.checkpoint import DetectionCheckpointer
from detectron2.config import LazyConfig, instantiate
from detectron2.data.datasets import register_coco_instances
from detectron2.engine import SimpleTrainer, default_setup, default_writers, hooks, launch, default_argument_parser
from detectron2.engine.defaults import create_ddp_model
from detectron2.evaluation import inference_on_dataset
from detectron2.utils import comm

def start(args):
    register_coco_instances("drawn", {}, sys.argv[1], sys.argv[2])
    cfg = LazyConfig.apply_overrides(LazyConfig.load(args.config_file), args.opts)
    default_setup(cfg, args)
    model = instantiate(cfg.model).to(cfg.train.device)
    cfg.optimizer.params.model = model
    model = create_ddp_model(model, **cfg.train.ddp)
    trainer = SimpleTrainer(model, instantiate(cfg.dataloader.train), instantiate(cfg.optimizer))
    checkpointer = DetectionCheckpointer(model, cfg.train.output_dir, trainer=trainer)
    main = comm.is_main_process()
    writers = default_writers(cfg.train.output_dir, cfg.train.max_iter) if main else []
    loader, evaluator = instantiate(cfg.dataloader.test), instantiate(cfg.dataloader.evaluator)

    def evaluate():
        results = inference_on_dataset(model, loader, evaluator)
        print("AP", results)
        return results

    trainer.register_hooks([
        hooks.IterationTimer(), hooks.LRScheduler(scheduler=instantiate(cfg.lr_multiplier)),
        hooks.PeriodicCheckpointer(checkpointer, **cfg.train.checkpointer) if main else None,
        hooks.EvalHook(cfg.train.eval_period, evaluate),
        hooks.PeriodicWriter(writers, period=cfg.train.log_period) if main else None])
    trainer.train(0, cfg.train.max_iter)

if __name__ == "__main__":
    launch(start, int(sys.argv[3]), dist_url="auto", args=(default_argument_parser().parse_args(sys.argv[4:]),))
"""
"""What detectron2's ``lazyconfig_train_net.py`` does, which is not installed with it."""


@pytest.mark.parametrize(("model", "processes"), [("detr", 1), ("deformable_detr", 2)])
def test_a_file_with_a_lazy_config_trains_and_evaluates_in_one_process_or_two(drawn_coco, tmp_path, model, processes):
    script, mine = tmp_path / "train.py", tmp_path / "mine.py"
    script.write_text(LAZY_RUN)
    names = "model, dataloader, optimizer, lr_multiplier, train"
    text = f"from cpvt_det.d2.lazy import lazy_config\n\ncfg = lazy_config('coco/{model}_r50_peg_50ep.yaml')\n"
    mine.write_text(text + f"{names} = (cfg[name] for name in '{names}'.split(', '))\n")
    drawn_coco.files.annotations.write_text(json.dumps({**drawn_coco.content, "info": {}}))
    annotations, root = str(drawn_coco.files.annotations), str(drawn_coco.files.image_root)
    command = [sys.executable, str(script), annotations, root, str(processes), "--config-file", str(mine)]
    command += [*LAZY_WORDS, f"train.output_dir={tmp_path / 'run'}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "AP " in done.stdout
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.json").read_text().splitlines()]
    assert {"loss_class", "loss_l1", "loss_giou"} <= set(lines[0])
    state = torch.load(tmp_path / "run/model_final.pth", weights_only=True)
    assert "criterion" not in " ".join(state["model"])


def test_clipped_adamw_refuses_what_would_not_clip():
    from cpvt_det.d2.lazy import ClippedAdamW

    for options in ({"clip_norm": -0.1}, {"fused": True}):
        with pytest.raises(ValueError, match="clip_norm"):
            ClippedAdamW([torch.nn.Parameter(torch.zeros(1))], **options)
