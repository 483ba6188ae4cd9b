# SPDX-License-Identifier: Apache-2.0
"""All config keys and their defaults. Keys that detectron2 also has keep their name and meaning."""

import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from fvcore.common.config import CfgNode

from cpvt_det.common import defaults
from cpvt_det.common.errors import ConfigError, UnknownNameError, first_line

LARGEST_CONFIG = 100_000
"""Largest number of keys and values that a config file may have; the files of this package have about 150."""
LISTS_OF_NAMES = ("DATASETS.TRAIN", "DATASETS.TEST", "CALLBACKS")
"""Keys for lists of names that also accept a single name without brackets."""


def get_cfg() -> CfgNode:
    """Create a config with the defaults: DETR-R50 with PEG, trained by the paper's 50-epoch recipe.

    Returns:
        fvcore's ``CfgNode``; ``cfg.merge_from_file(path)`` safely reads YAML with ``_BASE_``.
    """
    cfg = CfgNode()
    cfg.VERSION = 2  # version of the config format, as in detectron2
    cfg.OUTPUT_DIR = "./output"  # folder for all files that a run writes; only one run may use it at a time
    cfg.TASK = "detection"  # what to train and measure: detection, classification, or a registered task of your own
    cfg.TASK_OPTIONS = CfgNode(new_allowed=True)  # options of a task of your own
    cfg.CALLBACKS = []  # callbacks of a training run: wandb, mlflow or your own; each a name or [name, {option: value}]
    cfg.SEED = -1  # seed of weights, data order and augmentation; negative: a random seed per run, which is logged
    _add_model(cfg)
    _add_data(cfg)
    _add_solver(cfg)
    cfg.TEST = CfgNode()
    cfg.TEST.EVAL_PERIOD = 0  # iterations between evaluations; 0: evaluate only at the end
    cfg.TEST.EVAL_EPOCHS = 0.0  # epochs between evaluations; if this and SOLVER.EPOCHS are above 0, it replaces EVAL_PERIOD
    cfg.TEST.IMS_PER_BATCH = 1  # evaluation batch size over all processes; every process takes at least one image
    cfg.TEST.DETECTIONS_PER_IMAGE = 100  # largest number of detections per image; should not be below the largest number of objects
    cfg.TEST.NMS = 1.0  # if the IoU of two detections of a class exceeds this, the worse one gets score 0; 1: no NMS
    cfg.TEST.BEST_FIGURE = ""  # metric that selects the best checkpoint, such as AP50 or AP-cat; empty: the main one, such as AP
    cfg.TEST.TILES = CfgNode()
    cfg.TEST.TILES.SIZE = 0  # side of the tiles into which larger images are cut, in pixels, at least 32; 0: no tiles
    cfg.TEST.TILES.OVERLAP = 0.2  # smallest overlap of neighbouring tiles, as a share of their side; should cover small objects
    cfg.TEST.TILES.MERGE = "ios"  # merge by intersection over union (nms) or over the smaller box (ios), which suits cut objects
    cfg.TEST.TILES.WHOLE = True  # True: also detect in the whole image, to find objects larger than a tile
    cfg.TEST.PICTURES = 8  # number of images whose detections are drawn next to the ground truth after the last evaluation
    cfg.TEST.PICTURE_THRESHOLD = None  # lowest score of detections to draw and report; None: the stored threshold with the best F1
    cfg.TEST.REPORT = False  # True: write curves, confusion matrix, thresholds and worst images to report/ after last evaluation
    return cfg


def _add_model(cfg: CfgNode) -> None:
    cfg.MODEL = model = CfgNode()
    model.META_ARCHITECTURE = "CPVTDetr"  # CPVTDetr, CPVTDeformableDetr, CPVTRealTimeDetr; CPVTClassifier, with TASK classification
    model.DEVICE = "auto"  # auto (cuda if torch finds a GPU, else cpu), cuda, cuda:1 or cpu
    model.WEIGHTS_SHA256 = ""  # expected hash of the file that training starts from; empty: any file
    model.WEIGHTS = ""  # checkpoint to start from; class heads are matched by class name, new classes get random weights
    model.FREEZE = []  # parts that are not trained: backbone, encoder, decoder, position, transformer.encoder.layers.0, ...
    model.CHECKPOINTING = False  # True: compute backbone and encoder again in the backward pass, which about halves the memory
    model.NUM_CLASSES = 0  # number of classes, which must match the data; 0: read it from the training data
    model.PIXEL_MEAN = list(defaults.PIXEL_MEAN)  # mean of R, G and B, 0 to 255; timm backbones replace the default with their own
    model.PIXEL_STD = list(defaults.PIXEL_STD)  # the model gets (pixels - PIXEL_MEAN) / PIXEL_STD; timm: as for PIXEL_MEAN

    # A part's node (DETECTOR, BACKBONE, NECK, POSITION, QUERIES, CRITERION.CLASSIFICATION) takes the options of the part that it
    # names: keywords of its constructor, in upper case. None removes an option that an earlier file has set.
    model.DETECTOR = CfgNode(new_allowed=True)  # options of META_ARCHITECTURE
    _add_features(model)
    _add_transformer(model)
    _add_criterion(model)

    model.CLASSIFIER = CfgNode()  # CPVTClassifier only
    model.CLASSIFIER.POOL = ""  # input of the head: token (class token) or mean; empty: token where there is one, else mean
    model.CLASSIFIER.SMOOTHING = 0.0  # label smoothing: share of the label that is spread over all classes
    model.CLASSIFIER.TEACHER = ""  # classifier to learn from: a checkpoint of ours, or timm/<name>; empty: none
    model.CLASSIFIER.TEACHER_WEIGHTS = ""  # timm teacher: file with timm's names, or DEFAULT (timm's); class order as in the data


def _add_features(model: CfgNode) -> None:
    model.BACKBONE = CfgNode(new_allowed=True)
    model.BACKBONE.NAME = "resnet50"  # resnet10 to 101; deit_, cpvt_, tnt_small, also _tiny and _base; timm/<name>; or detectron2's
    model.BACKBONE.WEIGHTS = ""  # a name (torchvision: IMAGENET1K_V1, DEFAULT; timm: pip, DEFAULT) or a file; empty: random
    model.BACKBONE.NORM = "FrozenBN"  # FrozenBN with pretrained weights; BN, SyncBN or GN (not for timm) to train from scratch
    model.BACKBONE.WIDTH = 64  # channels of the stem; all stages scale with it; pretrained weights exist for 64 only
    model.BACKBONE.STAGES = (5,)  # stages whose feature maps are used, from 2 to 5 (strides 4 to 32); DETR uses one
    model.BACKBONE.DC5 = False  # True: stage 5 is dilated and keeps the stride of stage 4
    model.BACKBONE.FREEZE_AT = 2  # last frozen stage (frozen stages keep their pretrained weights); 1: the stem, 0: none frozen
    model.BACKBONE.MASK_PADDING = True  # True: keep padding zero in all maps; False: it affects features, as in the official code
    model.BACKBONE.POSITION = CfgNode(new_allowed=True)  # deit, cpvt, tnt: encoding of the patches
    model.BACKBONE.POSITION.NAME = ""  # deit, cpvt, tnt: as in MODEL.POSITION; empty: default (peg_plain for cpvt, else table)

    model.NECK = CfgNode(new_allowed=True)
    model.NECK.NAME = ""  # empty: the detector's own, projection (DETR), multi_level (Deformable-DETR) or normed (real-time)

    model.POSITION = CfgNode(new_allowed=True)
    model.POSITION.NAME = "peg"  # none, sine, sine_offset, sine_grid, learned, table, relative, rope, rope_mixed, peg, <one>+<PEG>


def _add_transformer(model: CfgNode) -> None:
    model.DETR = CfgNode()  # transformer of all detectors
    model.DETR.HIDDEN_DIM = defaults.CHANNELS  # channels of the transformer
    model.DETR.NHEADS = defaults.HEADS  # number of attention heads
    model.DETR.DIM_FEEDFORWARD = defaults.FFN_CHANNELS  # inner channels of the feed-forward networks
    model.DETR.ENC_LAYERS = defaults.LAYERS  # number of encoder layers
    model.DETR.DEC_LAYERS = defaults.LAYERS  # number of decoder layers
    model.DETR.DROPOUT = defaults.DROPOUT  # dropout probability in the transformer
    model.DETR.NUM_OBJECT_QUERIES = 100  # number of object queries; at least twice the largest number of objects per image

    model.QUERIES = CfgNode(new_allowed=True)
    model.QUERIES.NAME = ""  # learned, anchors, proposals or mixed; empty: the detector's own (learned; proposals if TWO_STAGE)


def _add_criterion(model: CfgNode) -> None:
    model.CRITERION = CfgNode()
    model.CRITERION.CLASSIFICATION = CfgNode(new_allowed=True)
    model.CRITERION.CLASSIFICATION.NAME = "softmax"  # softmax, focal; mal, varifocal, ia_bce, which also learn how well a box fits
    model.CRITERION.CLASS_WEIGHT = defaults.CLASS_WEIGHT  # weight of loss_class in the total loss; 0 leaves it out
    model.CRITERION.L1_WEIGHT = defaults.L1_WEIGHT  # weight of loss_l1 in the total loss; 0 leaves it out
    model.CRITERION.GIOU_WEIGHT = defaults.GIOU_WEIGHT  # weight of loss_giou in the total loss; 0 leaves it out
    model.CRITERION.LOSSES = []  # further losses, each as [name, weight] or [name, weight, {option: value}]
    model.CRITERION.CLASS_COST = defaults.CLASS_WEIGHT  # weight of the class cost in the matching
    model.CRITERION.L1_COST = defaults.L1_WEIGHT  # weight of the L1 cost of the boxes in the matching
    model.CRITERION.GIOU_COST = defaults.GIOU_WEIGHT  # weight of the GIoU cost in the matching
    model.CRITERION.PROPOSAL_MATCHES = 1  # two-stage: number of proposals matched with each object; above 1 (H-DETR) trains faster
    model.CRITERION.HYBRID_MATCHES = defaults.HYBRID_MATCHES  # number of queries of MODEL.QUERIES.HYBRID matched per object


def _add_data(cfg: CfgNode) -> None:
    cfg.INPUT = CfgNode()
    cfg.INPUT.FORMAT = "RGB"  # order of the colour channels; our loader reads only RGB
    cfg.INPUT.MIN_SIZE_TRAIN = (480, 512, 544, 576, 608, 640, 672, 704, 736, 768, 800)  # short sides, one drawn per image; (): off
    cfg.INPUT.MAX_SIZE_TRAIN = 1333  # upper limit of the long side in pixels
    cfg.INPUT.MIN_SIZE_TEST = 800  # short side in pixels; 0: no resize
    cfg.INPUT.MAX_SIZE_TEST = 1333  # upper limit of the long side in pixels
    cfg.INPUT.AUGMENTATIONS = []  # list of names or [name, {option: value}], applied in this order before flip, crop and resize
    cfg.INPUT.MIN_VISIBLE = 0.25  # boxes are removed if less than this share of their area is left after an augmentation
    cfg.INPUT.CLOSE_EPOCHS = 0.0  # number of epochs at the end of the run in which no images are mixed (Mosaic, MixUp)
    cfg.INPUT.RANDOM_FLIP = "horizontal"  # horizontal: flip half of the images; none: do not flip
    cfg.INPUT.RESIZE_CROP = CfgNode()  # half of the images: resize to one of SIZES, crop with sides in RANGE, resize as above
    cfg.INPUT.RESIZE_CROP.ENABLED = True  # True: use DETR's random crop, on half of the images
    cfg.INPUT.RESIZE_CROP.SIZES = (400, 500, 600)  # short sides in pixels, one drawn per image, before the crop
    cfg.INPUT.RESIZE_CROP.RANGE = (384, 600)  # smallest and largest side of the crop in pixels

    cfg.INPUT.CLASSIFY = CfgNode()  # CPVTClassifier only; of the keys above, only RANDOM_FLIP also applies
    cfg.INPUT.CLASSIFY.SIZE = 224  # training: side of the crops in pixels
    cfg.INPUT.CLASSIFY.SCALE = (0.08, 1.0)  # training: smallest and largest area of a crop, as a share of the image's
    cfg.INPUT.CLASSIFY.RATIO = (0.75, 4 / 3)  # training: smallest and largest width of a crop, as a multiple of its height
    cfg.INPUT.CLASSIFY.RANDAUGMENT = ()  # RandAugment: number of operations and magnitude, 0 to 30, such as (2, 27); (): none
    cfg.INPUT.CLASSIFY.ERASE = 0.0  # probability that a rectangle of a training image is erased
    cfg.INPUT.CLASSIFY.MIXUP = 0.0  # Mixup: parameter of its Beta distribution; 0: off; if CutMix is on, each gets half the batches
    cfg.INPUT.CLASSIFY.CUTMIX = 0.0  # CutMix: parameter of its Beta distribution; 0: off
    cfg.INPUT.CLASSIFY.REPEATS = 1  # differently augmented copies of an image in a batch; an epoch sees 1/REPEATS of the images
    cfg.INPUT.CLASSIFY.TEST_SIZE = 224  # evaluation: side of the crop in pixels
    cfg.INPUT.CLASSIFY.CROP_RATIO = 0.875  # evaluation: crop as a share of the resized short side; 0: no crop, short side TEST_SIZE

    cfg.DATASETS = CfgNode()
    cfg.DATASETS.TRAIN = ()  # names of the training sets
    cfg.DATASETS.TEST = ()  # names of the test sets; results on the first one select the best checkpoint
    cfg.DATASETS.REGISTER = []  # [name, COCO JSON, images: folder, tar files or URL], or [name, YOLO, VOC or class folder, split]
    cfg.DATASETS.ON_BAD = "error"  # error: list all errors in the data and stop; drop: leave out the images and boxes with errors
    cfg.DATASETS.CACHE = "~/.cache/cpvt_det"  # folder for caching annotations of more than 4 MB or 10,000 files; "": no cache

    cfg.DATALOADER = CfgNode()
    cfg.DATALOADER.NUM_WORKERS = 4  # number of processes that load and augment images; 0: the training process does it
    cfg.DATALOADER.PATIENCE = 300.0  # seconds to wait for an image; reading is retried while its mount or server is unavailable
    cfg.DATALOADER.ASPECT_RATIO_GROUPING = True  # True: a batch has only wide or only tall images, which saves padding
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = False  # True: skip training images without objects; DETR learns from them too


def _add_solver(cfg: CfgNode) -> None:
    cfg.SOLVER = solver = CfgNode()
    solver.EPOCHS = 50.0  # length of the run in epochs; 0: MAX_ITER, STEPS and WARMUP_ITERS are used instead of the keys in epochs
    solver.STEP_EPOCHS = (40.0,)  # epochs at which the learning rate is multiplied by GAMMA
    solver.WARMUP_EPOCHS = 0.0  # epochs in which the learning rate rises linearly to its full value
    solver.MAX_ITER = 0  # length of the run in iterations; used if EPOCHS is 0
    solver.STEPS = ()  # iterations at which the learning rate is multiplied by GAMMA; used if EPOCHS is 0
    solver.WARMUP_ITERS = 0  # iterations in which the learning rate rises to its full value; used if EPOCHS is 0
    solver.GAMMA = 0.1  # factor by which the learning rate is multiplied at each step of the schedule
    solver.SCHEDULE = "step"  # step; or cosine, which falls to COSINE_END at the end
    solver.COSINE_END = 0.0  # cosine: share of the learning rate that is left at the end
    solver.IMS_PER_BATCH = 32  # batch size over all processes and accumulated parts
    solver.ACCUMULATE = 1  # number of parts in which each process computes its share of a batch; more parts need less memory
    solver.BASE_LR = 1e-4  # learning rate of everything but the backbone
    solver.BACKBONE_LR = 2e-5  # learning rate of the backbone
    solver.POINTS_LR_MULTIPLIER = 0.1  # for Deformable-DETR's sampling offsets and reference points, BASE_LR is multiplied by this
    solver.LR_MULTIPLIERS = []  # list of [part, learning rate factor], such as ["backbone.body.layer2", 0.5]; nested ones multiply
    solver.LAYER_DECAY = 1.0  # learning rate factor of backbone weights for each layer (stage, if convolutional) after them
    solver.WEIGHT_DECAY = 1e-4  # weight decay of AdamW
    solver.WEIGHT_DECAY_NORM = None  # weight decay of norms; None: WEIGHT_DECAY, as in the recipe
    solver.WEIGHT_DECAY_BIAS = None  # weight decay of biases, including those of norms; None: no separate decay for biases
    solver.WEIGHT_DECAY_EMBED = None  # weight decay of embeddings such as queries, tokens and tables; None: WEIGHT_DECAY
    solver.CLIP_NORM = 0.1  # limit on the norm of all gradients together, above which they are scaled down; 0: no clipping
    solver.AMP = CfgNode()
    solver.AMP.ENABLED = False  # True: mixed precision (autocast); losses, matching and box heads stay in float32
    solver.AMP.DTYPE = "bfloat16"  # bfloat16 or float16
    solver.EMA = CfgNode()
    solver.EMA.ENABLED = False  # True: keep a moving average of the weights and evaluate it instead of the weights
    solver.EMA.DECAY = 0.9997  # share of the old average that each step keeps
    solver.MAX_BAD_STEPS = 10  # the run stops after this many steps in a row with a NaN or infinity; such steps are skipped
    solver.CHECKPOINT_PERIOD = 5000  # iterations between checkpoints
    solver.CHECKPOINT_MINUTES = 60.0  # a checkpoint is also written after this many minutes (checked at each log line)
    solver.CHECKPOINT_KEEP = 3  # number of latest periodic checkpoints to keep, besides the best and the final one
    solver.EARLY_STOPPING = 0  # the run ends after this many evaluations in a row without a new best; 0: never
    solver.LOG_PERIOD = 20  # iterations between log lines
    solver.THREADS = 0  # threads of each process of a run on a CPU; 0: torch's default, one per core (OMP_NUM_THREADS)
    solver.COLLECTIVE_TIMEOUT = 1800.0  # seconds that a process waits for the run's other processes before it gives up


SAME_RUN = re.compile(
    r"VERSION$|OUTPUT_DIR$|CALLBACKS$|TEST\.|"
    r"MODEL\.(DEVICE|WEIGHTS(_SHA256)?|CHECKPOINTING|NUM_CLASSES|BACKBONE\.WEIGHTS|DETECTOR\.IMPLEMENTATION)$|"
    r"DATALOADER\.NUM_WORKERS$|DATASETS\.(TEST|REGISTER|CACHE)$|"
    r"SOLVER\.(CHECKPOINT_PERIOD|CHECKPOINT_MINUTES|CHECKPOINT_KEEP|LOG_PERIOD|MAX_BAD_STEPS|EARLY_STOPPING|COLLECTIVE_TIMEOUT)$"
)
"""Keys that may change when a run is resumed, because they do not affect its training steps."""


def changed_keys(before: str, now: str) -> list[str]:
    """The keys that affect a run's steps and that differ between two configs.

    Args:
        before, now: YAML of :meth:`CfgNode.dump`.

    Returns:
        "KEY was X, is Y" for each key that differs. An option that only one of the configs sets is shown as "unset" for the other.
    """
    old, new = (dict(flat_items(CfgNode.load_cfg(text))) for text in (before, now))
    options = (old.keys() ^ new.keys()) - dict(flat_items(get_cfg())).keys()
    keys = {key for key in (old.keys() & new.keys()) | options if not SAME_RUN.match(key) and old.get(key) != new.get(key)}
    changes = []
    for key in sorted(keys):
        was, now = (repr(values[key]) if key in values else "unset" for values in (old, new))
        changes.append(f"{key} was {was}, is {now}")
    return changes


def flat_items(node: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Pairs (full name, value), such as ``("MODEL.POSITION.NAME", "peg")``, of all keys that are not groups."""
    for key, value in node.items():
        yield from flat_items(value, f"{prefix}{key}.") if isinstance(value, dict) else [(f"{prefix}{key}", value)]


def nested(items: Iterable[tuple[str, Any]]) -> CfgNode:
    """Build groups of keys from pairs (full name, value): ``("A.B", 1)`` -> ``{"A": {"B": 1}}``. Inverse of :func:`flat_items`."""
    tree = CfgNode()
    for name, value in items:
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            node = node.setdefault(group, CfgNode())
        node[last] = value
    return tree


def config_root() -> Path:
    """The folder of the configs that come with the package: inside the package in a wheel, next to it in a checkout."""
    inside = Path(__file__).parent / "configs"
    return inside if inside.is_dir() else Path(__file__).parent.parent / "configs"


def find_config(name: str) -> Path:
    """Find a config file by its path, or by its name in the config folder of the package (``coco/detr_r50_peg_50ep.yaml``).

    Raises:
        ConfigError: no such file in either place.
    """
    for path in (Path(name), config_root() / name, config_root() / name.removeprefix("configs/")):
        if path.is_file():
            return path
    raise ConfigError(f"no config file {name!r}, neither as a path nor below {config_root()}")


def load_cfg(config_file: str, overrides: Sequence[str] = ()) -> CfgNode:
    """Build a config from the defaults, then a file, then KEY VALUE pairs.

    Args:
        config_file: path or name, as in :func:`find_config`; empty for the defaults alone.
        overrides: words KEY VALUE KEY VALUE ...

    Raises:
        ConfigError: a file that is missing or not safe YAML, an unknown key, a value of the wrong type.
    """
    cfg = get_cfg()
    if config_file:
        merge_checked(cfg, read_config(config_file), config_file)
    merge_overrides(cfg, overrides)
    return cfg


class _UniqueKeys(yaml.SafeLoader):
    """A loader that refuses a key that is given twice, of which YAML would take the last."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        keys = [key for key, _ in node.value if isinstance(key, yaml.ScalarNode) and key.value != "<<"]
        first = {(key.tag, key.value): key for key in reversed(keys)}
        for key in (key for key in keys if first[key.tag, key.value] is not key):
            place = f"{key.start_mark.name}, line {key.start_mark.line + 1}"
            raise yaml.YAMLError(f"{place}: {key.value} is given twice in one group; join the two")
        return node


class _WithBases(CfgNode):
    """A YAML config whose ``_BASE_`` is a path relative to the file's folder or, if there is no such file, a name in the package's
    config folder."""

    @classmethod
    def load_yaml_with_base(cls, filename: str, allow_unsafe: bool = False) -> Any:
        """Extend fvcore's method, which calls itself for ``_BASE_`` with that value appended to the file's folder."""
        path = Path(filename)
        names = [Path(*path.parts[start:]) for start in range(len(path.parts))]
        found = next((config_root() / name for name in names if (config_root() / name).is_file()), path)
        path = path if path.is_file() else found
        with path.open(encoding="utf-8") as file:
            yaml.load(file, _UniqueKeys)
        return super().load_yaml_with_base(str(path), allow_unsafe)


def read_config(config_file: str) -> CfgNode:
    """Read the keys of a YAML file and of its ``_BASE_`` files, without defaults. YAML tags cannot run code.

    Raises:
        ConfigError: a missing file, or one that is not a YAML mapping.
    """
    path = find_config(config_file)
    try:
        loaded = _WithBases.load_yaml_with_base(str(path), allow_unsafe=False)
        _require_size(loaded, f"config {path}")
        return CfgNode(loaded)
    except ConfigError:
        raise
    except (TypeError, AttributeError) as error:  # fvcore looks for _BASE_ in the YAML, whatever its type
        raise ConfigError(f"config {path} is not a YAML mapping of keys to values") from error
    except RecursionError as error:
        raise ConfigError(f"config {path}: its _BASE_ leads back to itself, or its YAML is nested too deeply") from error
    except Exception as error:  # what YAML and file systems raise has no common base
        raise ConfigError(f"cannot read config {path}: {first_line(error)}") from error


def parse_config(text: str, source: str) -> CfgNode:
    """Read the keys of YAML text, without defaults and without ``_BASE_``. YAML tags cannot run code.

    Args:
        text: YAML text, as :meth:`CfgNode.dump` writes it.
        source: origin of the text, for error messages.

    Raises:
        ConfigError: text that is not a YAML mapping.
    """
    try:
        loaded = yaml.load(text, _UniqueKeys)
        _require_size(loaded, source)
        if not isinstance(loaded, dict):
            raise ConfigError(f"{source} is not a YAML mapping of keys to values")
        return CfgNode(loaded)
    except ConfigError:
        raise
    except Exception as error:  # what YAML raises has no common base
        raise ConfigError(f"cannot read {source}: {first_line(error)}") from error


def _require_size(tree: Any, source: str) -> None:
    """Refuse YAML whose aliases expand to too many parts to copy: ten lines can stand for a billion parts, or infinitely many."""
    parts = [tree]
    for _ in range(LARGEST_CONFIG):
        if not parts:
            return
        part = parts.pop()
        parts += part.values() if isinstance(part, dict) else part if isinstance(part, list) else ()
    raise ConfigError(
        f"{source} has more than {LARGEST_CONFIG} keys and values when its YAML aliases (*name) are expanded; remove the aliases"
    )


def merge_overrides(cfg: CfgNode, overrides: Sequence[str]) -> None:
    """Merge KEY VALUE pairs from a command line.

    Raises:
        ConfigError: a key without a value, an unknown key, a value of the wrong type.
    """
    options = [word for word in overrides[::2] if word.startswith("--")]
    if options:
        raise ConfigError(f"unknown option {options[0]}; --help lists the options")
    if len(overrides) % 2:
        raise ConfigError(f"overrides must be KEY VALUE pairs, but the number of words is odd: {' '.join(overrides)}")
    for key, value in zip(overrides[::2], overrides[1::2], strict=True):
        try:
            decoded = CfgNode._decode_cfg_value(value)
        except (TypeError, MemoryError, RecursionError) as error:  # a list as a key, a thousand brackets
            raise ConfigError(f"the command line: cannot read the value of {key}: {first_line(error)}") from error
        merge_checked(cfg, CfgNode(nested([(key, decoded)])), "the command line")


def merge_checked(cfg: CfgNode, other: CfgNode, source: str) -> None:
    """Merge keys into a config.

    Args:
        cfg: config that is changed in place.
        other: some of its keys, with new values.
        source: origin of ``other``, for error messages.

    Raises:
        ConfigError: an unknown key (the message suggests the most similar known one), or a value whose type differs from the
            default's. A whole number is accepted for a float, and a single name for a list of names.
    """
    other = other.clone()
    other.set_new_allowed(True)  # for new nodes, such as the options of each part of a sum
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
        elif prefix + key in LISTS_OF_NAMES and isinstance(value, str):
            other[key] = (value,)
        elif value is None and cfg[key] is not None and (key == "NAME" or not cfg.is_new_allowed()):  # merging would let it pass
            expected = type(cfg[key]).__name__
            raise ConfigError(f"{source}: {prefix}{key} has no value, expected type {expected}; write one or remove the key")
