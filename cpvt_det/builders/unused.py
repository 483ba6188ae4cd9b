# SPDX-License-Identifier: Apache-2.0
"""Keys that cannot apply to what a config chooses, as ``FOCAL_ALPHA`` under softmax: none is dropped in silence.

Where a detector is built, such a key is refused unless it has its default. A config that a run or a model folder kept is loaded all
the same, with a warning. The registries know what a part takes; a detector's registration names what the detector does not take.
"""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence

from fvcore.common.config import CfgNode

from cpvt_det import distributed
from cpvt_det.config import flat_items, get_cfg
from cpvt_det.errors import ConfigError
from cpvt_det.losses import CLASSIFICATION_REGISTRY
from cpvt_det.models import BACKBONE_REGISTRY, QUERY_REGISTRY
from cpvt_det.models.backbones.vit import OWN_POSITIONS
from cpvt_det.position import POSITION_REGISTRY
from cpvt_det.registry import PartRegistry

logger = logging.getLogger("cpvt_det")
KEYWORDS = {"DC5": "dilation", "FOCAL_ALPHA": "alpha", "FOCAL_GAMMA": "gamma"}
"""Keys -> keywords of the parts that take them; of other keys the keyword is the key in lower case."""
CLASSIFICATION_KEYS = (
    "BACKGROUND_WEIGHT",
    "FOCAL_ALPHA",
    "FOCAL_GAMMA",
    "MAL_GAMMA",
    "VARIFOCAL_ALPHA",
    "VARIFOCAL_GAMMA",
    "IA_BCE_ALPHA",
    "IA_BCE_GAMMA",
)
QUERY_KEYS = (
    "CLASS_PROPOSALS",
    "HYBRID",
    "DENOISING",
    "SHARED_CONTENT",
    "TOKEN_CONTENT",
    "REFINED_POSITIONS",
    "SCALED_POSITIONS",
)
RESNET_KEYS = ("NORM", "WIDTH", "STAGES", "DC5", "FREEZE_AT")  # MASK_PADDING is the neck's too
TRANSFORMER_KEYS = ("PATCH_SIZE", "EMBED_DIM", "DEPTH", "NUM_HEADS", "NUM_TOKENS", "DROP_PATH")
BACKBONE_KEYS = (*RESNET_KEYS, *TRANSFORMER_KEYS)
WITHOUT_PEG = ("none", "sine", "sine_offset", "learned", "table", "relative", "rope", "rope_mixed")
UNUSED_BY: dict[str, Sequence[str]] = {}
"""Detector -> the keys that it does not take; filled by ``register_detector``. Where ``MODEL.QUERIES.NAME`` is empty, their query
source is learned, or with two stages proposals."""


def keyword_of(key: str) -> str:
    """The keyword that a key of a part's node is handed over as."""
    return KEYWORDS.get(key, key.lower())


def refuse_unused(cfg: CfgNode) -> None:
    """Refuse a key that cannot apply. Those that a registered backbone does not take are ignored, with a warning: they are
    options of our ResNets, which the configs that one starts from set.

    Raises:
        ConfigError: the first such key, its value, the reason and the way out.
    """
    node, found = cfg.MODEL.BACKBONE, unused_keys(cfg)
    taken = BACKBONE_REGISTRY.parameters(node.NAME) if node.NAME in BACKBONE_REGISTRY else map(keyword_of, BACKBONE_KEYS)
    ignored = [key for key in RESNET_KEYS if keyword_of(key) not in taken and found.pop(f"MODEL.BACKBONE.{key}", "")]
    for message in found.values():
        raise ConfigError(message)
    if ignored and distributed.rank() == 0:
        listed = ", ".join(f"{key} {node[key]!r}" for key in ignored)
        logger.warning("The backbone %r does not take these keys of MODEL.BACKBONE, which are ignored: %s", node.NAME, listed)


def backbone_position(cfg: CfgNode) -> str:
    """The encoding of a backbone that is a transformer: ``MODEL.BACKBONE.POSITION.NAME``, or its own; empty for other backbones."""
    return cfg.MODEL.BACKBONE.POSITION.NAME or OWN_POSITIONS.get(cfg.MODEL.BACKBONE.NAME, "")


def unused_keys(cfg: CfgNode) -> dict[str, str]:
    """The keys that cannot apply and differ from their defaults, each with a sentence for the user."""
    values, defaults, found = dict(flat_items(cfg)), dict(flat_items(get_cfg())), {}
    for key, reason, way_out in _inapplicable(cfg):
        if key not in defaults or values[key] != defaults[key]:
            leave = f"leave it at {defaults[key]!r}" if key in defaults else "leave it out"
            found[key] = f"{key} is {values[key]!r}, but {reason}; {leave}, or {way_out}"
    return found


def inapplicable_keys(cfg: CfgNode) -> set[str]:
    """The keys that cannot apply, whatever their values are."""
    return {key for key, _, _ in _inapplicable(cfg)}


def forgive_kept(cfg: CfgNode, source: str, overrides: Sequence[str]) -> None:
    """Set keys of a kept config that cannot apply back to their defaults, with one warning.

    Args:
        cfg: kept config, changed in place.
        source: origin of the config, for the warning.
        overrides: KEY VALUE words that the user typed beside it; these keys stay, to be refused.
    """
    kept = sorted(unused_keys(cfg).keys() - set(overrides[::2]))
    values, defaults = dict(flat_items(cfg)), get_cfg()
    for key in kept:
        *groups, last = key.split(".")
        node, default = cfg, defaults
        for group in groups:
            node, default = node[group], default[group]
        if last in default:
            node[last] = default[last]
        else:
            del node[last]
    if kept and distributed.rank() == 0:
        listed = ", ".join(f"{key} {values[key]!r}" for key in kept)
        logger.warning("%s has keys that have no effect on this model and are ignored: %s", source, listed)


def _inapplicable(cfg: CfgNode) -> Iterator[tuple[str, str, str]]:
    """The keys that cannot apply, each with the reason and the way out."""
    model, solver = cfg.MODEL, cfg.SOLVER
    detector = model.META_ARCHITECTURE
    of_detector = UNUSED_BY.get(detector, ())
    for key in of_detector:
        others = [name for name, unused in UNUSED_BY.items() if key not in unused]
        yield key, f"the detector {detector!r} does not take it", f"set MODEL.META_ARCHITECTURE to {', '.join(others)}"
    position_keys = sorted(get_cfg().MODEL.POSITION.keys() - {"NAME", "DECODER"})
    yield from _untaken("POSITION.NAME", POSITION_REGISTRY, model.POSITION.NAME, position_keys)
    yield from _of_backbone_position(cfg)
    yield from _untaken("CRITERION.CLASSIFICATION", CLASSIFICATION_REGISTRY, model.CRITERION.CLASSIFICATION, CLASSIFICATION_KEYS)
    yield from _untaken("BACKBONE.NAME", BACKBONE_REGISTRY, model.BACKBONE.NAME, BACKBONE_KEYS)
    if model.BACKBONE.NAME not in BACKBONE_REGISTRY:
        for key in ("NORM", "WIDTH"):
            yield f"MODEL.BACKBONE.{key}", "backbones of detectron2 do not take it", "set MODEL.BACKBONE.NAME to one of cpvt_det"
    if 5 not in model.BACKBONE.STAGES:
        yield "MODEL.BACKBONE.DC5", "MODEL.BACKBONE.STAGES has no stage 5", "add 5 to MODEL.BACKBONE.STAGES"
    if detector in UNUSED_BY and "MODEL.DEFORMABLE.BOX_REFINEMENT" not in of_detector and not model.DEFORMABLE.BOX_REFINEMENT:
        for key in ("MODEL.DEFORMABLE.LOOK_FORWARD_TWICE", "MODEL.QUERIES.SCALED_POSITIONS"):
            yield key, "MODEL.DEFORMABLE.BOX_REFINEMENT is False", "set MODEL.DEFORMABLE.BOX_REFINEMENT to True"
    if detector in UNUSED_BY and ("MODEL.DEFORMABLE.MIXED_SUPERVISION" in of_detector or not model.DEFORMABLE.MIXED_SUPERVISION):
        for key in ("MANY_MATCHES", "MANY_THRESHOLD", "MANY_CLASS_WEIGHT"):
            reason, way_out = "MODEL.DEFORMABLE.MIXED_SUPERVISION is False", "set MODEL.DEFORMABLE.MIXED_SUPERVISION to True"
            yield f"MODEL.CRITERION.{key}", reason, way_out
    if not model.NECK.NAME:
        for key in sorted(model.NECK.keys() - {"NAME"}):
            yield f"MODEL.NECK.{key}", "MODEL.NECK.NAME is empty", "name the part that takes it there"
    yield from _of_queries(model, of_detector, detector in UNUSED_BY)
    if model.POSITION.NAME in WITHOUT_PEG and backbone_position(cfg) in ("", *WITHOUT_PEG):
        reason = f"the position encoding {model.POSITION.NAME!r} has no PEG"
        yield "SOLVER.WEIGHT_DECAY_PEG", reason, "set MODEL.POSITION.NAME to peg"
    if not cfg.TEST.TILES.SIZE:
        for key in ("OVERLAP", "MERGE", "WHOLE"):
            yield f"TEST.TILES.{key}", "TEST.TILES.SIZE is 0", "set TEST.TILES.SIZE (--tiles) to the side of a tile"
    if solver.SCHEDULE == "cosine":
        for key in ("GAMMA", "STEP_EPOCHS") if solver.STEP_EPOCHS else ("GAMMA",):  # no steps are what a cosine has
            yield f"SOLVER.{key}", "the schedule 'cosine' has no steps", "set SOLVER.SCHEDULE to step"
    else:
        yield "SOLVER.COSINE_END", f"the schedule {solver.SCHEDULE!r} is no cosine", "set SOLVER.SCHEDULE to cosine"
    if not model.CLASSIFIER.TEACHER.startswith("timm/"):
        yield "MODEL.CLASSIFIER.TEACHER_WEIGHTS", "no network of timm is the teacher", "set MODEL.CLASSIFIER.TEACHER to timm/<name>"


def _of_backbone_position(cfg: CfgNode) -> Iterator[tuple[str, str, str]]:
    """The keys of ``MODEL.BACKBONE.POSITION`` that the backbone's encoding does not take, or all, if it is no transformer."""
    node = cfg.MODEL.BACKBONE
    taken = BACKBONE_REGISTRY.parameters(node.NAME) if node.NAME in BACKBONE_REGISTRY else ()
    if "position" in taken:
        keys = sorted(get_cfg().MODEL.BACKBONE.POSITION.keys() - {"NAME"})
        yield from _untaken("BACKBONE.POSITION.NAME", POSITION_REGISTRY, backbone_position(cfg), keys)
        return
    for key in node.POSITION:
        yield (
            f"MODEL.BACKBONE.POSITION.{key}",
            f"the backbone {node.NAME!r} takes no encoding",
            "set MODEL.POSITION for the detector's",
        )


def _of_queries(model: CfgNode, of_detector: Collection[str], is_known: bool) -> Iterator[tuple[str, str, str]]:
    """The keys that the query source does not take; ``is_known``: it is known which one an empty name stands for."""
    name, has_stages = model.QUERIES.NAME, "MODEL.DEFORMABLE.TWO_STAGE" not in of_detector
    for key in sorted(model.QUERIES.keys() - {"NAME"}) if not name else ():
        takers = [other for other in QUERY_REGISTRY.names if keyword_of(key) in QUERY_REGISTRY.parameters(other)]
        way_out = f"set it to {', '.join(takers)}" if takers else "name the part that takes it there"
        yield f"MODEL.QUERIES.{key}", "MODEL.QUERIES.NAME is empty", way_out
    yield from _untaken("QUERIES.NAME", QUERY_REGISTRY, name, QUERY_KEYS)

    source = name or (("proposals" if has_stages and model.DEFORMABLE.TWO_STAGE else "learned") if is_known else "")
    taken = QUERY_REGISTRY.parameters(source) if source in QUERY_REGISTRY else {"nms_threshold", "num_queries"}
    queries = f"the query source {source!r}"
    propose = "set MODEL.DEFORMABLE.TWO_STAGE to True" if has_stages else "set MODEL.QUERIES.NAME to proposals"
    if "nms_threshold" not in taken:
        yield "MODEL.DEFORMABLE.PROPOSAL_NMS", f"{queries} does not take it", propose
    if "num_queries" not in taken:
        takers = [other for other in QUERY_REGISTRY.names if "num_queries" in QUERY_REGISTRY.parameters(other)]
        yield "MODEL.DETR.NUM_OBJECT_QUERIES", f"{queries} does not take it", f"set MODEL.QUERIES.NAME to {', '.join(takers)}"
    if source in ("learned", "anchors"):
        yield "MODEL.CRITERION.PROPOSAL_MATCHES", f"{queries} makes no proposals", propose
    if not model.QUERIES.DENOISING:
        for key in ("LABEL_NOISE", "BOX_NOISE"):
            yield f"MODEL.QUERIES.{key}", "MODEL.QUERIES.DENOISING is 0", "set MODEL.QUERIES.DENOISING to a number of pairs"
    if source in ("learned", "anchors", "proposals", "mixed") and not model.QUERIES.HYBRID:
        yield "MODEL.CRITERION.HYBRID_MATCHES", "MODEL.QUERIES.HYBRID is 0", "set MODEL.QUERIES.HYBRID to a number of queries"
    if "MODEL.DEFORMABLE.BOX_REFINEMENT" in of_detector:
        refine = "set MODEL.META_ARCHITECTURE to CPVTDeformableDetr"
        for key in ("REFINED_POSITIONS", "SCALED_POSITIONS"):
            yield f"MODEL.QUERIES.{key}", f"the detector {model.META_ARCHITECTURE!r} does not refine boxes", refine


def _untaken(chooser: str, registry: PartRegistry, name: str, keys: Iterable[str]) -> Iterator[tuple[str, str, str]]:
    """The keys of a node that the part chosen by ``MODEL.<chooser>`` does not take; none where nothing is registered as that."""
    taken = registry.parameters(name) if name in registry else {keyword_of(key) for key in keys}
    for key in keys:
        if keyword_of(key) not in taken:
            takers = [other for other in registry.names if keyword_of(key) in registry.parameters(other)]
            reason = f"the {registry.kind} {name!r} does not take it"
            yield f"MODEL.{chooser.rpartition('.')[0]}.{key}", reason, f"set MODEL.{chooser} to {', '.join(takers)}"
