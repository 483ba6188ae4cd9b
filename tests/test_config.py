# SPDX-License-Identifier: Apache-2.0
"""Config files and overrides: every file of the package builds; what is wrong is told by key and source."""

import re

import pytest
import torch
from fvcore.common.config import CfgNode

from cpvt_det import config
from cpvt_det.builders import (
    build_criterion,
    build_detector,
    build_device,
    build_postprocessor,
    build_schedule,
    detector_arguments,
    is_classifier,
)
from cpvt_det.checkpoint.weights import CLASS_HEAD
from cpvt_det.common.errors import BadInputError, ConfigError, UnknownNameError, first_line
from cpvt_det.config import config_root, find_config, get_cfg, load_cfg, merge_overrides, read_config

CONFIGS = sorted(str(path.relative_to(config_root())) for path in config_root().rglob("*.yaml") if path.name != "_starts.yaml")
OURS = [name for name in CONFIGS if not name.startswith("plug/")]  # those are of detectron2's own models
RTDETRS = [f"rtdetrv2_{size}_{{}}_{epochs}ep" for size, epochs in (("r18", 120), ("r34", 120), ("r50", 72), ("r101", 72))]
REAL_TIME = [*RTDETRS, *(f"dfine_{size}_{{}}" for size in "nsmlx")]
"""Files that differ in the encoding; large networks of timm take half a minute to try, so of D-FINE the smallest alone is built."""
TRIED = [name for name in OURS if not re.match(r"coco/(_base_)?dfine_([smlx]|n_sine|n_peg)", name)]
TABLE = [
    *(f"coco/detr_r50_{encoding}_50ep.yaml" for encoding in ("none", "sine", "learned", "peg", "sine+peg")),
    *(f"coco/deformable_detr_r50_{encoding}_50ep.yaml" for encoding in ("none", "sine_offset", "peg", "sine_offset+peg")),
]
RECIPES = [
    f"coco/{model}_{encoding}_{epochs}ep.yaml"
    for model, epochs in (
        ("deformable_detr_r50_pp", 12),
        ("dino_r50_4scale", 12),
        ("dino_r50_4scale", 24),
    )
    for encoding in ("sine_offset", "peg", "sine_offset+peg")
]
OFFICIAL = ["_single_scale", "_single_scale_dc5", "_refine", "_two_stage"]


def write(folder, text, name="run.yaml"):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


# The files of the package


@pytest.mark.parametrize("name", TRIED)
def test_every_config_of_the_package_loads_and_builds(name):
    """Detector, criterion and post-processing; on the meta device, so without memory or time for the weights.

    A small network of timm is built in earnest, as it has to be tried in a batch.
    """
    cfg = load_cfg(name)
    cfg.MODEL.NUM_CLASSES = cfg.MODEL.NUM_CLASSES or 7
    of_timm = cfg.MODEL.BACKBONE.NAME.startswith("timm/")
    if of_timm:
        pytest.importorskip("timm")
    with torch.device("cpu" if of_timm else "meta"):
        detector = build_detector(cfg)
        if is_classifier(cfg):
            assert detector.class_embed.weight.shape == (7, detector.backbone.channels[-1])
            return
        maps = detector.backbone(torch.zeros(2, 3, 96, 64), torch.zeros(2, 96, 64, dtype=torch.bool))
    detr = cfg.MODEL.DETR
    levels = {"CPVTDetr": 1, "CPVTRealTimeDetr": len(cfg.MODEL.BACKBONE.STAGES)}
    levels = levels.get(cfg.MODEL.META_ARCHITECTURE, cfg.MODEL.DETECTOR.get("NUM_LEVELS", 4))
    if cfg.MODEL.NECK.NAME:
        assert len(detector.input_proj.strides) == levels
    else:
        convolutions = [module for module in detector.input_proj.modules() if isinstance(module, torch.nn.Conv2d)]
        assert [features.shape[1] for features in maps] == [module.in_channels for module in convolutions[: len(maps)]]
        assert len(convolutions) == levels
    assert detector.num_queries == detr.NUM_OBJECT_QUERIES
    assert (len(detector.transformer.encoder.layers), len(detector.transformer.decoder.layers)) == (
        detr.ENC_LAYERS,
        detr.DEC_LAYERS,
    )
    heads = [weight for name, weight in detector.named_parameters() if CLASS_HEAD.search(name) and name.endswith("weight")]
    assert {len(head) for head in heads} == {build_criterion(cfg).classification.num_logits}
    assert build_postprocessor(cfg).max_detections == cfg.TEST.DETECTIONS_PER_IMAGE


@pytest.mark.parametrize("pattern", REAL_TIME)
def test_the_real_time_configs_differ_in_the_encoding_alone(pattern):
    for encoding, name in (("sine", "sine_grid"), ("peg", "peg"), ("sine+peg", "sine_grid+peg")):
        own = [line.strip() for line in find_config(f"coco/{pattern.format(encoding)}.yaml").read_text().splitlines()]
        assert own == [f"_BASE_: _base_{pattern.replace('_{}', '')}.yaml", "MODEL:", "POSITION:", f"NAME: {name}"]


@pytest.mark.parametrize(("size", "backbone"), [("s", "b0"), ("m", "b2"), ("l", "b4"), ("x", "b5")])
def test_the_larger_dfines_build_on_maps_of_their_backbones(size, backbone):
    cfg = load_cfg(f"coco/dfine_{size}_peg.yaml", ["MODEL.NUM_CLASSES", "7"])
    assert cfg.MODEL.BACKBONE.NAME.endswith(f"hgnetv2_{backbone}") and tuple(cfg.MODEL.BACKBONE.STAGES) == (3, 4, 5)
    maps_of_it = torch.nn.Identity()
    maps_of_it.strides, maps_of_it.channels, maps_of_it.size_divisibility = [8, 16, 32], [512, 1024, 2048], 32
    with torch.device("meta"):
        detector, arguments = detector_arguments(cfg, maps_of_it)
        layers = detector(**arguments).transformer.decoder.layers
    assert len(layers) == cfg.MODEL.DETR.DEC_LAYERS and layers[0].cross_attn.points == (3, 6, 3)


@pytest.mark.parametrize("name", TABLE)
def test_configs_of_the_table_differ_in_one_key(name):
    """Each is ``_BASE_`` plus the encoding's name, and the base is the recipe of the paper."""
    encoding = name.split("_r50_")[1].removesuffix("_50ep.yaml")
    own = [line for line in find_config(name).read_text().splitlines() if line.strip() and not line.lstrip().startswith("#")]
    assert own[0].startswith("_BASE_: ")
    assert [line.strip() for line in own[1:]] == ["MODEL:", "POSITION:", f"NAME: {encoding}"]
    cfg = load_cfg(name)
    assert encoding == cfg.MODEL.POSITION.NAME
    solver = cfg.SOLVER
    assert (solver.EPOCHS, tuple(solver.STEP_EPOCHS), solver.GAMMA, solver.IMS_PER_BATCH) == (50, (40,), 0.1, 32)
    assert (solver.BASE_LR, solver.BACKBONE_LR, solver.WEIGHT_DECAY) == (1e-4, 2e-5, 1e-4)
    assert solver.CLIP_NORM == 0.1
    assert tuple(cfg.DATASETS.TRAIN) == ("coco_2017_train",)


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_of_12_and_24_epochs_differ_in_the_encoding_alone(name):
    """What DINO has beside Deformable-DETR++: positions, denoising, a norm, classes of proposals, 900 queries, other rates."""
    stem, epochs = name.removeprefix("coco/").removesuffix("ep.yaml").rsplit("_", 1)
    model, encoding = stem.split("_4scale_" if "dino" in name else "_pp_")
    own = [line.strip() for line in find_config(name).read_text().splitlines()]
    assert own[0].startswith("_BASE_: _base_") and own[1:] == ["MODEL:", "POSITION:", f"NAME: {encoding}"]
    cfg = load_cfg(name)
    queries, solver, is_dino = cfg.MODEL.QUERIES, cfg.SOLVER, model == "dino_r50"
    assert (queries.NAME, "HYBRID" in queries) == ("mixed", False)
    assert [queries.get("REFINED_POSITIONS", False), queries.get("DENOISING", 0) > 0] == [is_dino, is_dino]
    assert cfg.MODEL.DETECTOR.LOOK_FORWARD_TWICE and is_dino == cfg.MODEL.DETECTOR.get("FINAL_NORM", False)
    assert (900 if is_dino else 300) == cfg.MODEL.DETR.NUM_OBJECT_QUERIES
    step = {"12": 11, "24": 20}[epochs]
    assert (solver.EPOCHS, tuple(solver.STEP_EPOCHS), solver.IMS_PER_BATCH) == (int(epochs), (step,), 16)
    assert ((1e-4, 1e-5) if is_dino else (2e-4, 2e-5)) == (solver.BASE_LR, solver.BACKBONE_LR)
    length = build_schedule(cfg, 118_287)
    assert (solver.MAX_ITER, tuple(solver.STEPS)) == (length.max_iter, length.steps)


def test_official_deformable_recipe_is_the_authors():
    """Rates of offsets and reference points are a tenth of 2e-4; levels, refinement and stages as the names say."""
    prefix = "coco/deformable_detr_r50_official"
    cfgs = {name: load_cfg(f"{prefix}{name}_50ep.yaml") for name in ("", *OFFICIAL)}
    for cfg in cfgs.values():
        solver = cfg.SOLVER
        assert (solver.BASE_LR, solver.BACKBONE_LR, solver.IMS_PER_BATCH) == (2e-4, 2e-5, 32)
        assert pytest.approx(2e-5) == solver.BASE_LR * solver.POINTS_LR_MULTIPLIER
        assert cfg.MODEL.POSITION.NAME == "sine_offset"
    model = {name: cfg.MODEL for name, cfg in cfgs.items()}
    assert [cfg.DETECTOR.NUM_LEVELS for cfg in model.values()] == [4, 1, 1, 4, 4]
    assert [cfg.BACKBONE.DC5 for cfg in model.values()] == [False, False, True, False, False]
    assert [cfg.DETECTOR.get("BOX_REFINEMENT", False) for cfg in model.values()] == [False, False, False, True, True]
    assert [cfg.DETECTOR.get("TWO_STAGE", False) for cfg in model.values()] == [False, False, False, False, True]


# Finding files


def test_config_is_found_by_path_and_by_name_below_the_package_s(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # anywhere
    name = OURS[-1]
    for spelling in (str(config_root() / name), name, f"configs/{name}"):
        assert find_config(spelling).samefile(config_root() / name)


def test_a_file_in_the_working_directory_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / OURS[-1]).parent.mkdir()
    write(tmp_path, "SEED: 77", OURS[-1])
    assert load_cfg(OURS[-1]).SEED == 77


def test_configs_inside_the_package_come_before_those_beside_it(tmp_path, monkeypatch):
    """In the wheel they are inside, in a checkout beside."""
    (tmp_path / "cpvt_det" / "configs").mkdir(parents=True)
    monkeypatch.setattr(config, "__file__", str(tmp_path / "cpvt_det" / "config.py"))
    assert config_root() == tmp_path / "cpvt_det" / "configs"
    (tmp_path / "cpvt_det" / "configs").rmdir()
    assert config_root() == tmp_path / "configs"


def test_missing_config_says_where_it_was_sought():
    with pytest.raises(ConfigError, match=r"no config file 'coco/nothing\.yaml', neither as a path nor below .*configs"):
        load_cfg("coco/nothing.yaml")


# Files


def test_base_is_read_first_and_overridden(tmp_path):
    write(tmp_path, "SEED: 1\nMODEL: {DETR: {NHEADS: 4, ENC_LAYERS: 2}}", "base.yaml")
    cfg = load_cfg(write(tmp_path, "_BASE_: base.yaml\nMODEL: {DETR: {NHEADS: 2}}"))
    assert (cfg.SEED, cfg.MODEL.DETR.NHEADS, cfg.MODEL.DETR.ENC_LAYERS) == (1, 2, 2)
    assert cfg.MODEL.DETR.DEC_LAYERS == get_cfg().MODEL.DETR.DEC_LAYERS
    assert "_BASE_" not in cfg


def test_a_base_may_be_a_name_of_the_package(tmp_path):
    cfg = load_cfg(write(tmp_path, "_BASE_: quickstart/deformable_peg.yaml\nSEED: 7"))
    expected = load_cfg("quickstart/deformable_peg.yaml")
    expected.SEED = 7
    assert cfg == expected
    (tmp_path / "quickstart").mkdir()
    write(tmp_path / "quickstart", "SOLVER: {BASE_LR: 0.5}", "deformable_peg.yaml")
    assert load_cfg(str(tmp_path / "run.yaml")).SOLVER.BASE_LR == 0.5  # a file comes before a name


def test_file_comes_over_defaults_and_overrides_over_the_file(tmp_path):
    path = write(tmp_path, "SEED: 1\nOUTPUT_DIR: here")
    cfg = load_cfg(path, ["SEED", "2"])
    assert (cfg.SEED, cfg.OUTPUT_DIR, cfg.VERSION) == (2, "here", 2)
    assert load_cfg("") == get_cfg()


def test_a_config_that_was_written_is_read_back(tmp_path):
    cfg = load_cfg(
        "", ["SOLVER.STEP_EPOCHS", "(1.5, 2.0)", "DATASETS.REGISTER", "[['a', 'b.json', 'c']]", "MODEL.POSITION.MINE", "3"]
    )
    assert load_cfg(write(tmp_path, cfg.dump())) == cfg


UNSAFE = "SEED: !!python/object/apply:pathlib.Path.touch [!!python/object/apply:pathlib.Path ['{}']]"


@pytest.mark.parametrize("base", [False, True])
def test_yaml_tags_that_run_code_are_refused_and_not_run(tmp_path, base):
    """In the file and in its base, by our reader and by ``cfg.merge_from_file``."""
    path = write(tmp_path, UNSAFE.format(tmp_path / "ran"))
    if base:
        path = write(tmp_path, "_BASE_: run.yaml", "child.yaml")
    with pytest.raises(ConfigError, match=r"cannot read config .*\.yaml: could not determine a constructor for the tag"):
        load_cfg(path)
    with pytest.raises(Exception, match="could not determine a constructor"):
        get_cfg().merge_from_file(path)
    assert not (tmp_path / "ran").exists()


def test_merge_from_file_reads_base_too(tmp_path):
    write(tmp_path, "SEED: 1", "base.yaml")
    cfg = get_cfg()
    cfg.merge_from_file(write(tmp_path, "_BASE_: base.yaml\nVERSION: 2"))
    assert cfg.SEED == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a YAML mapping of keys to values"),
        ("# nothing", "is not a YAML mapping"),
        ("- SEED", "is not a YAML mapping"),
        ("SEED", "is not a YAML mapping"),
        ("SOLVER: {BASE_LR: 0.5}\nSEED: 1\nSOLVER: {EPOCHS: 3.0}", "line 3: SOLVER is given twice in one group; join the two"),
        ("SOLVER:\n  EPOCHS: 2.0\n  EPOCHS: 3.0", "line 3: EPOCHS is given twice"),
        ("!!map SEED", "cannot read config .*expected a mapping node"),
        ("SEED: [1", "cannot read config .*: while parsing"),
        ("_BASE_: nowhere.yaml", "cannot read config .*No such file or directory: .*nowhere.yaml"),
        ("_BASE_: run.yaml", "its _BASE_ leads back to itself"),
        ("5: 6", r"unknown config key \(from .*run.yaml\) '5'"),
        ("SEED: 2000-01-01", "cannot read config .*SEED"),
    ],
)
def test_file_that_cannot_be_used_is_named(tmp_path, text, message):
    path = write(tmp_path, text)
    with pytest.raises(ConfigError, match=message) as caught:
        load_cfg(path)
    assert "run.yaml" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_key_that_is_given_twice_is_told_with_its_file(tmp_path):
    write(tmp_path, "SEED: 1\nSEED: 2", "base.yaml")
    with pytest.raises(ConfigError, match="cannot read config .*run.yaml: .*base.yaml, line 2: SEED is given twice"):
        load_cfg(write(tmp_path, "_BASE_: base.yaml"))


def test_merged_keys_may_be_given_again(tmp_path):
    """YAML's ``<<``, also of what was merged itself."""
    text = "SOLVER: {AMP: &two {ENABLED: True}, EMA: {<<: *two, ENABLED: False}}\nSEED: 3"
    cfg = load_cfg(write(tmp_path, text))
    assert (cfg.SOLVER.AMP.ENABLED, cfg.SOLVER.EMA.ENABLED, cfg.SEED) == (True, False, 3)


# Keys and values


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("MODEL: {POSTION: {NAME: peg}}", r"'MODEL\.POSTION' \(did you mean 'MODEL\.POSITION'\?\); known: MODEL\.BACKBONE"),
        ("SOLVERS: {}", r"'SOLVERS' \(did you mean 'SOLVER'\?\); known: CALLBACKS, DATALOADER, DATASETS"),
        ("SOLVER: {AMP: {ENABLE: True}}", r"'SOLVER\.AMP\.ENABLE' \(did you mean 'SOLVER\.AMP\.ENABLED'\?\)"),
        ("MODEL: {DETR: {HIDEN_DIM: 4}}", r"'MODEL\.DETR\.HIDEN_DIM' \(did you mean 'MODEL\.DETR\.HIDDEN_DIM'\?\)"),
    ],
)
def test_unknown_key_is_told_with_its_neighbour(tmp_path, text, message):
    with pytest.raises(UnknownNameError, match=rf"unknown config key \(from .*run\.yaml\) {message}"):
        load_cfg(write(tmp_path, text))


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("SOLVER.BASE_LR", "fast", r"Type mismatch .*SOLVER\.BASE_LR"),
        ("SOLVER.IMS_PER_BATCH", "2.5", r"Type mismatch .*SOLVER\.IMS_PER_BATCH"),
        ("SOLVER.AMP.ENABLED", "1", r"Type mismatch .*SOLVER\.AMP\.ENABLED"),
        ("SOLVER.BASE_LR", "True", r"Type mismatch .*SOLVER\.BASE_LR"),
        ("DATASETS.TRAIN", "2017", r"Type mismatch .*DATASETS\.TRAIN"),
        ("SOLVER.BASE_LR", "None", r"SOLVER\.BASE_LR has no value, expected type float; write one"),
        ("MODEL.POSITION", "peg", r"MODEL\.POSITION is a group of keys, got 'peg'; set one of NAME"),
        ("MODEL.NAME.OTHER", "x", r"unknown config key \(from the command line\) 'MODEL\.NAME'"),
    ],
)
def test_value_that_does_not_fit_is_told_by_key(key, value, message):
    with pytest.raises(ConfigError, match=message) as caught:
        load_cfg("", [key, value])
    assert "the command line" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("key", ["DATASETS.TRAIN", "DATASETS.TEST"])
def test_one_data_set_needs_no_brackets(tmp_path, key):
    group, name = key.split(".")
    for words in ([key, "mine"], [key, "('mine',)"], [key, "['mine']"]):
        assert load_cfg("", words).DATASETS[name] == ("mine",)
    assert load_cfg(write(tmp_path, f"{group}: {{{name}: mine}}")).DATASETS[name] == ("mine",)


def test_the_packages_configs_of_photographs_take_a_gpu_where_there_is_one():
    """The tutorial's among them; detectron2's own trainer keeps its own default."""
    for path in sorted((config_root() / "bccd").glob("*.yaml")):
        assert load_cfg(str(path)).MODEL.DEVICE == "auto"
        assert "DEVICE" not in path.read_text()


def test_empty_value_in_a_file_is_told_by_key(tmp_path):
    with pytest.raises(ConfigError, match=r"run\.yaml: MODEL\.DETR\.NHEADS has no value, expected type int; write one"):
        load_cfg(write(tmp_path, "MODEL:\n  DETR:\n    NHEADS:\n"))


def test_whole_numbers_do_for_floats(tmp_path):
    cfg = load_cfg(write(tmp_path, "SOLVER: {EPOCHS: 3, EMA: {DECAY: 0}}"), ["MODEL.CRITERION.L1_COST", "2"])
    for value, expected in ((cfg.SOLVER.EPOCHS, 3.0), (cfg.SOLVER.EMA.DECAY, 0.0), (cfg.MODEL.CRITERION.L1_COST, 2.0)):
        assert type(value) is float
        assert value == expected


def test_exponents_without_a_dot_are_numbers(tmp_path):
    """YAML 1.1 reads 1e-4 as text."""
    assert load_cfg(write(tmp_path, "SOLVER: {BASE_LR: 3e-4}")).SOLVER.BASE_LR == 3e-4
    assert load_cfg("", ["SOLVER.BASE_LR", "5e-4"]).SOLVER.BASE_LR == 5e-4


def test_lists_do_for_tuples_and_none_may_be_replaced():
    cfg = load_cfg("", ["DATASETS.TRAIN", "['a', 'b']", "SOLVER.WEIGHT_DECAY_NORM", "0.0", "SOLVER.STEPS", "(5,)"])
    assert tuple(cfg.DATASETS.TRAIN) == ("a", "b")
    assert cfg.SOLVER.WEIGHT_DECAY_NORM == 0.0
    assert tuple(cfg.SOLVER.STEPS) == (5,)
    assert load_cfg("", ["SOLVER.WEIGHT_DECAY_NORM", "None"]).SOLVER.WEIGHT_DECAY_NORM is None


def test_overrides_come_in_pairs():
    with pytest.raises(ConfigError, match="KEY VALUE pairs, but the number of words is odd: SEED 1 VERSION"):
        load_cfg("", ["SEED", "1", "VERSION"])


def test_a_refused_override_changes_nothing_of_its_group():
    cfg = get_cfg()
    with pytest.raises(ConfigError):
        merge_overrides(cfg, ["MODEL.DETR.NHEAD", "4"])
    assert cfg == get_cfg()


def test_defaults_are_made_anew_each_time():
    first = get_cfg()
    first.MODEL.DETR.NHEADS = 3
    first.DATASETS.REGISTER.append(["a", "b", "c"])
    assert get_cfg().MODEL.DETR.NHEADS == 8
    assert get_cfg().DATASETS.REGISTER == []


def test_read_config_gives_the_file_s_own_keys(tmp_path):
    assert read_config(write(tmp_path, "MODEL: {DETR: {NHEADS: 2}}")) == CfgNode({"MODEL": {"DETR": {"NHEADS": 2}}})


# Devices and errors


def test_device_that_is_not_there_is_a_config_error(monkeypatch):
    cfg = get_cfg()
    assert build_device(cfg).type in ("cpu", "cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert build_device(cfg).type == "cpu"
    cfg.MODEL.DEVICE = "cuda"
    with pytest.raises(ConfigError, match=r"MODEL\.DEVICE is cuda, but torch sees no CUDA GPU; use cpu or auto"):
        build_device(cfg)
    cfg.MODEL.DEVICE = "gpu"
    with pytest.raises(ConfigError, match=r"^MODEL\.DEVICE: .*gpu"):
        build_device(cfg)


def test_unknown_name_is_a_config_error_a_value_error_and_a_key_error():
    error = UnknownNameError("fruit", "aple", ["pear", "apple"])
    assert isinstance(error, ConfigError)
    assert isinstance(error, BadInputError)
    assert isinstance(error, ValueError)
    assert isinstance(error, KeyError)
    assert str(error) == "unknown fruit 'aple' (did you mean 'apple'?); known: apple, pear"
    assert str(UnknownNameError("fruit", 7, ["pear"])) == "unknown fruit 7; known: pear"


def test_first_line_of_an_error():
    assert first_line(ValueError("one\ntwo")) == "one"
    assert first_line(ValueError("\n one")) == "one"
    assert first_line(ValueError()) == "ValueError"
