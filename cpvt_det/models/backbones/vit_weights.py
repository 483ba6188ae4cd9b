# SPDX-License-Identifier: Apache-2.0
"""Load weights of DeiT, of TNT and of our classifiers into a :class:`VisionTransformer`, by renaming tensors."""

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from cpvt_det.common.errors import WeightsError
from cpvt_det.models.backbones.contract import load_all

logger = logging.getLogger("cpvt_det")
TABLE = re.compile(r"^position\.(additive\.)?table$")
DEIT = r"^blocks\.0\.attn\.qkv\.weight$"
"""Pattern of a tensor name that occurs in the weights of facebookresearch/deit and timm, but not in ours."""
_DEIT_NAMES = (
    (r"^patch_embed\.proj\.", "patch_embed."),
    (r"^blocks\.", "encoder.layers."),
    (r"\.attn\.qkv\.", ".self_attn.in_proj_"),  # the rows have the same order: queries, keys, values, and within each, head by head
    (r"\.attn\.proj\.", ".self_attn.out_proj."),
    (r"\.mlp\.fc([12])\.", r".linear\1."),
    (r"^norm\.", "encoder.norm."),
)
TNT = r"^blocks\.0\.(attn_in|inner_attn)\.qk\.weight$"
"""Pattern of a tensor name that occurs in the weights of TNT, but not in ours."""
_TNT_AUTHORS = (
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
_TNT_TIMM = (
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


def convert_deit(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights of DeiT, distilled or not, to the names of our classifiers, under ``backbone.``, ``class_embed.`` and
    ``distilled_embed.``.

    Args:
        state_dict: tensors with the names of facebookresearch/deit, which timm also uses.

    Raises:
        WeightsError: the table is not square, or the names are not DeiT's.
    """
    others = dict(state_dict)
    try:
        special = torch.cat([others.pop(name)[0] for name in ("cls_token", "dist_token") if name in others])
        rows = others.pop("pos_embed")[0]
    except (KeyError, IndexError, RuntimeError, ValueError) as error:
        raise WeightsError("these are not weights of DeiT: they have no cls_token (1, 1, C) and pos_embed (1, N, C)") from error
    return {**split_table(special, rows), **{rename(name, _DEIT_NAMES): tensor for name, tensor in others.items()}}


def convert_tnt(state_dict: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Convert weights of a TNT to the names of our classifiers, under ``backbone.`` and ``class_embed.``.

    Args:
        state_dict: tensors with the names of timm or of huawei-noah/Efficient-AI-Backbones.

    Raises:
        WeightsError: the table is not square, or the names are not TNT's.
    """
    others = {}
    for name, tensor in state_dict.items():
        for pattern, replacement in _TNT_AUTHORS:
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
    found |= {rename(name, _TNT_TIMM): tensor for name, tensor in others.items()}
    for name in [name for name in found if name.endswith(".qk.weight")]:
        parts = (found.pop(name), found.pop(name.replace(".qk.", ".v.")))
        found[name.replace(".qk.weight", ".in_proj_weight")] = torch.cat(parts)
    return found


def split_table(special: Tensor, rows: Tensor) -> dict[str, Tensor]:
    """Put special tokens (T, C) and the parts of a table (T + H * W, C) under their names in our models. The grid of the table
    must be square.

    Raises:
        WeightsError: the grid of the table is not square.
    """
    side = math.isqrt(len(rows) - len(special))
    if side * side != len(rows) - len(special):
        raise WeightsError(
            f"the table has {len(rows)} rows; without the {len(special)} of extra tokens, their number is not a square, so the "
            "grid is unknown"
            + ("; with them it is, as in DeiT III, which is a different network" if math.isqrt(len(rows)) ** 2 == len(rows) else "")
        )
    table = rows[len(special) :].unflatten(0, (side, side)).permute(2, 0, 1)  # (H * W, C) -> (C, H, W)
    return {
        "backbone.special_tokens": special,
        "backbone.special_positions": rows[: len(special)],
        "backbone.position.table": table.contiguous(),
    }


def rename(name: str, renames: Sequence[tuple[str, str]]) -> str:
    """Turn a tensor's name into our name for it: apply (pattern, replacement) pairs in order, rename heads, and put everything
    else in the backbone.
    """
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    for theirs, ours in (("head.", "class_embed."), ("head_dist.", "distilled_embed.")):
        if name.startswith(theirs):
            return ours + name.removeprefix(theirs)
    return f"backbone.{name}"


def load_vit(
    backbone: nn.Module,
    weights: str,
    read: Callable[[str], Mapping[str, Tensor]],
    convert: Callable[[Mapping[str, Tensor]], dict[str, Tensor]] = convert_deit,
    marker: str = DEIT,
) -> None:
    """Load a file into a backbone, as described in :meth:`VisionTransformer.load_pretrained`.

    Args:
        backbone: a vision transformer.
        weights: path of the file.
        read: function that reads a file's state dict.
        convert: function that renames weights of other projects to our names.
        marker: pattern of a tensor name that occurs only in weights of other projects.

    Raises:
        WeightsError: the file does not exist, the weights belong to a different network, or the table has a different grid.
    """
    if not Path(weights).expanduser().is_file():
        raise WeightsError(f"MODEL.BACKBONE.WEIGHTS of a vision transformer is a file of weights, got {weights!r}")
    state_dict = read(weights)
    if any(re.search(marker, name) for name in state_dict):
        state_dict = convert(state_dict)
    found = {name.removeprefix("backbone."): tensor for name, tensor in state_dict.items() if name.startswith("backbone.")}
    if not found:
        raise WeightsError(
            f"{weights} has no weights of this backbone, under our names, its authors' or timm's; its first tensor is "
            f"{next(iter(state_dict), 'missing')}"
        )
    own = backbone.state_dict()
    table = next(filter(TABLE.match, own), None)
    found = {table if table and TABLE.match(name) else name: tensor for name, tensor in found.items()}
    dropped = [name for name in found if name not in own and (TABLE.match(name) or name.startswith("special_"))]
    kept = [name for name in own if name not in found and name.startswith("position.") and name != table]
    if table in found and found[table].shape[1:] != own[table].shape[1:]:
        raise WeightsError(
            f"{weights} has a table of {_grid(found[table])} cells, the backbone's has {_grid(own[table])}: set "
            f"MODEL.BACKBONE.POSITION.GRID to {tuple(found[table].shape[1:])}; images may still have other sizes"
        )
    load_all(backbone, {**found, **{name: own[name] for name in kept}}, f"{weights} does not fit the backbone", spare=dropped)
    for names, what in ((dropped, "left out"), (kept, "not in the file; they keep their initial values")):
        if names:
            logger.info("%s: %s %s", weights, ", ".join(names), what)


def _grid(table: Tensor) -> str:
    return " x ".join(map(str, table.shape[1:]))
