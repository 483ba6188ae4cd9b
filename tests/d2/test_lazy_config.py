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

pytestmark = pytest.mark.detectron2
LAZY = sorted(path.name for path in (config_root() / "lazy").glob("*.py"))
COCO = sorted(
    path.stem
    for path in (config_root() / "coco").glob("*_r50_*_*ep.yaml")
    if not path.stem.startswith("_") and not path.stem.endswith("_24ep")
)


def test_every_coco_yaml_of_50_and_12_epochs_has_its_lazy_config():
    assert [Path(name).stem for name in LAZY] == COCO and len(COCO) == 29


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
        for optimizer in (instantiate(lazy.optimizer), builders.build_optimizer(cfg, by_yaml))
    ]
    assert rates[0] == rates[1]
    length = builders.build_schedule(cfg, 118287)
    assert (lazy.train.max_iter, lazy.train.eval_period) == (length.max_iter, length.eval_period)
    assert instantiate(lazy.optimizer).clip_norm == cfg.SOLVER.CLIP_NORM
    criterion, expected = by_lazy.criterion, builders.build_criterion(cfg)
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
    if processes == 1:
        command = [*command[: -len(words)], "--resume", *words, "train.max_iter=3"]
        done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stderr[-3000:]
        assert torch.load(tmp_path / "run/model_final.pth", weights_only=True)["iteration"] == 2


def test_a_lazy_config_of_the_users_comes_before_ours_and_its_words_are_checked(tmp_path, monkeypatch):
    from cpvt_det.d2.lazy import load_lazy_config

    monkeypatch.chdir(tmp_path)
    (tmp_path / LAZY[0]).write_text("train = dict(max_iter=7)\n")
    assert load_lazy_config(LAZY[0]).train.max_iter == 7
    with pytest.raises(ConfigError, match=r"unknown key train\.max_itre; to add it, write \+train\.max_itre"):
        load_lazy_config(LAZY[0], ["train.max_itre=4"])
    assert load_lazy_config(LAZY[0], ["+train.extra=4"]).train.extra == 4


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
