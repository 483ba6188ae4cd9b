# SPDX-License-Identifier: Apache-2.0
"""The names of other projects' weights -> ours. A source is a table; one generic step puts q, k and v into one tensor."""

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from cpvt_det.errors import UnknownNameError, WeightsError

_NOT_WEIGHTS = re.compile(r"(^|\.)num_batches_tracked$|^backbone\.body\.fc\.")
_PROJECTION = re.compile(r"\.([qkv])_proj\.(weight|bias)$")


@dataclass(frozen=True)
class Conversion:
    """How the names of one source become ours.

    Attributes:
        marker: a pattern that names of this source match, and ours do not.
        renames: patterns and replacements, each applied to what the one before left.
    """

    marker: str
    renames: tuple[tuple[str, str], ...]


CONVERSIONS: dict[str, Conversion] = {
    # github.com/facebookresearch/detr
    "facebook_detr": Conversion(
        marker=r"^backbone\.0\.body\.",
        renames=(
            (r"^backbone\.0\.body\.", "backbone.body."),
            (r"^backbone\.1\.", "position."),
        ),
    ),
    # DetrForObjectDetection of transformers 4 and 5, over timm's ResNet, whose names are torchvision's, or over its own
    "hf_detr": Conversion(
        marker=r"^class_labels_classifier\.",
        renames=(
            (r"^model\.backbone\.(conv_encoder\.)?model\.", "backbone.body."),
            (r"^model\.(backbone\.)?position_embedding\.", "position."),
            (r"^position\.row_embeddings\.", "position.row_embed."),
            (r"^position\.column_embeddings\.", "position.col_embed."),
            (r"^model\.query_position_embeddings\.", "query_embed."),
            (r"^model\.input_projection\.", "input_proj."),
            (r"^class_labels_classifier\.", "class_embed."),
            (r"^bbox_predictor\.", "bbox_embed."),
            (r"^model\.(encoder|decoder)\.", r"transformer.\1."),
            (r"^(transformer\..*)\.layernorm\.", r"\1.norm."),
            (r"\.self_attn_layer_norm\.", ".norm1."),
            (r"\.encoder_attn_layer_norm\.", ".norm2."),
            (r"^(transformer\.encoder\..*)\.final_layer_norm\.", r"\1.norm2."),
            (r"^(transformer\.decoder\..*)\.final_layer_norm\.", r"\1.norm3."),
            (r"\.encoder_attn\.", ".multihead_attn."),
            (r"\.o_proj\.", ".out_proj."),
            (r"\.(mlp\.)?fc([12])\.", r".linear\2."),
            # its own ResNet
            (r"\.body\.embedder\.embedder\.convolution\.", ".body.conv1."),
            (r"\.body\.embedder\.embedder\.normalization\.", ".body.bn1."),
            *((rf"\.body\.encoder\.stages\.{n}\.layers\.", f".body.layer{n + 1}.") for n in range(4)),
            *((rf"\.layer\.{n}\.convolution\.", f".conv{n + 1}.") for n in range(3)),
            *((rf"\.layer\.{n}\.normalization\.", f".bn{n + 1}.") for n in range(3)),
            (r"\.shortcut\.convolution\.", ".downsample.0."),
            (r"\.shortcut\.normalization\.", ".downsample.1."),
        ),
    ),
}
"""Source -> its table; the one place that a new source is added to."""


def convert_state_dict(state_dict: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """Give weights our names. Shapes stay, so heads keep all their rows; ``q_proj``, ``k_proj`` and ``v_proj`` become one.

    Args:
        state_dict: with the names of ``source``; no tensor is changed.
        source: a key of ``CONVERSIONS``.

    Returns:
        Our names -> tensors, without counters of batches and without a classifier of the backbone.

    Raises:
        UnknownNameError: another source.
        WeightsError: weights that have no name of this source, or an incomplete q, k and v.
    """
    if source not in CONVERSIONS:
        raise UnknownNameError("weights source", source, CONVERSIONS)
    conversion = CONVERSIONS[source]
    if not any(re.search(conversion.marker, name) for name in state_dict):
        example = next(iter(state_dict), "nothing")
        raise WeightsError(f"not the names of {source}; the weights hold {example}, for one")
    renamed = {_rename(name, conversion): tensor for name, tensor in state_dict.items()}
    return _fuse_projections({name: tensor for name, tensor in renamed.items() if not _NOT_WEIGHTS.search(name)})


def detect_source(state_dict: Mapping[str, Tensor]) -> str | None:
    """The source whose names these weights have; ``None``: ours, or no known one's."""
    for source, conversion in CONVERSIONS.items():
        if any(re.search(conversion.marker, name) for name in state_dict):
            return source
    return None


def _rename(name: str, conversion: Conversion) -> str:
    for pattern, replacement in conversion.renames:
        name = re.sub(pattern, replacement, name)
    return name


def _fuse_projections(state_dict: dict[str, Tensor]) -> dict[str, Tensor]:
    """``q_proj``, ``k_proj`` and ``v_proj``, each (C, C) or (C,) -> ``in_proj_weight`` (3 C, C) or ``in_proj_bias`` (3 C,)."""
    fused: dict[str, Tensor] = {}
    parts: dict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in state_dict.items():
        match = _PROJECTION.search(name)
        if match:
            parts[_PROJECTION.sub(r".in_proj_\2", name)][match[1]] = tensor
        else:
            fused[name] = tensor
    for name, found in parts.items():
        if len(found) < 3:
            raise WeightsError(f"{name} needs q_proj, k_proj and v_proj, the weights hold only {', '.join(sorted(found))}")
        fused[name] = torch.cat([found[part] for part in "qkv"])
    return fused
