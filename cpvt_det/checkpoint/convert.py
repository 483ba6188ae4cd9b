# SPDX-License-Identifier: Apache-2.0
"""Convert names of other projects' weights to ours. Each source has a table of names. Further steps, which the sources share, fuse
q, k and v, and sort the heads."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpvt_det.checkpoint import real_time_names
from cpvt_det.common.errors import WeightsError
from cpvt_det.models.backbones.vit_weights import DEIT, TNT, convert_deit, convert_tnt

_NOT_WEIGHTS = re.compile(rf"(^|\.)num_batches_tracked$|^backbone\.body\.fc\.|{real_time_names.NOT_WEIGHTS}")
_PROJECTION = re.compile(r"\.([qkv])_proj\.(weight|bias)$")
_HEAD_ALIAS = re.compile(r"\.decoder\.(class|bbox)_embed\.")
_HEAD = re.compile(r"^(class|bbox)_embed\.(\d+)\.(.+)$")
_MAP_PROJECTION = re.compile(r"^input_proj\.(\d+)\.")
_EXTRA_LEVEL = re.compile(r"(?<=^input_proj\.)extra_(\d+)")
_DECODER_LAYER = re.compile(r"^transformer\.decoder\.layers\.(\d+)\.")

Renames = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Conversion:
    """The conversion of one source's names to ours.

    Attributes:
        marker: pattern that some names of this source match, but none of our names.
        renames: (pattern, replacement) pairs, applied one after the other.
        absent: pattern that no name of this source matches, which distinguishes it from other sources with the same marker.
        drops_shared: whether the source's files contain only one copy of a tensor that several layers share.
        convert: function that converts the source's tensors to ours; ``None`` if renaming is enough.
        has_own_heads: whether every decoder layer has its own heads, and the proposals' heads have names of their own.
    """

    marker: str
    renames: Renames = ()
    absent: str | None = None
    drops_shared: bool = False
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] | None = None
    has_own_heads: bool = False

    def is_source_of(self, names: Collection[str]) -> bool:
        """Whether these are names of this source."""
        found = any(re.search(self.marker, name) for name in names)
        return found and not (self.absent and any(re.search(self.absent, name) for name in names))


# transformers 4 and 5: layers of both detectors, with timm's ResNet (which has torchvision's names) or its own
_HF_LAYERS: Renames = (
    (r"^model\.backbone\.(conv_encoder\.)?model\.", "backbone.body."),
    (r"^model\.(backbone\.)?position_embedding\.", "position."),
    (r"^position\.row_embeddings\.", "position.row_embed."),
    (r"^position\.column_embeddings\.", "position.col_embed."),
    (r"^model\.(encoder|decoder)\.", r"transformer.\1."),
    (r"^(transformer\.encoder\..*)\.final_layer_norm\.", r"\1.norm2."),
    (r"^(transformer\.decoder\..*)\.final_layer_norm\.", r"\1.norm3."),
    (r"\.o_proj\.", ".out_proj."),
    (r"\.(mlp\.)?fc([12])\.", r".linear\2."),
)
_DETECTRON2_RESNET: Renames = (
    (r"^backbone\.stem\.conv1\.norm\.", "backbone.body.bn1."),
    (r"^backbone\.stem\.conv1\.", "backbone.body.conv1."),
    *((rf"^backbone\.res{n + 2}\.", f"backbone.body.layer{n + 1}.") for n in range(4)),
    (r"^(backbone\.body\..*)\.conv([123])\.norm\.", r"\1.bn\2."),
    (r"^(backbone\.body\..*)\.shortcut\.norm\.", r"\1.downsample.1."),
    (r"^(backbone\.body\..*)\.shortcut\.", r"\1.downsample.0."),
)
# Modules of our queries that the public Deformable-DETRs have in their transformer, and those of DAB and DINO in its decoder
_QUERIES = r"(reference_points|enc_output|enc_output_norm|pos_trans|pos_trans_norm)\."
_ANCHORS: Renames = (
    (r"^transformer\.decoder\.(ref_point_head|query_scale)\.", r"queries.\1."),
    (r"^(transformer\.)?tgt_embed\.", "queries.query_embed."),
    (r"^refpoint_embed\.", "queries.refpoint_embed."),
    (r"^label_enc\.", "queries.denoising.label_enc."),
)
_OFFICIAL_DEFORMABLE: Renames = (
    (r"^backbone\.0\.(body\.)?", "backbone.body."),
    (r"^backbone\.1\.", "position."),
    (r"^query_embed\.", "queries.query_embed."),
    (rf"^transformer\.{_QUERIES}", r"queries.\1."),
    (r"^transformer\.decoder\.(class|bbox)_embed\.", r"\1_embed."),
)

CONVERSIONS: dict[str, Conversion] = {
    # github.com/facebookresearch/detr
    "facebook_detr": Conversion(
        marker=r"^backbone\.0\.body\.",
        absent=r"^transformer\.level_embed",
        renames=((r"^backbone\.0\.body\.", "backbone.body."), (r"^backbone\.1\.", "position.")),
    ),
    # DetrForObjectDetection of transformers
    "hf_detr": Conversion(
        marker=r"^class_labels_classifier\.",
        renames=(
            (r"^model\.query_position_embeddings\.", "query_embed."),
            (r"^model\.input_projection\.", "input_proj."),
            (r"^class_labels_classifier\.", "class_embed."),
            (r"^bbox_predictor\.", "bbox_embed."),
            *_HF_LAYERS,
            (r"^(transformer\..*)\.layernorm\.", r"\1.norm."),
            (r"\.self_attn_layer_norm\.", ".norm1."),
            (r"\.encoder_attn_layer_norm\.", ".norm2."),
            (r"\.encoder_attn\.", ".multihead_attn."),
            *real_time_names.HF_RESNET,
        ),
    ),
    # github.com/fundamentalvision/Deformable-DETR and github.com/HDETR/H-Deformable-DETR
    "deformable_detr": Conversion(
        marker=r"^transformer\.(reference_points|enc_output)\.",
        absent=r"^transformer\.(level_embeds$|enc_out_class_embed\.)",
        renames=_OFFICIAL_DEFORMABLE,
    ),
    # github.com/IDEA-Research/DINO, with its ResNet or its Swin, which has detectron2's names
    "dino": Conversion(
        marker=r"^transformer\.enc_out_class_embed\.",
        renames=(*_OFFICIAL_DEFORMABLE, *_ANCHORS, (r"^transformer\.enc_out_(class|bbox)_embed\.", r"queries.\1_embed.")),
    ),
    # github.com/IDEA-Research/detrex, projects/{deformable_detr,dab_deformable_detr,dino}, over detectron2's ResNet or Swin
    "detrex_deformable_detr": Conversion(
        marker=r"^transformer\.level_embeds$",
        renames=(
            *_DETECTRON2_RESNET,
            (r"^backbone\.(patch_embed|absolute_pos_embed|layers|norm\d)", r"backbone.body.\1"),
            (r"^position_embedding\.", "position."),
            (r"^neck\.(extra_)?convs\.(\d+)\.conv\.", r"input_proj.\1\2.0."),
            (r"^neck\.(extra_)?convs\.(\d+)\.norm\.", r"input_proj.\1\2.1."),
            (r"^query_embedding\.", "queries.query_embed."),
            (r"^transformer\.level_embeds$", "transformer.level_embed"),
            (rf"^transformer\.{_QUERIES}", r"queries.\1."),
            *_ANCHORS,
            (r"^transformer\.decoder\.(class|bbox)_embed\.", r"\1_embed."),
            (r"\.attentions\.0\.(attn\.)?", ".self_attn."),
            (r"\.attentions\.1\.", ".cross_attn."),
            (r"\.ffns\.0\.layers\.0\.0\.", ".linear1."),
            (r"\.ffns\.0\.layers\.1\.", ".linear2."),
            *((rf"^(transformer\.encoder\..*)\.norms\.{n}\.", rf"\1.norm{n + 1}.") for n in range(2)),
            *((rf"^(transformer\.decoder\..*)\.norms\.{n}\.", rf"\1.norm{norm}.") for n, norm in enumerate((2, 1, 3))),
        ),
    ),
    # github.com/lyuwenyu/RT-DETR, both versions in PyTorch; github.com/Peterande/D-FINE and github.com/ShihuaHuang95/DEIM
    "rt_detr": Conversion(marker=r"^decoder\.enc_score_head\.", renames=real_time_names.AUTHORS, has_own_heads=True),
    # RTDetrForObjectDetection and RTDetrV2ForObjectDetection of transformers
    "hf_rt_detr": Conversion(
        marker=r"^model\.enc_score_head\.", absent=r"\.lqe_layers\.", renames=real_time_names.TRANSFORMERS, has_own_heads=True
    ),
    # DFineForObjectDetection of transformers
    "hf_d_fine": Conversion(
        marker=r"^model\.decoder\.lqe_layers\.", renames=real_time_names.TRANSFORMERS_DFINE, has_own_heads=True
    ),
    # github.com/facebookresearch/deit, whose names are timm's too: classifiers, distilled or not
    "deit": Conversion(marker=DEIT, convert=convert_deit),
    # timm's TNT, and github.com/huawei-noah/Efficient-AI-Backbones
    "tnt": Conversion(marker=TNT, convert=convert_tnt),
    # DeformableDetrForObjectDetection of transformers
    "hf_deformable_detr": Conversion(
        marker=r"^model\.level_embed$",
        drops_shared=True,
        renames=(
            (r"^model\.query_position_embeddings\.", "queries.query_embed."),
            (r"^model\.input_proj\.", "input_proj."),
            (r"^model\.level_embed$", "transformer.level_embed"),
            (rf"^model\.{_QUERIES}", r"queries.\1."),
            (r"^model\.decoder\.(class|bbox)_embed\.", r"\1_embed."),
            *_HF_LAYERS,
            (r"^(transformer\.encoder\..*)\.self_attn_layer_norm\.", r"\1.norm1."),
            (r"^(transformer\.decoder\..*)\.self_attn_layer_norm\.", r"\1.norm2."),
            (r"\.encoder_attn_layer_norm\.", ".norm1."),
            (r"\.encoder_attn\.", ".cross_attn."),
            *real_time_names.HF_RESNET,
        ),
    ),
}
"""Name of a source -> its table. To support a new source, it is enough to add a table here."""
OTHERS = {
    "DAB-DETR": r"\.ref_anchor_head\.",
    "Conditional DETR": r"q(uery)?_?content_proj\.",
    "Anchor DETR": r"(^|\.)adapt_pos2d\.",
    "LW-DETR or RF-DETR": r"(^|\.)enc_out_class_embed\.\d",
    "Grounding DINO": r"\.fusion_layers?\.",
}
"""Unsupported relative of DETR -> pattern of names that neither our models nor known sources have; the first match decides."""


def convert_state_dict(state_dict: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Rename weights of another project to our names.

    Shapes stay the same, so class heads keep all their rows. There are two exceptions: ``q_proj``, ``k_proj`` and ``v_proj`` are
    joined into one tensor, and a class vector for denoising is left out if no row of the class heads belongs to it. If all layers
    of a Deformable-DETR share their heads, only one pair of heads is kept. If the last pair of heads belongs to the proposals, its
    names start with ``queries.``.

    Args:
        state_dict: tensors under the names of ``source``; none is changed.
        source: name of the source, a key of ``CONVERSIONS``, which :func:`detect_source` finds.

    Returns:
        Our names -> tensors, without batch counters and without the backbone's classifier.

    Raises:
        WeightsError: a missing q, k or v; two tensors with different values that would get the same name.
    """
    conversion = CONVERSIONS[source]
    if conversion.convert is not None:
        return conversion.convert(state_dict)
    renamed = _number_extra_levels(_fuse_projections(_rename_all(state_dict, conversion.renames)))
    if not conversion.has_own_heads:
        refined = any(_HEAD_ALIAS.search(name) for name in state_dict)
        renamed = _sort_heads(renamed, refined, conversion.drops_shared)
    head, labels = "class_embed.0.weight", "queries.denoising.label_enc.weight"
    if head in renamed and labels in renamed:  # DINO's code creates one vector more than there are classes and never uses it
        renamed[labels] = renamed[labels][: len(renamed[head])]
    return renamed


def detect_source(state_dict: Mapping[str, Tensor]) -> str | None:
    """The source that uses the names of these weights; ``None`` for our names and unknown names.

    Raises:
        WeightsError: names of several sources, or of an unsupported architecture.
    """
    for architecture, marker in OTHERS.items():
        if name := next((name for name in state_dict if re.search(marker, name)), None):
            raise WeightsError(
                f"weights of {architecture} (recognised by the tensor {name}) are not supported; give weights of DETR, "
                "Deformable-DETR, DAB-Deformable-DETR, DINO, RT-DETR or D-FINE"
            )
    found = [source for source, conversion in CONVERSIONS.items() if conversion.is_source_of(state_dict)]
    if len(found) > 1:
        raise WeightsError(f"the weights mix the tensor names of {' and '.join(found)}")
    return found[0] if found else None


def _rename_all(state_dict: Mapping[str, Tensor], renames: Renames) -> dict[str, Tensor]:
    """The tensors under their new names. A tensor may have had several old names, for example a head that is also stored in the
    decoder."""
    renamed: dict[str, Tensor] = {}
    origins: dict[str, str] = {}
    for origin, tensor in state_dict.items():
        name = origin
        for pattern, replacement in renames:
            name = re.sub(pattern, replacement, name)
        if _NOT_WEIGHTS.search(name):
            continue
        if name in renamed and not torch.equal(renamed[name], tensor):
            raise WeightsError(f"{origins[name]} and {origin} have different values, but both would be renamed to {name}")
        renamed[name], origins[name] = tensor, origin
    return renamed


def _fuse_projections(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """``q_proj``, ``k_proj`` and ``v_proj``, each (C, C) or (C,) -> ``in_proj_weight`` (3 C, C) or ``in_proj_bias`` (3 C,)."""
    fused: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in state_dict.items():
        if match := _PROJECTION.search(name):
            parts[_PROJECTION.sub(r".in_proj_\2", name)][match[1]] = tensor
        else:
            fused[name] = tensor
    for name, found in parts.items():
        if len(found) < 3:
            raise WeightsError(f"{name} needs q_proj, k_proj and v_proj, but the weights contain only {', '.join(sorted(found))}")
        fused[name] = torch.cat([found[part] for part in "qkv"])
    return fused


def _number_extra_levels(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """Number the projections ``input_proj.extra_N``, which make the levels that the backbone does not have, after the projections
    of the backbone's maps."""
    first = 1 + max((int(match[1]) for match in map(_MAP_PROJECTION.match, state_dict) if match), default=-1)
    return {_EXTRA_LEVEL.sub(lambda match: str(first + int(match[1])), name): t for name, t in state_dict.items()}


def _sort_heads(state_dict: dict[str, Tensor], refined: bool, complete: bool) -> dict[str, Tensor]:
    """Turn the heads ``class_embed.N`` and ``bbox_embed.N`` of a Deformable-DETR into one pair or into D pairs, one per decoder
    layer. The proposals' pair, if there is one, is separated from them.

    Args:
        state_dict: tensors under our names, with heads numbered as in their source.
        refined: whether every layer is known to have its own heads; ``False`` merges heads with equal values.
        complete: whether tensors that are missing in a layer's heads are taken from the first layer's heads.
    """
    layers = 1 + max((int(match[1]) for match in map(_DECODER_LAYER.match, state_dict) if match), default=-1)
    heads: dict[int, dict[str, Tensor]] = defaultdict(dict)
    others: dict[str, Tensor] = {}
    for name, tensor in state_dict.items():
        if match := _HEAD.match(name):
            heads[int(match[2])][f"{match[1]}_embed.{{}}{match[3]}"] = tensor
        else:
            others[name] = tensor
    first = heads.get(0, {})
    for index in range(layers if complete else 0):
        heads[index] = {**first, **heads[index]}
    is_shared = all(
        one.keys() == first.keys() and all(torch.equal(one[key], first[key]) for key in first) for one in heads.values()
    )
    if "queries.enc_output.weight" in others:
        others |= {f"queries.{name.format('')}": tensor for name, tensor in heads.pop(layers, {}).items()}
    elif not refined and is_shared:
        heads = {0: first}
    return others | {name.format(f"{index}."): tensor for index, head in heads.items() for name, tensor in head.items()}
