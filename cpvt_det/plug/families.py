# SPDX-License-Identifier: Apache-2.0
"""The models that ``add_peg`` knows, with the places of their layers, tokens, grid and padding mask.

A family is described by attributes, and by a few methods where these are not enough. Classes are matched by name, so that no
library is imported.
"""

import operator
from collections.abc import Mapping
from numbers import Integral
from typing import Any

import torch
from torch import Tensor, nn

from cpvt_det.common.structures import Size
from cpvt_det.plug.hooks import AttributeOverride, GridAndMask, PlugError, ZeroArgument, zero_output


class Family:
    """A family of models. The defaults describe a ViT: layers with (B, N, C) tokens and no mask, whose calls have the grid among
    the arguments."""

    name: str
    classes: tuple[str, ...]
    """Endings of the full names of the classes that own the layers."""
    blocks = "blocks"
    """Path of the layers below the owner."""
    layout = "BNC"
    output: int | None = None
    """Index of the tokens in a layer's output; ``None`` if the output is the tokens."""
    grid_source: tuple[str, str] | None = None
    """Path, below the owner, of the module that receives grid and mask, which are read "before" or "after" its call."""
    mask_meaning: str | None = None
    """Meaning that the family's mask must have, for messages; ``None`` if there is no mask."""
    needs_grid = False
    channels_path: str | None = None
    """Path, below the owner, of the number of channels; ``None`` if the norm of each layer tells it."""
    level_embed: str | None = None
    """Name of the parameter (L, C) with an embedding of each level; ``None`` for a single level."""
    prefix: int | str = 0
    """Number of class and register tokens before the tokens of the grid, or its path below the owner."""
    windows: int | str = 1
    """Number of windows per side, or its path below the owner, for layers that treat each window as an element of the batch."""
    swaps_windows = False
    """Whether the model swaps height and width of its windows."""

    def layers(self, owner: nn.Module) -> dict[str, nn.Module]:
        """The layers by name, in the order in which they run."""
        return {f"{self.blocks}.{name}": layer for name, layer in owner.get_submodule(self.blocks).named_children()}

    def channels(self, owner: nn.Module, name: str, layer: nn.Module) -> int:
        return attribute_of(owner, self.channels_path) if self.channels_path else layer.norm2.normalized_shape[0]

    def levels(self, owner: nn.Module) -> int | None:
        """Number of levels of a multi-level encoder; ``None`` for a single level."""
        return None if self.level_embed is None else len(attribute_of(owner, self.level_embed))

    def layout_of(self, owner: nn.Module) -> str:
        return self.layout

    def grid_and_mask(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> GridAndMask:
        """Grid and mask from a call of ``grid_source`` or, without one, from a call of the layer with its tokens as ``output``."""
        return [tuple(output.shape[1:3] if self.layout == "BHWC" else output.shape[2:4])], None

    def replace(self, owner: nn.Module) -> list[Any]:
        """Remove the encoder's own encoding; return objects whose ``remove()`` restores it, or an empty list if there is none."""
        if getattr(owner, "pos_embed", None) is None:
            return []
        value = torch.zeros_like(owner.pos_embed) if hasattr(owner, "dist_token") else None  # timm's distilled DeiT adds it always
        return [AttributeOverride(owner, "pos_embed", value)]


def attribute_of(owner: nn.Module, value: int | str) -> Any:
    """The attribute of a module at a path such as ``config.d_model``; a number is returned unchanged."""
    return operator.attrgetter(value)(owner) if isinstance(value, str) else value


def _argument(args: tuple, kwargs: Mapping[str, Any], index: int, *names: str) -> Any:
    named = [kwargs[name] for name in names if name in kwargs]
    return named[0] if named else args[index] if len(args) > index else None


def _padded(mask: Tensor | None, valid: bool = False) -> Tensor | None:
    """The mask with True = padded; ``valid`` says that the given mask has True = valid instead."""
    if mask is not None and mask.dtype != torch.bool:
        raise PlugError(f"the padding mask must be bool, got {mask.dtype}, whose values have no defined meaning")
    return ~mask if valid and mask is not None else mask


def checked_grid(grid: Any) -> Size:
    """A grid (H, W) as two integers.

    Raises:
        PlugError: anything but two whole numbers above 0.
    """
    sides = tuple(grid) if isinstance(grid, (tuple, list)) else ()
    if len(sides) != 2 or not all(isinstance(side, Integral) and not isinstance(side, bool) and side > 0 for side in sides):
        raise PlugError(f"grid must be (H, W), two whole numbers above 0, got {grid!r}")
    return int(sides[0]), int(sides[1])


class DetectronViT(Family):
    name = "detectron2 ViT, MViTv2"
    classes = ("detectron2.modeling.backbone.vit.ViT", "detectron2.modeling.backbone.mvit.MViT")
    layout = "BHWC"


class DetectronSwin(Family):
    name = "detectron2 Swin"
    classes = ("detectron2.modeling.backbone.swin.SwinTransformer",)

    def layers(self, owner: nn.Module) -> dict[str, nn.Module]:
        stages = ((s, stage.blocks) for s, stage in enumerate(owner.layers))
        return {f"layers.{s}.blocks.{i}": block for s, blocks in stages for i, block in enumerate(blocks)}

    def grid_and_mask(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> GridAndMask:
        return [(module.H, module.W)], None  # the mask that the block receives is that of the shifted windows

    def replace(self, owner: nn.Module) -> list[Any]:
        return [AttributeOverride(owner, "absolute_pos_embed", owner.absolute_pos_embed.new_zeros(1, 1, 1, 1))] if owner.ape else []


class DetectronBackbone(Family):
    """Any backbone of detectron2; of these, ``add_peg`` takes FPN. PEGs act on chosen maps of its output and are in one dict at
    ``backbone.peg``."""

    name = "detectron2 backbone"
    classes = ("detectron2.modeling.backbone.fpn.FPN",)
    layout = "BCHW"

    def layers(self, owner: nn.Module) -> dict[str, nn.Module]:
        return dict.fromkeys(owner.output_shape(), owner)

    def channels(self, owner: nn.Module, name: str, layer: nn.Module) -> int:
        return owner.output_shape()[name].channels


class DETR(Family):
    """The transformer receives the map, the mask (B, H, W) and the encoding; its encoder runs on (N, B, C)."""

    name = "facebookresearch/detr"
    classes = ("models.transformer.Transformer",)
    blocks = "encoder.layers"
    layout = "NBC"
    grid_source = ("", "before")
    mask_meaning = "True must mean padded"
    channels_path = "d_model"
    encoding = ("pos", 3)
    """Name and index of the argument of the encoder that contains the encoding."""

    def grid_and_mask(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> GridAndMask:
        features, mask = _argument(args, kwargs, 0, "src", "x"), _argument(args, kwargs, 1, "mask")
        return [tuple(features.shape[-2:])], None if mask is None else _padded(mask).flatten(1)

    def replace(self, owner: nn.Module) -> list[Any]:
        return [owner.encoder.register_forward_pre_hook(ZeroArgument(*self.encoding), with_kwargs=True)]


class DetrexDETR(DETR):
    name = "detrex DETR, DAB-DETR"
    classes = ("detr.modeling.transformer.DetrTransformer", "dab_detr.modeling.dab_transformer.DabDetrTransformer")
    channels_path = "embed_dim"
    encoding = ("query_pos", 3)


class DeformableDETR(Family):
    """The transformer receives one map, mask and encoding per level; its encoder runs on the tokens of all levels in a row."""

    name = "fundamentalvision/Deformable-DETR"
    classes = ("models.deformable_transformer.DeformableTransformer",)
    blocks = "encoder.layers"
    grid_source = ("", "before")
    mask_meaning = "True must mean padded"
    features, masks, encodings, level_embed = "srcs", "masks", "pos_embeds", "level_embed"

    def channels(self, owner: nn.Module, name: str, layer: nn.Module) -> int:
        return attribute_of(owner, self.level_embed).shape[1]

    def grid_and_mask(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> GridAndMask:
        shapes = [tuple(level.shape[-2:]) for level in _argument(args, kwargs, 0, self.features)]
        masks = [_padded(mask).flatten(1) for mask in _argument(args, kwargs, 1, self.masks)]
        return shapes, torch.cat(masks, dim=1)

    def replace(self, owner: nn.Module) -> list[Any]:
        return [owner.register_forward_pre_hook(ZeroArgument(self.encodings, 2), with_kwargs=True)]


class DetrexDeformableDETR(DeformableDETR):
    name = "detrex Deformable-DETR, DAB-Deformable-DETR, DINO"
    classes = (
        "deformable_detr.modeling.deformable_transformer.DeformableDetrTransformer",
        "dab_deformable_detr.modeling.dab_deformable_transformer.DabDeformableDetrTransformer",
        "dino.modeling.dino_transformer.DINOTransformer",
    )
    features, masks, encodings = "multi_level_feats", "multi_level_masks", "multi_level_pos_embeds"
    level_embed = "level_embeds"


class HuggingFaceDETR(DETR):
    """A layer receives only the attention mask, (B, 1, N, N) or none, but the position embedding receives the map's shape and
    mask."""

    name = "transformers DETR"
    classes = ("transformers.models.detr.modeling_detr.DetrModel",)
    layout = "BNC"
    grid_source = ("position_embedding", "before")
    mask_meaning = "pixel_mask must be 1 on the image and 0 on the padding"
    channels_path = "config.d_model"
    encoding = ("spatial_position_embeddings", 2)

    def grid_and_mask(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> GridAndMask:
        shape, mask = _argument(args, kwargs, 0, "shape"), _argument(args, kwargs, 3, "mask")
        return [tuple(shape[-2:])], None if mask is None else _padded(mask, valid=True).flatten(1)


class HuggingFaceDeformableDETR(HuggingFaceDETR):
    name = "transformers Deformable-DETR"
    classes = ("transformers.models.deformable_detr.modeling_deformable_detr.DeformableDetrModel",)
    grid_source = None
    level_embed = "level_embed"

    def grid_and_mask(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> GridAndMask:
        shapes = _argument(args, kwargs, 5, "spatial_shapes_list")  # Python numbers: no wait for the GPU
        return [tuple(shape) for shape in shapes], _padded(_argument(args, kwargs, 1, "attention_mask"), valid=True)

    def replace(self, owner: nn.Module) -> list[Any]:
        return [owner.position_embedding.register_forward_hook(zero_output)]


class HuggingFaceRTDETR(Family):
    name = "transformers RT-DETR, D-FINE, DEIMv2"
    classes = (
        "transformers.models.rt_detr.modeling_rt_detr.RTDetrHybridEncoder",
        "transformers.models.rt_detr_v2.modeling_rt_detr_v2.RTDetrV2HybridEncoder",
        "transformers.models.d_fine.modeling_d_fine.DFineHybridEncoder",
        "transformers.models.deimv2.modeling_deimv2.Deimv2HybridEncoder",
    )
    blocks = "aifi"
    layout = "BCHW"
    channels_path = "encoder_hidden_dim"

    def replace(self, owner: nn.Module) -> list[Any]:
        return [layer.position_embedding.register_forward_hook(zero_output) for layer in owner.aifi]


class HuggingFaceLWDETR(Family):
    """A ViT whose layers run on windows of the grid."""

    name = "transformers LW-DETR"
    classes = ("transformers.models.lw_detr.modeling_lw_detr.LwDetrViTBackbone",)
    blocks = "encoder.layer"
    grid_source = ("embeddings", "after")
    channels_path = "config.hidden_size"
    windows = "config.num_windows_side"

    def replace(self, owner: nn.Module) -> list[Any]:
        table = owner.embeddings.position_embeddings
        return [] if table is None else [AttributeOverride(owner.embeddings, "position_embeddings", None)]


class HuggingFaceRFDETR(HuggingFaceLWDETR):
    """Each window has a class token. On a grid that is not square, the model itself swaps height and width of its windows."""

    name = "transformers RF-DETR"
    classes = ("transformers.models.rf_detr.modeling_rf_detr.RfDetrDinov2Backbone",)
    prefix = 1
    windows = "config.num_windows"
    swaps_windows = True

    def grid_and_mask(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> GridAndMask:
        height, width = _argument(args, kwargs, 0, "pixel_values").shape[-2:]
        return [(height // module.patch_size, width // module.patch_size)], None

    def replace(self, owner: nn.Module) -> list[Any]:
        table = owner.embeddings.position_embeddings
        return [AttributeOverride(owner.embeddings, "position_embeddings", torch.zeros_like(table))]


class TimmViT(Family):
    name = "timm VisionTransformer"
    classes = ("timm.models.vision_transformer.VisionTransformer",)
    grid_source = ("patch_embed", "after")
    channels_path = "embed_dim"
    prefix = "num_prefix_tokens"

    def grid_and_mask(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> GridAndMask:
        return [tuple(module.dynamic_feat_size(args[0].shape[-2:]))], None


class TimmTNT(TimmViT):
    name = "timm TNT"
    classes = ("timm.models.tnt.TNT",)
    output = 1
    grid_source = ("pixel_embed", "after")

    def replace(self, owner: nn.Module) -> list[Any]:
        return [AttributeOverride(owner, "patch_pos", owner.patch_pos.new_zeros(1, 1, 1))]


class TorchvisionViT(Family):
    name = "torchvision VisionTransformer"
    classes = ("torchvision.models.vision_transformer.VisionTransformer",)
    blocks = "encoder.layers"
    grid_source = ("conv_proj", "after")
    channels_path = "hidden_dim"
    prefix = 1

    def replace(self, owner: nn.Module) -> list[Any]:
        return [AttributeOverride(owner.encoder, "pos_embedding", owner.encoder.pos_embedding.new_zeros(1, 1, 1))]


class TorchEncoder(Family):
    """An encoder without a grid. ``encoder.peg_grid``, first set by ``add_peg``, is the grid of the tokens in the next call."""

    name = "torch.nn.TransformerEncoder"
    classes = ("torch.nn.modules.transformer.TransformerEncoder",)
    blocks = "layers"
    grid_source = ("", "before")
    mask_meaning = "src_key_padding_mask must be True on the padding"
    needs_grid = True
    channels_path = "layers.0.linear2.out_features"

    def layout_of(self, owner: nn.Module) -> str:
        return "BNC" if owner.layers[0].self_attn.batch_first else "NBC"

    def grid_and_mask(self, module: nn.Module, args: tuple, kwargs: Mapping[str, Any], output: Any) -> GridAndMask:
        return [checked_grid(module.peg_grid)], _padded(_argument(args, kwargs, 2, "src_key_padding_mask"))


FAMILIES: tuple[Family, ...] = (
    DetectronViT(),
    DetectronBackbone(),
    DETR(),
    DeformableDETR(),
    DetrexDETR(),
    DetrexDeformableDETR(),
    HuggingFaceDETR(),
    HuggingFaceDeformableDETR(),
    TimmViT(),
    TorchvisionViT(),
    TimmTNT(),
    HuggingFaceRTDETR(),
    HuggingFaceLWDETR(),
    HuggingFaceRFDETR(),
    TorchEncoder(),
    DetectronSwin(),
)


def find_owner(model: nn.Module) -> tuple[str, nn.Module, Family]:
    """The outermost module of a known class: its name in the model, the module, and its family.

    Raises:
        PlugError: no such module (the message lists the known ones), or several such modules side by side.
    """
    found: list[tuple[str, nn.Module, Family]] = []
    for name, module in model.named_modules():
        if any(outer == "" or name.startswith(outer + ".") for outer, _, _ in found):
            continue
        classes = [f".{base.__module__}.{base.__qualname__}" for base in type(module).__mro__]
        for family in FAMILIES:
            if any(full.endswith(f".{ending}") for full in classes for ending in family.classes):
                found.append((name, module, family))
                break
    if not found:
        known = "\n".join(f"- {family.name} ({', '.join(family.classes)})" for family in FAMILIES)
        raise PlugError(f"no place for PEG is known in {type(model).__name__}; the known models are\n{known}")
    if len(found) > 1:
        names = ", ".join(name for name, _, _ in found)
        raise PlugError(f"{type(model).__name__} has several places for PEG; pass one of these modules: {names}")
    return found[0]
