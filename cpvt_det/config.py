# SPDX-License-Identifier: Apache-2.0
"""Every config key and its default, once. Names and meanings are detectron2's where detectron2 has the key."""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from cpvt_det.errors import ConfigError, UnknownNameError, first_line

LARGEST_CONFIG = 100_000
"""Keys and values in a config file; ours have about 150."""


def get_cfg() -> CfgNode:
    """A new config with the defaults: DETR-R50 with PEG, the paper's 50-epoch recipe.

    Returns:
        fvcore's ``CfgNode``; ``cfg.merge_from_file(path)`` reads YAML with ``_BASE_``, safely.
    """
    cfg = CfgNode()
    cfg.VERSION = 2  # of the config format, as in detectron2
    cfg.OUTPUT_DIR = "./output"  # what a run writes; one run at a time
    cfg.TASK = "detection"  # what is read, trained and measured; detection, or a registered task of your own
    cfg.SEED = -1  # negative: another one each run, which is logged
    _add_model(cfg)
    _add_data(cfg)
    _add_solver(cfg)
    cfg.TEST = CfgNode()
    cfg.TEST.EVAL_PERIOD = 0  # iterations; 0: only at the end
    cfg.TEST.EVAL_EPOCHS = 0.0  # epochs; above 0 it sets EVAL_PERIOD, where SOLVER.EPOCHS is above 0
    cfg.TEST.IMS_PER_BATCH = 1  # over all processes, at least one each
    cfg.TEST.DETECTIONS_PER_IMAGE = 100  # the most
    cfg.TEST.EVALUATOR = "faster_coco_eval"  # or pycocotools, the reference
    cfg.TEST.PICTURES = 8  # images drawn beside their ground truth after the last evaluation
    cfg.TEST.PICTURE_THRESHOLD = 0.5  # the lowest score that is drawn, and that the report counts
    cfg.TEST.REPORT = False  # after the last evaluation: curves, confusion matrix, thresholds and the worst images, in report/
    return cfg


def _add_model(cfg: CfgNode) -> None:
    cfg.MODEL = model = CfgNode()
    model.META_ARCHITECTURE = "CPVTDetr"  # or CPVTDeformableDetr
    model.DEVICE = "auto"  # cuda where there is one, else cpu
    model.WEIGHTS = ""  # start from these; heads of other classes are made anew
    model.FREEZE = []  # parts that are not trained: backbone, encoder, decoder, position, transformer.encoder.layers.0, ...
    model.CHECKPOINTING = False  # True: backbone and encoder are computed twice a step, for about half the memory
    model.NUM_CLASSES = 0  # 0: what the training data has; otherwise it is checked against the data
    model.PIXEL_MEAN = [123.675, 116.280, 103.530]  # RGB, 0 to 255
    model.PIXEL_STD = [58.395, 57.120, 57.375]  # images are (pixels - PIXEL_MEAN) / PIXEL_STD

    # Options of a part of your own, registered by a module that --import names, may be added in YAML to its node: BACKBONE,
    # NECK, POSITION, QUERIES, CRITERION.
    model.BACKBONE = CfgNode(new_allowed=True)
    model.BACKBONE.NAME = "resnet50"  # resnet10, 18, 34, 50, 101; with detectron2 also what its registry has
    model.BACKBONE.WEIGHTS = ""  # torchvision's by name (IMAGENET1K_V1, DEFAULT), or a local file; empty: random
    model.BACKBONE.NORM = "FrozenBN"  # FrozenBN with pretrained weights; BN, SyncBN, GN from scratch
    model.BACKBONE.WIDTH = 64  # channels of the stem, all stages in proportion; there are weights for 64 only
    model.BACKBONE.STAGES = (5,)  # whose maps are used, 2 to 5; DETR takes one
    model.BACKBONE.DC5 = False  # stage 5 dilated, at the stride of stage 4
    model.BACKBONE.FREEZE_AT = 2  # stages up to this one keep their weights; 1 is the stem, 0 trains all
    model.BACKBONE.MASK_PADDING = True  # padding stays zero in every map; False: it leaks in, as in the official code's batches

    model.NECK = CfgNode(new_allowed=True)
    model.NECK.NAME = ""  # empty: the detector's own, projection for CPVTDetr, multi_level for CPVTDeformableDetr

    model.POSITION = CfgNode(new_allowed=True)
    model.POSITION.NAME = "peg"  # none, sine, sine_offset, learned, peg, sine+peg, sine_offset+peg, and peg_*, the ablations
    model.POSITION.DECODER = "sine"  # of the keys of DETR's decoder: sine, same (as the encoder), none
    model.POSITION.TABLE_SIZE = 50  # learned: the largest map side
    model.POSITION.POSITIONS = [0]  # peg: after these encoder layers; -1 is before the first
    model.POSITION.SHARE_LEVELS = False  # peg: one for all levels of Deformable-DETR, instead of one each
    model.POSITION.KERNEL_SIZE = 3  # peg
    model.POSITION.NORM = "BN"  # peg: BN, SyncBN, GN, none
    model.POSITION.MASK_INPUT = True  # peg: padded tokens out of convolution and statistics; False is the authors' arithmetic
    model.POSITION.ZERO_INIT = False  # peg: starts as the identity, for trained weights

    model.DETR = CfgNode()  # of both detectors, but for PRE_NORM
    model.DETR.HIDDEN_DIM = 256  # channels of the transformer
    model.DETR.NHEADS = 8  # attention heads
    model.DETR.DIM_FEEDFORWARD = 2048  # inner channels of the feed-forward networks
    model.DETR.ENC_LAYERS = 6  # of the encoder
    model.DETR.DEC_LAYERS = 6  # of the decoder
    model.DETR.DROPOUT = 0.1  # in the transformer
    model.DETR.PRE_NORM = False  # norms before attention and feed-forward; CPVTDetr only
    model.DETR.NUM_OBJECT_QUERIES = 100  # at least twice the objects of an image

    model.DEFORMABLE = CfgNode()  # of CPVTDeformableDetr
    model.DEFORMABLE.NUM_LEVELS = 4  # those of BACKBONE.STAGES, and coarser ones made of the last
    model.DEFORMABLE.ENC_POINTS = 4  # sampling points a head and level
    model.DEFORMABLE.DEC_POINTS = 4  # the same, of the decoder
    model.DEFORMABLE.BOX_REFINEMENT = False  # every decoder layer corrects the boxes of the one before
    model.DEFORMABLE.TWO_STAGE = False  # queries are the encoder's best proposals; needs BOX_REFINEMENT
    model.DEFORMABLE.PROPOSAL_NMS = 1.0  # two stages: proposals of a higher IoU with a better one are chosen last (DETA); 1: none
    model.DEFORMABLE.IMPLEMENTATION = "auto"  # of the attention's op: numba, triton, eager, export, grid_sample

    model.QUERIES = CfgNode(new_allowed=True)
    model.QUERIES.NAME = ""  # empty: the detector's own, learned, or with DEFORMABLE.TWO_STAGE proposals

    model.CRITERION = CfgNode(new_allowed=True)
    model.CRITERION.CLASSIFICATION = "softmax"  # or focal
    model.CRITERION.BACKGROUND_WEIGHT = 0.1  # softmax: weight of "no object"
    model.CRITERION.FOCAL_ALPHA = 0.25  # focal: weight of objects against background
    model.CRITERION.FOCAL_GAMMA = 2.0  # focal: how little easy ones count
    model.CRITERION.CLASS_WEIGHT = 1.0  # of loss_class in the total
    model.CRITERION.L1_WEIGHT = 5.0  # of loss_l1
    model.CRITERION.GIOU_WEIGHT = 2.0  # of loss_giou
    model.CRITERION.LOSSES = []  # further losses, [name, weight] each
    model.CRITERION.CLASS_COST = 1.0  # in the matching
    model.CRITERION.L1_COST = 5.0  # in the matching
    model.CRITERION.GIOU_COST = 2.0  # in the matching
    model.CRITERION.PROPOSAL_MATCHES = 1  # two stages: proposals matched with each object; several, as in H-DETR, learn faster


def _add_data(cfg: CfgNode) -> None:
    cfg.INPUT = CfgNode()
    cfg.INPUT.FORMAT = "RGB"  # the only one our loader reads
    cfg.INPUT.MIN_SIZE_TRAIN = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)  # one is drawn for each image; (): as is
    cfg.INPUT.MAX_SIZE_TRAIN = 1333  # pixels of the long side, at most
    cfg.INPUT.MIN_SIZE_TEST = 800  # 0: as is
    cfg.INPUT.MAX_SIZE_TEST = 1333  # pixels of the long side, at most
    cfg.INPUT.RANDOM_FLIP = "horizontal"  # or none
    cfg.INPUT.RESIZE_CROP = CfgNode()  # half the images: resize to one of SIZES, crop sides in RANGE, resize as above
    cfg.INPUT.RESIZE_CROP.ENABLED = True  # DETR's random crop
    cfg.INPUT.RESIZE_CROP.SIZES = (400, 500, 600)  # pixels of the short side
    cfg.INPUT.RESIZE_CROP.RANGE = (384, 600)  # pixels

    cfg.DATASETS = CfgNode()
    cfg.DATASETS.TRAIN = ()  # names of the training sets
    cfg.DATASETS.TEST = ()  # names of the sets that are evaluated; the first decides which checkpoint is the best
    cfg.DATASETS.REGISTER = []  # [name, COCO JSON, image folder] or [name, YOLO or VOC folder, split] each
    cfg.DATASETS.ON_BAD = "error"  # faults in the data end the run, all listed; drop: these images and boxes are left out

    cfg.DATALOADER = CfgNode()
    cfg.DATALOADER.NUM_WORKERS = 4  # processes that decode and augment; 0: none
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = True  # batches of wide or of tall images, for less padding
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = False  # DETR learns from images without objects too


def _add_solver(cfg: CfgNode) -> None:
    cfg.SOLVER = solver = CfgNode()
    solver.EPOCHS = 50.0  # above 0, the three decide; 0: MAX_ITER, STEPS and WARMUP_ITERS do
    solver.STEP_EPOCHS = (40.0,)  # when the learning rate is multiplied by GAMMA
    solver.WARMUP_EPOCHS = 0.0  # of a linear rise of the learning rate
    solver.MAX_ITER = 0  # where EPOCHS is 0
    solver.STEPS = ()  # iterations, where EPOCHS is 0
    solver.WARMUP_ITERS = 0  # where EPOCHS is 0
    solver.GAMMA = 0.1  # at each step of the schedule
    solver.SCHEDULE = "step"  # step; cosine, to 0 at the end
    solver.IMS_PER_BATCH = 32  # over all processes and accumulated parts
    solver.ACCUMULATE = 1  # parts that a process's share of a batch is worked through in
    solver.BASE_LR = 1e-4  # of all but the backbone
    solver.BACKBONE_LR = 2e-5  # of the backbone
    solver.POINTS_LR_MULTIPLIER = 0.1  # of Deformable-DETR's sampling offsets and reference points, on BASE_LR
    solver.LR_MULTIPLIERS = []  # [part, factor] each, as in ["backbone.body.layer2", 0.5]; all that fit are multiplied
    solver.WEIGHT_DECAY = 1e-4  # AdamW's
    solver.WEIGHT_DECAY_NORM = None  # None: WEIGHT_DECAY, as in the recipe
    solver.WEIGHT_DECAY_PEG = None  # None: as its parameters would have elsewhere
    solver.CLIP_NORM = 0.1  # bound on the norm of all gradients together; 0: none
    solver.AMP = CfgNode()
    solver.AMP.ENABLED = False  # autocast; losses, matching and box heads stay in float32
    solver.AMP.DTYPE = "bfloat16"  # or float16
    solver.EMA = CfgNode()
    solver.EMA.ENABLED = False  # a moving average of the weights, which is what is evaluated
    solver.EMA.DECAY = 0.9997  # of the average, each step
    solver.MAX_BAD_STEPS = 10  # steps in a row that are not finite: they are skipped, and this many end the run
    solver.CHECKPOINT_PERIOD = 5000  # iterations
    solver.CHECKPOINT_KEEP = 3  # of those every period, the last ones; the best and the final one stay too
    solver.LOG_PERIOD = 20  # iterations


SAME_RUN = re.compile(
    r"VERSION$|OUTPUT_DIR$|MODEL\.(DEVICE|WEIGHTS|CHECKPOINTING|NUM_CLASSES|BACKBONE\.WEIGHTS|DEFORMABLE\.IMPLEMENTATION)$|TEST\.|"
    r"DATALOADER\.NUM_WORKERS$|DATASETS\.(TEST|REGISTER)$|SOLVER\.(CHECKPOINT_PERIOD|CHECKPOINT_KEEP|LOG_PERIOD|MAX_BAD_STEPS)$"
)
"""Keys that a run may be resumed with other values of: it takes the same steps."""


def changed_keys(before: str, now: str, without: Callable[[CfgNode], Collection[str]] = lambda cfg: ()) -> list[str]:
    """Which keys that matter to a run's steps differ between two configs.

    Args:
        before, now: YAML of :meth:`CfgNode.dump`.
        without: keys that do not matter to the config of now.

    Returns:
        For each "KEY was X, is Y".
    """
    cfg = CfgNode.load_cfg(now)
    old, new = (dict(flat_items(node)) for node in (CfgNode.load_cfg(before), cfg))
    keys = {key for key in old.keys() & new.keys() if old[key] != new[key] and not SAME_RUN.match(key)}
    keys -= set(without(cfg)) if keys else set()
    return [f"{key} was {old[key]!r}, is {new[key]!r}" for key in sorted(keys)]


def key_names(cfg: CfgNode) -> list[str]:
    """The full names of all keys of a config, as in ``MODEL.POSITION.NAME``."""
    return [name for name, _ in flat_items(cfg)]


def flat_items(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The keys that are no groups, by their full names, and their values."""
    for key, value in node.items():
        yield from flat_items(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def config_root() -> Path:
    """The folder of the configs that come with the package: in the wheel inside it, in a checkout beside it."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def find_config(name: str) -> Path:
    """A config file by path, or by a name below the configs of the package (``coco/detr_r50_peg_50ep.yaml``).

    Raises:
        ConfigError: neither is a file.
    """
    for path in (Path(name), config_root() / name, config_root() / name.removeprefix("configs/")):
        if path.is_file():
            return path
    raise ConfigError(f"no config file {name!r}, neither as a path nor below {config_root()}")


def load_cfg(config_file: str, overrides: Sequence[str] = ()) -> CfgNode:
    """Defaults, then a file, then KEY VALUE pairs.

    Args:
        config_file: as in :func:`find_config`; empty for the defaults alone.
        overrides: keys and values by turns.

    Raises:
        ConfigError: a file that is missing or not safe YAML, an unknown key, a value of another type.
    """
    cfg = get_cfg()
    if config_file:
        merge_checked(cfg, read_config(config_file), config_file)
    merge_overrides(cfg, overrides)
    return cfg


def read_config(config_file: str) -> CfgNode:
    """The keys of a YAML file and of its ``_BASE_`` files, without defaults. No YAML tag runs code.

    Raises:
        ConfigError: a missing file, or one that is not a YAML mapping.
    """
    path = find_config(config_file)
    try:
        loaded = CfgNode.load_yaml_with_base(str(path), allow_unsafe=False)
        _require_size(loaded, f"config {path}")
        return CfgNode(loaded)
    except ConfigError:
        raise
    except (TypeError, AttributeError) as error:  # fvcore looks for _BASE_ in whatever the YAML holds
        raise ConfigError(f"config {path} is not a YAML mapping of keys to values") from error
    except RecursionError as error:
        raise ConfigError(f"config {path}: its _BASE_ leads back to itself, or it is nested too deeply") from error
    except Exception as error:  # what YAML and file systems raise has no common base
        raise ConfigError(f"cannot read config {path}: {first_line(error)}") from error


def parse_config(text: str, source: str) -> CfgNode:
    """The keys of YAML text, without defaults and without ``_BASE_``. No YAML tag runs code.

    Args:
        text: what :meth:`CfgNode.dump` wrote.
        source: where it is from, for the message.

    Raises:
        ConfigError: no YAML mapping.
    """
    try:
        loaded = yaml.safe_load(text)
        _require_size(loaded, source)
        if not isinstance(loaded, dict):
            raise ConfigError(f"{source} is not a YAML mapping of keys to values")
        return CfgNode(loaded)
    except ConfigError:
        raise
    except Exception as error:  # what YAML raises has no common base
        raise ConfigError(f"cannot read {source}: {first_line(error)}") from error


def _require_size(tree: Any, source: str) -> None:
    """Refuse aliases that stand for more than can be copied: ten lines of YAML may mean a billion parts, or endless ones."""
    parts = [tree]
    for _ in range(LARGEST_CONFIG):
        if not parts:
            return
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    raise ConfigError(f"{source} has more than {LARGEST_CONFIG} parts, its aliases (*name) written out")


def merge_overrides(cfg: CfgNode, overrides: Sequence[str]) -> None:
    """Merge KEY VALUE pairs of a command line.

    Raises:
        ConfigError: a key without a value, an unknown key, a value of another type.
    """
    options = [word for word in overrides[::2] if word.startswith("--")]
    if options:
        raise ConfigError(f"unknown option {options[0]}; --help lists the options")
    if len(overrides) % 2:
        raise ConfigError(f"overrides are KEY VALUE pairs, got an odd number of words: {' '.join(overrides)}")
    for key, value in zip(overrides[::2], overrides[1::2], strict=True):
        try:
            nested: Any = CfgNode._decode_cfg_value(value)
        except (TypeError, MemoryError, RecursionError) as error:  # a list as a key, a thousand brackets
            raise ConfigError(f"the command line: {key} cannot be read: {first_line(error)}") from error
        for part in reversed(key.split(".")):
            nested = {part: nested}
        merge_checked(cfg, CfgNode(nested), "the command line")


def merge_checked(cfg: CfgNode, other: CfgNode, source: str) -> None:
    """Merge keys into a config.

    Args:
        cfg: changed in place.
        other: some of its keys.
        source: where they are from, for the message.

    Raises:
        ConfigError: an unknown key, with its nearest neighbour; a value of another type than the default's. A whole number
            does where a float is wanted.
    """
    other = other.clone()
    _check_keys(cfg, other, source, prefix="")
    try:
        cfg.merge_from_other_cfg(other)
    except (ValueError, KeyError, AssertionError) as error:
        raise ConfigError(f"{source}: {first_line(error)}") from error


def _check_keys(cfg: CfgNode, other: CfgNode, source: str, prefix: str) -> None:
    for key, value in other.items():
        if key not in cfg:
            if not cfg.is_new_allowed():
                raise UnknownNameError(f"config key (from {source})", f"{prefix}{key}", (prefix + known for known in cfg))
        elif isinstance(cfg[key], CfgNode):
            if not isinstance(value, CfgNode):
                raise ConfigError(f"{source}: {prefix}{key} is a group of keys, got {value!r}; set one of {', '.join(cfg[key])}")
            _check_keys(cfg[key], value, source, f"{prefix}{key}.")
        elif isinstance(cfg[key], float) and type(value) is int:
            other[key] = float(value)
        elif value is None and cfg[key] is not None:  # merging would let it pass
            raise ConfigError(f"{source}: {prefix}{key} has no value; expected a {type(cfg[key]).__name__}")
