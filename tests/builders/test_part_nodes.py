# SPDX-License-Identifier: Apache-2.0
"""A part's node takes what the part's constructor takes, and nothing is dropped in silence: other options are refused by name."""

import functools
import inspect
import re

import pytest
import yaml
from click.testing import CliRunner
from tiny import DEFORMABLE, INSIDE_LAYERS, OF_DETR, overrides, random_config, save_random
from torch import nn

from cpvt_det.builders import DETECTOR_REGISTRY, build_criterion, build_detector, build_encoder_position
from cpvt_det.builders.trained import load_trained
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.cli import main
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError
from cpvt_det.config import flat_items, get_cfg, load_cfg
from cpvt_det.losses import CLASSIFICATION_REGISTRY, LOSS_REGISTRY
from cpvt_det.losses.terms import l1_loss
from cpvt_det.models import BACKBONE_REGISTRY, QUERY_REGISTRY
from cpvt_det.position import POSITION_REGISTRY, SineEncoding
from cpvt_det.position.encoding import FACTS
from studies.engine.plan import load_plan

ONE_STAGE = {**DEFORMABLE, "MODEL__DETECTOR__TWO_STAGE": False}
FOCAL = {"MODEL__CRITERION__CLASSIFICATION__NAME": "focal"}
SINE = {"MODEL__POSITION__NAME": "sine"}
CONFIGS = {
    "DETR": {},
    "one stage": ONE_STAGE,
    "two stages": DEFORMABLE,
    "resnet50": {"MODEL__BACKBONE__NAME": "resnet50", "MODEL__BACKBONE__STAGES": (5,), "MODEL__BACKBONE__FREEZE_AT": 2},
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
    "MODEL.DETR.HIDDEN_DIM": 32,
    "MODEL.DETR.NHEADS": 4,
    "MODEL.DETR.DEC_LAYERS": 3,
    "MODEL.CRITERION.LOSSES": [["l1_again", 1.0]],
}
"""A value of each key that neither its default nor the test's config has; of other keys :func:`other_value`."""
CHOOSERS = re.compile(r"MODEL\.(META_ARCHITECTURE|[\w.]+\.NAME)$")
OUTSIDE = re.compile(
    r"MODEL\.(DEVICE|WEIGHTS(_SHA256)?|BACKBONE\.WEIGHTS|CLASSIFIER\.\w+)$"
)  # of build_device, load_initial_weights, losses
KEYS = [key for key, _ in flat_items(get_cfg()) if key.startswith("MODEL.") and not CHOOSERS.match(key) and not OUTSIDE.match(key)]
OTHER_OPTION = {
    "decoder_position": "none",
    "implementation": "eager",
    "num_levels": 3,
    "positions": [-1],
    "grid": (3, 5),
    "kernel_size": 7,
    "norm": "GN",
    "nms_threshold": 0.5,
    "denoising": 4,
    "patch_size": 32,
    "embed_dim": 32,
    "depth": 3,
    "num_heads": 4,
    "num_tokens": 2,
    "drop_path": 0.5,
}


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


def changes(config, key, value):
    """Whether a key changes what is built."""
    return built(**{**config, key: value}) != built_of(tuple(config.items()))


def other_value(key, config):
    value = dict(flat_items(random_config(**config)))[key]
    return not value if isinstance(value, bool) else OTHER[key] if key in OTHER else value / 2 if 0 < value < 1 else value + 1


@pytest.mark.parametrize("key", KEYS)
def test_a_key_changes_some_model(key):
    configs = [CONFIGS["resnet50"]] if key.endswith("DC5") else CONFIGS.values()
    assert any(changes(config, key.replace(".", "__"), other_value(key, config)) for config in configs)


def options(registry, name, facts=()):
    """The options of a part, each with a value that is not its default."""
    for option, parameter in inspect.signature(registry.find(name)).parameters.items():
        if option in registry.parameters(name) - set(facts) and parameter.default is not parameter.empty:
            default = parameter.default
            other = not default if isinstance(default, bool) else default / 2 or 0.5 if isinstance(default, float) else None
            yield option, OTHER_OPTION[option] if option in OTHER_OPTION else default + 1 if other is None else other


@pytest.mark.parametrize("config", [{}, ONE_STAGE], ids=["DETR", "Deformable-DETR"])
@pytest.mark.parametrize("name", OF_DETR)
def test_an_option_changes_its_encoding(name, config):
    if name in INSIDE_LAYERS and config:
        pytest.skip("not an encoding of Deformable-DETR")
    config = {**config, "MODEL__POSITION__NAME": name}
    parts = {f"{part.upper()}__": part for part in name.split("+")} if "+" in name else {"": name}
    for node, part in parts.items():
        for option, value in options(POSITION_REGISTRY, part, FACTS):
            if option == "kernel_size" and "1x1" in part:
                continue  # of one cell
            of_one_level = option == "share_levels" and "MODEL__DETECTOR__NUM_LEVELS" not in config
            if of_one_level or (part, option) in (("rope_mixed", "frequency_ratio"), ("peg_ffn", "zero_init")):
                continue  # of one level there is one PEG; values that weights start with are no traits
            assert changes(config, f"MODEL__POSITION__{node}{option.upper()}", value), option


@pytest.mark.parametrize("name", CLASSIFICATION_REGISTRY.names)
def test_an_option_changes_its_classification(name):
    config = {"MODEL__CRITERION__CLASSIFICATION__NAME": name}
    for option, value in options(CLASSIFICATION_REGISTRY, name, ["num_classes"]):
        assert changes(config, f"MODEL__CRITERION__CLASSIFICATION__{option.upper()}", value), option


@pytest.mark.parametrize(("name", "config"), [("anchors", ONE_STAGE), ("proposals", DEFORMABLE), ("mixed", DEFORMABLE)])
def test_an_option_changes_its_query_source(name, config):
    config = {**config, "MODEL__DETECTOR__BOX_REFINEMENT": True, "MODEL__QUERIES__NAME": name}
    for option, value in options(QUERY_REGISTRY, name, ["num_queries"]):
        if option in ("scaled_positions", "position_sines") and name == "mixed":
            assert changes({**config, "MODEL__QUERIES__REFINED_POSITIONS": True}, f"MODEL__QUERIES__{option.upper()}", value), (
                option
            )
            continue
        assert changes(config, f"MODEL__QUERIES__{option.upper()}", value), option
    noised = {**config, "MODEL__QUERIES__DENOISING": 4}
    for option in ("LABEL_NOISE", "BOX_NOISE"):
        assert changes(noised, f"MODEL__QUERIES__{option}", 0.25)


@pytest.mark.parametrize(("name", "config"), [("CPVTDetr", {}), ("CPVTDeformableDetr", ONE_STAGE)])
def test_an_option_changes_its_detector(name, config):
    given = [key.rpartition("__")[2].lower() for key in config if key.startswith("MODEL__DETECTOR__")]
    for option, value in options(DETECTOR_REGISTRY, name):
        if option not in given:
            assert changes(config, f"MODEL__DETECTOR__{option.upper()}", value), option


@pytest.mark.parametrize("backbone", ["deit_tiny", "cpvt_tiny"])
def test_an_option_changes_its_transformer_backbone(backbone):
    more = {"NAME": backbone, "EMBED_DIM": 16, "DEPTH": 2, "NUM_HEADS": 2, "STAGES": (4,), "NORM": "FrozenBN", "FREEZE_AT": 2}
    config = {f"MODEL__BACKBONE__{key}": value for key, value in more.items()}
    for option in ("embed_dim", "depth", "num_heads", "num_tokens", "drop_path"):
        assert changes(config, f"MODEL__BACKBONE__{option.upper()}", OTHER_OPTION[option]), option
    larger = {**config, "MODEL__BACKBONE__STAGES": (5,), "MODEL__BACKBONE__PATCH_SIZE": 32}
    assert built(**larger) != built(**config)
    assert changes(config, "MODEL__BACKBONE__POSITION__NAME", "sine")
    config["MODEL__BACKBONE__POSITION__NAME"] = "peg"
    assert changes(config, "MODEL__BACKBONE__POSITION__KERNEL_SIZE", 5)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {**SINE, "MODEL__POSITION__KERNEL_SIZE": 7},
            "unknown option of position encoding 'sine' 'kernel_size'; known: normalize, offset, temperature; it belongs to "
            "peg, peg_plain, peg_ffn",
        ),
        (
            {"MODEL__POSITION__NAME": "sine+peg", "MODEL__POSITION__ZERO_INIT": True},
            "unknown option of position encoding 'sine+peg' 'zero_init'; known: peg, sine; it belongs to peg, peg_plain, peg_ffn",
        ),
        (
            {"MODEL__POSITION__NAME": "sine+peg", "MODEL__POSITION__PEG__ZERO": True},
            "unknown option of position encoding 'peg' 'zero' (did you mean 'zero_init'?); known: ",
        ),
        (
            {"MODEL__POSITION__KERNEL_SIZE": "7x7"},
            "the option 'kernel_size' of the position encoding 'peg' must be of type int, as its default 3; got '7x7'",
        ),
        (
            {"MODEL__CRITERION__CLASSIFICATION__ALPHA": 0.5},
            "unknown option of classification 'softmax' 'alpha'; known: background_weight; it belongs to focal, varifocal, ia_bce",
        ),
        (
            {"MODEL__DETECTOR__NUM_LEVELS": 2},
            "unknown option of MODEL.META_ARCHITECTURE 'CPVTDetr' 'num_levels'; known: decoder_position, pre_norm; it belongs to "
            "CPVTDeformableDetr; leave it out, or set it to None",
        ),
        (
            {**DEFORMABLE, "MODEL__DETECTOR__PRE_NORM": True},
            "unknown option of MODEL.META_ARCHITECTURE 'CPVTDeformableDetr' 'pre_norm'; known: ",
        ),
        (
            {**DEFORMABLE, "MODEL__QUERIES__SHARED_CONTENT": True},
            "unknown option of query source 'proposals' 'shared_content'; known: ",
        ),
        (
            {**ONE_STAGE, "MODEL__QUERIES__NMS_THRESHOLD": 0.5},
            "unknown option of query source 'learned' 'nms_threshold'; known: none; it belongs to proposals, mixed; leave it out",
        ),
        (
            {**DEFORMABLE, "MODEL__QUERIES__LABEL_NOISE": 0.25},
            "MODEL.QUERIES.LABEL_NOISE has no effect without denoising: set MODEL.QUERIES.DENOISING to a number of pairs",
        ),
        (
            {**DEFORMABLE, "MODEL__DETECTOR__BOX_REFINEMENT": False, "MODEL__QUERIES__REFINED_POSITIONS": True},
            "MODEL.QUERIES.REFINED_POSITIONS needs box refinement: set MODEL.DETECTOR.BOX_REFINEMENT to True",
        ),
        (
            {**ONE_STAGE, "MODEL__DETECTOR__BOX_REFINEMENT": False, "MODEL__DETECTOR__LOOK_FORWARD_TWICE": True},
            "MODEL.DETECTOR.LOOK_FORWARD_TWICE needs box refinement: set MODEL.DETECTOR.BOX_REFINEMENT to True",
        ),
        ({"MODEL__NECK__WIDTH": 3}, "MODEL.NECK has options (width) but no name: set MODEL.NECK.NAME too"),
        (
            {"MODEL__BACKBONE__POSITION__NAME": "sine"},
            "MODEL.BACKBONE.POSITION: the backbone 'resnet10' does not accept a position encoding; set that of the detector, "
            "MODEL.POSITION",
        ),
        ({"MODEL__BACKBONE__PATCH_SIZE": 8}, "unknown option of backbone 'resnet10' 'patch_size'; known: "),
        (
            {"MODEL__BACKBONE__NAME": "resnet50", "MODEL__BACKBONE__DC5": True, "MODEL__BACKBONE__STAGES": (4,)},
            "MODEL: DC5 dilates stage 5, which is not among the stages (4,)",
        ),
    ],
)
def test_an_option_of_another_part_is_refused(config, message):
    with pytest.raises(ConfigError, match=re.escape(message)):
        build_detector(random_config(**config))


def test_none_takes_an_option_back(tmp_path):
    (tmp_path / "base.yaml").write_text("MODEL: {NUM_CLASSES: 3, POSITION: {NAME: peg, KERNEL_SIZE: 5}}")
    (tmp_path / "run.yaml").write_text("_BASE_: base.yaml\nMODEL: {POSITION: {NAME: sine}}")
    with pytest.raises(ConfigError, match="leave it out, or set it to None"):
        build_encoder_position(load_cfg(str(tmp_path / "run.yaml")), 8, 1, 6)
    cfg = load_cfg(str(tmp_path / "run.yaml"), ["MODEL.POSITION.KERNEL_SIZE", "None"])
    assert type(build_encoder_position(cfg, 8, 1, 6)) is SineEncoding


def test_keys_of_our_resnets_are_ignored_with_one_warning_under_a_backbone_of_ones_own(caplog):
    """The configs that one starts from set them."""
    build_detector(random_config(MODEL__BACKBONE__NAME="bare", MODEL__BACKBONE__STAGES=(4,)))
    (record,) = caplog.records
    assert record.getMessage() == (
        "The backbone 'bare' does not use these keys of MODEL.BACKBONE, so they are ignored: NORM 'BN', STAGES (4,), FREEZE_AT 0"
    )


def test_a_backbone_that_freezes_nothing_is_not_told_to_train_all(caplog):
    defaults = {"MODEL__BACKBONE__NORM": "FrozenBN", "MODEL__BACKBONE__FREEZE_AT": 2}
    for name, warnings in (("bare", 0), ("resnet10", 1)):
        caplog.clear()
        load_initial_weights(random_config(**defaults, MODEL__BACKBONE__NAME=name), nn.Identity(), Classes((0,), ("cat",)))
        assert len(caplog.records) == warnings


def test_options_are_in_the_checkpoint_and_what_is_typed_beside_them_is_refused(tmp_path):
    path = save_random(tmp_path / "model.pth", MODEL__POSITION__NAME="sine+peg", MODEL__POSITION__PEG__KERNEL_SIZE=5)
    trained = load_trained(path, "cpu")
    assert trained.detector.position.pegs["0"][0].conv.kernel_size == (5, 5)
    with pytest.raises(ConfigError, match="unknown option of position encoding 'sine' 'peg'"):
        load_trained(path, "cpu", overrides=["MODEL.POSITION.NAME", "sine"])


def test_a_resumed_run_tells_of_an_option_that_changed(drawn_coco, tmp_path):
    words = overrides(drawn_coco.files, tmp_path, SOLVER__MAX_ITER=1, TEST__PICTURES=0)
    run = ("train", "--runner", "builtin", "--config-file", "_detectron2.yaml", *words)
    assert CliRunner().invoke(main, run).exit_code == 0
    assert CliRunner().invoke(main, [*run, "--resume", "SOLVER.MAX_ITER", "2", "MODEL.POSITION.MASK_INPUT", "False"]).exit_code == 0
    assert (
        "config of the resumed run has changed: MODEL.POSITION.MASK_INPUT was unset, is False" in (tmp_path / "log.txt").read_text()
    )


def test_a_study_refuses_such_an_option_before_its_first_run(tmp_path):
    (tmp_path / "run.yaml").write_text("MODEL: {POSITION: {NAME: sine}}")
    variants = {"large": {"MODEL.POSITION.KERNEL_SIZE": 7}}
    plan = {"output": str(tmp_path), "groups": {"kernels": {"config": "run.yaml", "seeds": 1, "variants": variants}}}
    (tmp_path / "plan.yaml").write_text(yaml.safe_dump(plan))
    with pytest.raises(ConfigError, match="unknown option of position encoding 'sine' 'kernel_size'"):
        load_plan(tmp_path / "plan.yaml")


@pytest.mark.detectron2
def test_detectron2_s_runner_does_the_same():
    from cpvt_det.d2.config import load_cfg
    from cpvt_det.d2.run import build_detector

    words = ["MODEL.DEVICE", "cpu", "MODEL.NUM_CLASSES", "3", "MODEL.BACKBONE.NAME", "resnet18", "MODEL.POSITION.NAME", "sine"]
    build_detector(load_cfg("", words))
    with pytest.raises(ConfigError, match="unknown option of position encoding 'sine' 'kernel_size'"):
        build_detector(load_cfg("", [*words, "MODEL.POSITION.KERNEL_SIZE", "7"]))


@pytest.mark.detectron2
@pytest.mark.parametrize(("key", "other"), [("NORM", "BN"), ("WIDTH", "32"), ("DC5", "True")])
def test_a_backbone_of_detectron2_takes_no_key_of_our_resnets(key, other):
    from cpvt_det.d2.config import load_cfg
    from cpvt_det.d2.run import build_detector

    words = ["MODEL.DEVICE", "cpu", "MODEL.NUM_CLASSES", "3", "MODEL.BACKBONE.NAME", "build_resnet_backbone"]
    words += ["MODEL.BACKBONE.MASK_PADDING", "False", "MODEL.RESNETS.OUT_FEATURES", "['res5']", "MODEL.RESNETS.DEPTH", "50"]
    with pytest.raises(ConfigError, match=f"backbones of detectron2 do not support MODEL.BACKBONE.{key}, got '?{other}"):
        build_detector(load_cfg("", [*words, f"MODEL.BACKBONE.{key}", other]))
