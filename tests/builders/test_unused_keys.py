# SPDX-License-Identifier: Apache-2.0
"""Nothing is dropped in silence: keys that cannot apply are refused by name, in kept configs they are told of."""

import functools
import json
import logging
import re
import shutil

import pytest
import torch
import yaml
from click.testing import CliRunner
from tiny import DEFORMABLE, IN_ATTENTION, overrides, random_config, save_random
from torch import nn

from cpvt_det.builders import build_criterion, build_detector, load_cfg
from cpvt_det.builders.unused import unused_keys
from cpvt_det.checkpoint.model_folder import save_model
from cpvt_det.checkpoint.trained import load_trained
from cpvt_det.class_names import Classes
from cpvt_det.cli import main
from cpvt_det.config import flat_items, get_cfg
from cpvt_det.errors import ConfigError
from cpvt_det.losses import LOSS_REGISTRY
from cpvt_det.losses.terms import l1_loss
from cpvt_det.models import BACKBONE_REGISTRY, QUERY_REGISTRY
from cpvt_det.position import POSITION_REGISTRY
from cpvt_det.runner.setup import stop_log
from studies.engine.plan import load_plan

ONE_STAGE = {**DEFORMABLE, "MODEL__DEFORMABLE__TWO_STAGE": False}
FOCAL = {"MODEL__CRITERION__CLASSIFICATION": "focal"}
SINE = {"MODEL__POSITION__NAME": "sine"}
PARTS = ("separable", "stacked", "frozen", "wide", "borderless", "twelve_1x1")
OF_PARTS = ", ".join(f"peg_{part}, peg_plain_{part}" for part in PARTS)
PEGS = f"peg, peg_plain, sine+peg, sine_offset+peg, table+peg_plain, {OF_PARTS}"
"""The package's own, and those of ``studies/ablations.py``, in the order of their registration."""
BARE = {
    "MODEL__BACKBONE__NAME": "bare",
    "MODEL__BACKBONE__NORM": "FrozenBN",
    "MODEL__BACKBONE__FREEZE_AT": 2,
    "MODEL__BACKBONE__STAGES": (5,),
}
CONFIGS = {
    "DETR": {},
    "DETR, focal": FOCAL,
    "one stage": {**ONE_STAGE, "MODEL__CRITERION__CLASSIFICATION": "softmax"},
    "one stage, focal": ONE_STAGE,
    "two stages": DEFORMABLE,
    "mixed queries": {**DEFORMABLE, "MODEL__QUERIES__NAME": "mixed"},
    "hybrid": {**DEFORMABLE, "MODEL__QUERIES__NAME": "proposals", "MODEL__QUERIES__HYBRID": 4},
    "denoising": {**DEFORMABLE, "MODEL__QUERIES__NAME": "proposals", "MODEL__QUERIES__DENOISING": 4},
}
OTHER = {
    "MODEL.FREEZE": ["decoder"],
    "MODEL.PIXEL_MEAN": [100.0, 110.0, 120.0],
    "MODEL.PIXEL_STD": [50.0, 60.0, 70.0],
    "MODEL.BACKBONE.NORM": "GN",
    "MODEL.BACKBONE.STAGES": (4,),
    "MODEL.BACKBONE.WIDTH": 32,
    "MODEL.BACKBONE.FREEZE_AT": 1,
    "MODEL.BACKBONE.MASK_PADDING": False,
    "MODEL.POSITION.DECODER": "none",
    "MODEL.POSITION.POSITIONS": [-1],
    "MODEL.POSITION.GRID": (3, 5),
    "MODEL.POSITION.KERNEL_SIZE": 7,
    "MODEL.POSITION.NORM": "GN",
    "MODEL.DETR.HIDDEN_DIM": 32,
    "MODEL.DETR.NHEADS": 4,
    "MODEL.DETR.DEC_LAYERS": 3,
    "MODEL.DEFORMABLE.NUM_LEVELS": 3,
    "MODEL.DEFORMABLE.PROPOSAL_NMS": 0.5,
    "MODEL.DEFORMABLE.IMPLEMENTATION": "eager",
    "MODEL.QUERIES.LABEL_NOISE": 0.25,
    "MODEL.QUERIES.BOX_NOISE": 0.5,
    "MODEL.CRITERION.LOSSES": [["l1_again", 1.0]],
    "MODEL.CLASSIFIER.POOL": "mean",
    "MODEL.CLASSIFIER.TEACHER": "teacher.pth",
    "MODEL.CLASSIFIER.TEACHER_WEIGHTS": "DEFAULT",
}
"""A value of each key that neither its default nor the test's config has; of other keys :func:`other_value`."""
CHOOSERS = re.compile(r"MODEL\.(META_ARCHITECTURE|[\w.]+\.NAME|CRITERION\.CLASSIFICATION)$")
OUTSIDE = {"MODEL.DEVICE", "MODEL.WEIGHTS", "MODEL.BACKBONE.WEIGHTS"}  # of build_device and load_initial_weights
KEYS = [key for key, _ in flat_items(get_cfg()) if key.startswith("MODEL.") and not CHOOSERS.match(key) and key not in OUTSIDE]


@pytest.fixture(autouse=True)
def registered():
    """Parts of one's own, for this file."""
    LOSS_REGISTRY._obj_map["l1_again"] = l1_loss
    BACKBONE_REGISTRY._obj_map["bare"] = Bare
    QUERY_REGISTRY._obj_map["fixed"] = lambda channels: nn.Identity()
    yield
    del LOSS_REGISTRY._obj_map["l1_again"], BACKBONE_REGISTRY._obj_map["bare"], QUERY_REGISTRY._obj_map["fixed"]


class Bare(nn.Conv2d):
    """A backbone that takes no key."""

    def __init__(self):
        super().__init__(3, 8, 16, 16)
        self.strides, self.channels, self.size_divisibility = [16], [8], 16


def other_value(key, config):
    value = dict(flat_items(random_config(**config)))[key]
    if isinstance(value, bool):
        return not value
    key = key.replace("BACKBONE.POSITION", "POSITION")
    return OTHER[key] if key in OTHER else value + 1


def traits(part):
    """What a detector, a criterion or a part of them was built with: types, plain attributes, shapes, and values of buffers."""
    if isinstance(part, nn.Module):
        tensors = {name: (tuple(value.shape), value.requires_grad) for name, value in part.named_parameters()}
        tensors |= {name: value.tolist() for name, value in part.named_buffers() if value.numel() < 4}
        return [tensors, [(name, type(module), plain(module)) for name, module in part.named_modules()]]
    return [plain(part), *(traits(value) for value in vars(part).values() if type(value).__module__.startswith("cpvt_det."))]


def plain(part):
    kinds = (int, float, str, bool, tuple, list, dict, type(None))
    return {name: repr(value) for name, value in vars(part).items() if isinstance(value, kinds) and name[0] != "_"}


def built(**config):
    cfg = random_config(**config)
    return traits(build_detector(cfg)), traits(build_criterion(cfg))


@functools.cache
def built_of(config):
    """Of the words of a config; once for all keys."""
    return built(**dict(config))


def applies(key, config):
    """Whether a key changes what is built, or is refused by its name."""
    if not key.startswith("MODEL.BACKBONE."):
        config = {**BARE, **config}
    changed = {**config, key.replace(".", "__"): other_value(key, config)}
    if key in unused_keys(random_config(**changed)):
        return True
    before = built_of(tuple(config.items()))
    try:
        return built(**changed) != before
    except ConfigError as error:
        named, name = (re.sub(r"[^a-z]", "", text.lower()) for text in (str(error), key.rpartition(".")[2]))
        return name in named


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("key", [key for key in KEYS if "POSITION." not in key or key.endswith("DECODER")])
def test_a_key_changes_what_is_built_or_is_refused(kind, key):
    assert applies(key, CONFIGS[kind])


@pytest.mark.parametrize("config", [{}, ONE_STAGE], ids=["DETR", "Deformable-DETR"])
@pytest.mark.parametrize("name", POSITION_REGISTRY.names)
def test_a_key_of_an_encoding_changes_it_or_is_refused(name, config):
    keys = [key for key in KEYS if key.startswith("MODEL.POSITION.") and not key.endswith("DECODER")]
    config = {**config, "MODEL__POSITION__NAME": name}
    if name in IN_ATTENTION and "MODEL__DEFORMABLE__NUM_LEVELS" in config:
        pytest.skip("not an encoding of Deformable-DETR")
    assert [key for key in keys if not applies(key, config)] == []


@pytest.mark.parametrize("encoding", ["", "sine+peg", "relative"])
@pytest.mark.parametrize("backbone", ["deit_tiny", "cpvt_tiny"])
def test_a_key_of_a_backbone_s_encoding_changes_it_or_is_refused(backbone, encoding):
    """Of the model's own encoding, and of one of the user's."""
    more = {"NAME": backbone, "POSITION__NAME": encoding, "EMBED_DIM": 16, "DEPTH": 2, "NUM_HEADS": 2}
    more |= {"STAGES": (4,), "NORM": "FrozenBN", "FREEZE_AT": 2}
    config = {f"MODEL__BACKBONE__{key}": value for key, value in more.items()}
    assert [key for key in KEYS if key.startswith("MODEL.BACKBONE.POSITION.") and not applies(key, config)] == []


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**SINE, "MODEL__POSITION__KERNEL_SIZE": 7},
            f"MODEL.POSITION.KERNEL_SIZE is 7, but the position encoding 'sine' does not take it; leave it at 3, or set "
            f"MODEL.POSITION.NAME to {PEGS}, peg_query_key",
        ),
        (
            {"MODEL__POSITION__NAME": "peg_query_key", "MODEL__POSITION__POSITIONS": [1]},
            "MODEL.POSITION.POSITIONS is [1], but the position encoding 'peg_query_key' does not take it; leave it at [0], or set "
            f"MODEL.POSITION.NAME to {PEGS}",
        ),
        (
            {"MODEL__POSITION__TABLE_SIZE": 60},
            "MODEL.POSITION.TABLE_SIZE is 60, but the position encoding 'peg' does not take it; leave it at 50, or set "
            "MODEL.POSITION.NAME to learned",
        ),
        (
            {"MODEL__CRITERION__FOCAL_ALPHA": 0.5},
            "MODEL.CRITERION.FOCAL_ALPHA is 0.5, but the classification 'softmax' does not take it; leave it at 0.25, or set "
            "MODEL.CRITERION.CLASSIFICATION to focal",
        ),
        (
            {**FOCAL, "MODEL__CRITERION__BACKGROUND_WEIGHT": 0.5},
            "MODEL.CRITERION.BACKGROUND_WEIGHT is 0.5, but the classification 'focal' does not take it; leave it at 0.1, or set "
            "MODEL.CRITERION.CLASSIFICATION to softmax",
        ),
        (
            {"MODEL__DEFORMABLE__NUM_LEVELS": 2},
            "MODEL.DEFORMABLE.NUM_LEVELS is 2, but the detector 'CPVTDetr' does not take it; leave it at 4, or set "
            "MODEL.META_ARCHITECTURE to CPVTDeformableDetr",
        ),
        (
            {"MODEL__POSITION__SHARE_LEVELS": True},
            "MODEL.POSITION.SHARE_LEVELS is True, but the detector 'CPVTDetr' does not take it; leave it at False, or set "
            "MODEL.META_ARCHITECTURE to CPVTDeformableDetr",
        ),
        (
            {**DEFORMABLE, "MODEL__POSITION__DECODER": "none"},
            "MODEL.POSITION.DECODER is 'none', but the detector 'CPVTDeformableDetr' does not take it; leave it at 'sine', or set "
            "MODEL.META_ARCHITECTURE to CPVTDetr",
        ),
        (
            {"SOLVER__POINTS_LR_MULTIPLIER": 1.0},
            "SOLVER.POINTS_LR_MULTIPLIER is 1.0, but the detector 'CPVTDetr' does not take it; leave it at 0.1, or set "
            "MODEL.META_ARCHITECTURE to CPVTDeformableDetr",
        ),
        (
            {**ONE_STAGE, "MODEL__DEFORMABLE__PROPOSAL_NMS": 0.5},
            "MODEL.DEFORMABLE.PROPOSAL_NMS is 0.5, but the query source 'learned' does not take it; leave it at 1.0, or set "
            "MODEL.DEFORMABLE.TWO_STAGE to True",
        ),
        (
            {**ONE_STAGE, "MODEL__CRITERION__PROPOSAL_MATCHES": 4},
            "MODEL.CRITERION.PROPOSAL_MATCHES is 4, but the query source 'learned' makes no proposals; leave it at 1, or set "
            "MODEL.DEFORMABLE.TWO_STAGE to True",
        ),
        (
            {"MODEL__QUERIES__NAME": "fixed"},
            "MODEL.DETR.NUM_OBJECT_QUERIES is 6, but the query source 'fixed' does not take it; leave it at 100, or set "
            "MODEL.QUERIES.NAME to learned, proposals, anchors, mixed",
        ),
        (
            {**DEFORMABLE, "MODEL__QUERIES__REFINED_POSITIONS": True},
            "MODEL.QUERIES.REFINED_POSITIONS is True, but MODEL.QUERIES.NAME is empty; leave it at False, or set it to mixed",
        ),
        (
            {"MODEL__NECK__WIDTH": 3},
            "MODEL.NECK.WIDTH is 3, but MODEL.NECK.NAME is empty; leave it out, or name the part that takes it there",
        ),
        (
            {"MODEL__BACKBONE__NAME": "resnet50", "MODEL__BACKBONE__DC5": True},
            "MODEL.BACKBONE.DC5 is True, but MODEL.BACKBONE.STAGES has no stage 5; leave it at False, or add 5 to "
            "MODEL.BACKBONE.STAGES",
        ),
        (
            {**SINE, "SOLVER__WEIGHT_DECAY_PEG": 0.5},
            "SOLVER.WEIGHT_DECAY_PEG is 0.5, but the position encoding 'sine' has no PEG; leave it at None, or set "
            "MODEL.POSITION.NAME to peg",
        ),
        (
            {"SOLVER__SCHEDULE": "cosine", "SOLVER__GAMMA": 0.5},
            "SOLVER.GAMMA is 0.5, but the schedule 'cosine' has no steps; leave it at 0.1, or set SOLVER.SCHEDULE to step",
        ),
        (
            {"SOLVER__SCHEDULE": "cosine", "SOLVER__STEP_EPOCHS": (20.0,)},
            "SOLVER.STEP_EPOCHS is (20.0,), but the schedule 'cosine' has no steps; leave it at (40.0,), or set SOLVER.SCHEDULE to "
            "step",
        ),
    ],
)
def test_the_refusal_names_key_value_reason_and_way_out(config, message):
    with pytest.raises(ConfigError, match=f"^{re.escape(message)}$"):
        build_detector(random_config(**config))


def test_keys_of_our_resnets_are_ignored_with_one_warning_under_a_backbone_of_ones_own(caplog):
    """The configs that one starts from set them."""
    build_detector(random_config(MODEL__BACKBONE__NAME="bare", MODEL__BACKBONE__STAGES=(4,)))
    (record,) = caplog.records
    assert record.getMessage() == (
        "The backbone 'bare' does not take these keys of MODEL.BACKBONE, which are ignored: NORM 'BN', STAGES (4,), FREEZE_AT 0"
    )


def test_what_is_prepared_beside_a_switch_is_no_fault():
    words = {"SOLVER__AMP__DTYPE": "float16", "SOLVER__EMA__DECAY": 0.5, "SOLVER__EPOCHS": 3.0, "SOLVER__STEPS": (5,)}
    assert unused_keys(random_config(**words, SOLVER__SCHEDULE="cosine", SOLVER__STEP_EPOCHS=())) == {}


def test_a_backbone_that_freezes_nothing_is_not_told_to_train_all(caplog):
    """By keys that it would then refuse."""
    from cpvt_det.checkpoint.initial import load_initial_weights

    defaults = {"MODEL__BACKBONE__NORM": "FrozenBN", "MODEL__BACKBONE__FREEZE_AT": 2}
    for name, warnings in (("bare", 0), ("resnet10", 1)):
        caplog.clear()
        load_initial_weights(random_config(**defaults, MODEL__BACKBONE__NAME=name), nn.Identity(), Classes((0,), ("cat",)))
        assert len(caplog.records) == warnings


@pytest.fixture
def warnings():
    """The warnings of the package until a run takes over its log."""
    found = []
    listen(found)
    yield found
    stop_log()


def listen(found):
    """As in a new process: no log of a run before, and every warning from now on put into a list."""
    stop_log()
    found.clear()
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: found.append(record.getMessage())
    logging.getLogger("cpvt_det").addHandler(handler)


KEPT = {"KERNEL_SIZE: 3": "KERNEL_SIZE: 7", " FOCAL_GAMMA: 2.0": " FOCAL_GAMMA: 3.0"}


def as_before(text):
    """A config with keys that had no effect, as runs kept it when they were not refused."""
    for now, before in KEPT.items():
        assert now in text
        text = text.replace(now, before)
    return text


def kept_checkpoint(path, **config):
    save_random(path, **SINE, **config)
    keep_as_before(path)
    return path


def keep_as_before(path):
    checkpoint = torch.load(path, weights_only=True)
    checkpoint["cpvt_det"]["config"] = as_before(checkpoint["cpvt_det"]["config"])
    torch.save(checkpoint, path)
    path.with_name(f"{path.name}.sha256").unlink(missing_ok=True)


def message_of(source):
    keys = "MODEL.BACKBONE.POSITION.KERNEL_SIZE 7, MODEL.CRITERION.FOCAL_GAMMA 3.0, MODEL.POSITION.KERNEL_SIZE 7"
    return f"{source} has keys that have no effect on this model and are ignored: {keys}"


def test_a_checkpoint_of_before_loads_with_one_warning(tmp_path, warnings):
    path = kept_checkpoint(tmp_path / "old.pth")
    cfg = load_trained(path, "cpu").cfg
    assert warnings == [message_of(f"the config in {path}")]
    assert (cfg.MODEL.POSITION.KERNEL_SIZE, cfg.MODEL.CRITERION.FOCAL_GAMMA) == (3, 2.0)
    warnings.clear()
    save_random(tmp_path / "new.pth", **SINE)
    load_trained(tmp_path / "new.pth", "cpu")
    assert warnings == []


def test_what_is_typed_beside_a_kept_config_is_refused(tmp_path):
    path = kept_checkpoint(tmp_path / "old.pth")
    with pytest.raises(ConfigError, match=r"^MODEL\.POSITION\.KERNEL_SIZE is 5, but the position encoding 'sine'"):
        load_trained(path, "cpu", overrides=["MODEL.POSITION.KERNEL_SIZE", "5"])


def test_a_model_folder_of_before_loads_with_one_warning(tmp_path, warnings):
    trained = load_trained(save_random(tmp_path / "new.pth", **SINE), "cpu")
    config = as_before(trained.cfg.dump())
    save_model(tmp_path / "model", trained.detector.state_dict(), trained.classes, config)
    load_trained(tmp_path / "model", "cpu")
    assert warnings == [message_of(f"the config in {tmp_path}/model")]
    warnings.clear()
    load_trained(tmp_path / "model", "cpu", str(tmp_path / "model/config.yaml"))
    assert warnings == [message_of(f"{tmp_path}/model/config.yaml")]
    (tmp_path / "typed.yaml").write_text(config)
    with pytest.raises(ConfigError, match=r"^MODEL\.POSITION\.KERNEL_SIZE is 7, but"):
        load_trained(tmp_path / "model", "cpu", str(tmp_path / "typed.yaml"))


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def test_a_run_of_before_goes_on_and_is_evaluated_with_one_warning(drawn_coco, tmp_path, warnings):
    """By the config that its folder kept; a copy of that elsewhere is typed, and refused."""
    run, typed = tmp_path / "run", tmp_path / "typed.yaml"
    words = overrides(drawn_coco.files, run, **SINE, SOLVER__MAX_ITER=2, TEST__PICTURES=0)
    assert call("train", "--runner", "builtin", "--config-file", "_detectron2.yaml", *words).exit_code == 0
    keep_as_before(run / "model_final.pth")
    (run / "config.yaml").write_text(as_before((run / "config.yaml").read_text()))
    shutil.copy(run / "config.yaml", typed)

    listen(warnings)
    weights, kept = run / "model_final.pth", ("--runner", "builtin", "--config-file", run / "config.yaml")
    ended = call("eval", weights, *kept, "OUTPUT_DIR", tmp_path / "eval")
    assert ended.exit_code == 0, ended.output
    assert warnings == [message_of(f"{run}/config.yaml")]

    resume = ("train", "--runner", "builtin", "--resume", "--config-file")
    ended = call(*resume, typed)
    assert ended.exit_code == 2 and "error: MODEL.POSITION.KERNEL_SIZE is 7, but the position encoding 'sine'" in ended.output
    assert (run / "config.yaml").read_text() == typed.read_text()  # what was refused has replaced nothing
    listen(warnings)
    length = len((run / "log.txt").read_text())
    ended = call(*resume, run / "config.yaml", "SOLVER.MAX_ITER", 4)
    assert ended.exit_code == 0, ended.output
    log = (run / "log.txt").read_text()[length:]
    assert warnings == [message_of(f"{run}/config.yaml")]
    assert "config of the resumed run has changed: SOLVER.MAX_ITER was 2, is 4" in log
    assert "KERNEL_SIZE" not in log and "FOCAL_GAMMA" not in log
    assert [json.loads(line)["iteration"] for line in (run / "metrics.json").read_text().splitlines()][-1] == 3


def test_a_study_refuses_such_a_key_before_its_first_run(tmp_path):
    (tmp_path / "run.yaml").write_text("MODEL: {POSITION: {NAME: sine}}")
    variants = {"large": {"MODEL.POSITION.KERNEL_SIZE": 7}}
    plan = {"output": str(tmp_path), "groups": {"kernels": {"config": "run.yaml", "seeds": 1, "variants": variants}}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    with pytest.raises(ConfigError, match=r"^MODEL\.POSITION\.KERNEL_SIZE is 7, but the position encoding 'sine'"):
        load_plan(tmp_path / "plan.yaml")


def test_a_config_by_name_is_typed(tmp_path):
    """Whatever lies beside it."""
    (tmp_path / "log.txt").write_text("")
    (tmp_path / "mine.yaml").write_text("MODEL: {NUM_CLASSES: 3, POSITION: {NAME: sine, KERNEL_SIZE: 7}}")
    assert list(unused_keys(load_cfg(str(tmp_path / "mine.yaml")))) == ["MODEL.POSITION.KERNEL_SIZE"]


@pytest.mark.detectron2
def test_detectron2_s_runner_does_the_same(tmp_path, warnings):
    from cpvt_det.d2.config import load_cfg, without_untouched
    from cpvt_det.d2.trainer import build_detector

    words = ["MODEL.DEVICE", "cpu", "MODEL.NUM_CLASSES", "3", "MODEL.BACKBONE.NAME", "resnet18", "MODEL.POSITION.NAME", "sine"]
    cfg = load_cfg("", words)
    assert unused_keys(cfg) == {}
    with pytest.raises(ConfigError, match=r"^MODEL\.POSITION\.KERNEL_SIZE is 7, but the position encoding 'sine'"):
        build_detector(load_cfg("", [*words, "MODEL.POSITION.KERNEL_SIZE", "7"]))
    (tmp_path / "config.yaml").write_text(as_before(without_untouched(cfg).dump()))
    (tmp_path / "log.txt").write_text("")
    build_detector(load_cfg(str(tmp_path / "config.yaml")))
    assert warnings == [message_of(f"{tmp_path}/config.yaml")]


@pytest.mark.detectron2
@pytest.mark.parametrize("key", ["NORM", "WIDTH"])
def test_a_backbone_of_detectron2_takes_no_key_of_ours(key):
    from cpvt_det.d2.config import load_cfg
    from cpvt_det.d2.trainer import build_detector

    words = ["MODEL.DEVICE", "cpu", "MODEL.NUM_CLASSES", "3", "MODEL.BACKBONE.NAME", "build_resnet_backbone"]
    words += ["MODEL.BACKBONE.MASK_PADDING", "False", "MODEL.RESNETS.OUT_FEATURES", "['res5']", "MODEL.RESNETS.DEPTH", "50"]
    other = {"NORM": "BN", "WIDTH": "32"}[key]
    with pytest.raises(ConfigError, match=rf"^MODEL\.BACKBONE\.{key} is '?{other}'?, but backbones of detectron2 do not take it"):
        build_detector(load_cfg("", [*words, f"MODEL.BACKBONE.{key}", other]))
