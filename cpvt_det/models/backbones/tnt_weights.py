# SPDX-License-Identifier: Apache-2.0
"""Convert weights of TNT, with timm's or the authors' names, to the names of our classifiers."""

import math
import re
from collections.abc import Mapping

import torch
from torch import Tensor

from cpvt_det.common.errors import WeightsError
from cpvt_det.models.backbones.vit_weights import rename, split_table

TNT = r"^blocks\.0\.(attn_in|inner_attn)\.qk\.weight$"
"""Pattern of a tensor name that occurs in the weights of TNT, but not in ours."""
_AUTHORS = (
    (r"^outer_pos$", "patch_pos"),
    (r"^inner_pos$", "pixel_pos"),
    (r"^patch_embed\.", "pixel_embed."),
    (r"(^|\.)proj_norm([12])\.", r"\1norm\2_proj."),
    (r"\.inner_norm1\.", ".norm_in."),
    (r"\.inner_norm2\.", ".norm_mlp_in."),
    (r"\.inner_(attn|mlp)\.", r".\1_in."),
    (r"\.outer_norm1\.", ".norm_out."),
    (r"\.outer_norm2\.", ".norm_mlp."),
    (r"\.outer_attn\.", ".attn_out."),
    (r"\.outer_mlp\.", ".mlp."),
)
_TIMM = (
    (r"^pixel_embed\.proj\.", "pixel_embed."),
    (r"^norm\.", "encoder.norm."),
    (r"^blocks\.", "encoder.layers."),
    (r"(^|\.)norm([12])_proj\.", r"\1project.norm\2."),
    (r"(^|encoder\.layers\.\d+\.)proj\.", r"\1project.linear."),
    (r"\.norm_in\.", ".inner.norm1."),
    (r"\.norm_mlp_in\.", ".inner.norm2."),
    (r"\.norm_out\.", ".outer.norm1."),
    (r"\.norm_mlp\.", ".outer.norm2."),
    (r"\.mlp_in\.fc", ".inner.linear"),
    (r"\.mlp\.fc", ".outer.linear"),
    (r"\.attn_in\.", ".inner.self_attn."),
    (r"\.attn_out\.", ".outer.self_attn."),
    (r"\.self_attn\.proj\.", ".self_attn.out_proj."),
    (r"\.se_layer\.fc\.", ".outer.squeeze."),
)
UNUSED = "outer_tokens"  # is in the authors' files, but their model never reads it


def convert_tnt(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights of a TNT to the names of our classifiers, under ``backbone.`` and ``class_embed.``.

    Args:
        state_dict: tensors with the names of timm or of huawei-noah/Efficient-AI-Backbones.

    Raises:
        WeightsError: the table is not square, or the names are not TNT's.
    """
    others = {}
    for name, tensor in state_dict.items():
        for pattern, replacement in _AUTHORS:
            name = re.sub(pattern, replacement, name)
        others[name] = tensor
    others.pop(UNUSED, None)
    try:
        special, rows, pixels = (others.pop(name)[0] for name in ("cls_token", "patch_pos", "pixel_pos"))
    except KeyError as error:
        raise WeightsError(f"these are not weights of TNT: they have no {error.args[0]}") from error
    if pixels.dim() == 2:  # the authors': (pixels, C') -> (C', height, width)
        side = math.isqrt(len(pixels))
        pixels = pixels.T.unflatten(1, (side, side))
    found = {**split_table(special, rows), "backbone.pixel_table": pixels.contiguous()}
    found |= {rename(name, _TIMM): tensor for name, tensor in others.items()}
    for name in [name for name in found if name.endswith(".qk.weight")]:
        parts = (found.pop(name), found.pop(name.replace(".qk.", ".v.")))
        found[name.replace(".qk.weight", ".in_proj_weight")] = torch.cat(parts)
    return found
