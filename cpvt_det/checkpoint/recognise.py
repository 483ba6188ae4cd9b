# SPDX-License-Identifier: Apache-2.0
"""Find the config of other projects' weights: by the file's hash if it is known, otherwise by names and shapes.

Settings that names and shapes do not show get their usual values: 8 heads in DETR, 4 points in deformable attention, no DC5.
"""

import re
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from cpvt_det.checkpoint.files import sha256_of
from cpvt_det.checkpoint.starts import Start, starts
from cpvt_det.config import load_cfg
from cpvt_det.models.backbones.resnet import DEPTHS

BODY = "backbone.body."
REAL_TIME = ("rt_detr", "hf_rt_detr", "hf_d_fine")
"""Sources whose detectors cannot be told apart by shapes; ``--config-file`` must name the config."""
POINTS, HEADS, QUERIES = 4, 8, 300
_LAYER = re.compile(r"^transformer\.(encoder|decoder)\.layers\.(\d+)\.")
_PROJECTION = re.compile(r"^input_proj\.(\d+)\.0\.weight$")


def start_of_file(path: Path) -> Start | None:
    """The public weights that a file contains, found by its hash; ``None`` for other files."""
    hashes = {place.sha256: start for start in starts().values() for place in start.places if place.sha256}
    return hashes.get(sha256_of(path))


def recognise(state_dict: Mapping[str, Tensor], source: str, start: Start | None = None) -> str | None:
    """The config of weights of another project.

    Args:
        state_dict: tensors under our names.
        source: source of their original names, a key of ``CONVERSIONS``.
        start: entry of these public weights in the table, if they are known.

    Returns:
        The config as YAML; ``None`` if the backbone is not a ResNet, or if the weights are not a detector's.
    """
    if start is not None:
        return load_cfg(start.config, start.overrides).dump()
    if source in REAL_TIME:
        return None
    shapes = {name: tuple(tensor.shape) for name, tensor in state_dict.items()}
    is_detr = "class_embed.weight" in shapes
    try:
        words = _backbone(shapes) | _transformer(shapes) | (_detr(shapes) if is_detr else _deformable(shapes))
    except KeyError:  # a name that all these detectors have is missing
        return None
    config = "detr_r50_sine_50ep" if is_detr else _kind(shapes, source)
    return load_cfg(f"coco/{config}.yaml", [str(word) for pair in words.items() for word in pair]).dump()


def _kind(shapes: Mapping[str, tuple[int, ...]], source: str) -> str:
    """The config of a Deformable-DETR or of one of its successors."""
    two_stage = "queries.enc_output.weight" in shapes
    if "transformer.decoder.layers.0.linear3.weight" in shapes:
        return "ms_deformable_detr_r50_pp_sine_offset_12ep"
    if "queries.ref_point_head.layers.0.weight" in shapes:
        if "transformer.decoder.norm.weight" in shapes:
            return "dino_r50_4scale_official_12ep" if source == "dino" else "dino_r50_4scale_sine_offset_12ep"
        return f"dab_deformable_detr_r50_sine_offset{'_two_stage' if two_stage else ''}_50ep"
    if two_stage and "queries.query_embed.weight" in shapes:
        return "h_deformable_detr_r50_official_12ep"
    kind = "_two_stage" if two_stage else "_refine" if "bbox_embed.1.layers.0.weight" in shapes else ""
    return f"deformable_detr_r50_official{kind}_50ep"


def _backbone(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    blocks = [len({name.split(".")[3] for name in shapes if name.startswith(f"{BODY}layer{n}.")}) for n in range(1, 5)]
    kinds = {(kind.expansion, *depths): name for name, (kind, depths) in DEPTHS.items()}
    expansion = 4 if f"{BODY}layer1.0.conv3.weight" in shapes else 1
    return {"MODEL.BACKBONE.NAME": kinds[(expansion, *blocks)], "MODEL.BACKBONE.WEIGHTS": ""}


def _transformer(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    layers = [match.groups() for match in map(_LAYER.match, shapes) if match]
    feedforward, width = shapes["transformer.encoder.layers.0.linear1.weight"]
    depth = {kind: 1 + max((int(number) for one, number in layers if one == kind), default=-1) for kind in ("encoder", "decoder")}
    learned = {"MODEL.POSITION.NAME": "learned"} if "position.row_embed.weight" in shapes else {}
    sizes = {"HIDDEN_DIM": width, "DIM_FEEDFORWARD": feedforward, "ENC_LAYERS": depth["encoder"], "DEC_LAYERS": depth["decoder"]}
    return learned | {f"MODEL.DETR.{key}": value for key, value in sizes.items()}


def _detr(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    return {
        "MODEL.DETR.NHEADS": HEADS,
        "MODEL.DETR.NUM_OBJECT_QUERIES": shapes["query_embed.weight"][0],
        **({"MODEL.DETECTOR.PRE_NORM": True} if "transformer.encoder.norm.weight" in shapes else {}),
    }


def _deformable(shapes: Mapping[str, tuple[int, ...]]) -> dict[str, object]:
    projections = {int(match[1]): shapes[match[0]] for match in map(_PROJECTION.match, shapes) if match}
    stage_of = {shapes[f"{BODY}layer{stage - 1}.0.downsample.0.weight"][0]: stage for stage in (3, 4, 5)}
    first = stage_of.get(projections[0][1], 2)
    stages = range(first, first + sum(shape[2:] == (1, 1) for shape in projections.values()))
    attention = shapes["transformer.encoder.layers.0.self_attn.attention_weights.weight"][0]
    embedded = shapes.get("queries.refpoint_embed.weight", shapes.get("queries.query_embed.weight", (QUERIES,)))[0]
    is_hybrid = "queries.pos_trans.weight" in shapes and embedded > QUERIES
    return {
        "MODEL.BACKBONE.STAGES": tuple(stages),
        "MODEL.DETECTOR.NUM_LEVELS": len(projections),
        "MODEL.DETR.NHEADS": attention // (len(projections) * POINTS),
        "MODEL.DETR.NUM_OBJECT_QUERIES": QUERIES if is_hybrid else embedded,
        **({"MODEL.QUERIES.HYBRID": embedded - QUERIES} if is_hybrid else {}),
    }
