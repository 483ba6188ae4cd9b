# SPDX-License-Identifier: Apache-2.0
"""Vision transformers of timm (DeiT III, DINOv2, DINOv3, EVA-02 and others), changed so that features do not depend on the padding.

Place in the pipeline: the first step of ``models/detector.py``.
"""

import math
from collections.abc import Callable, Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.errors import first_line
from cpvt_det.common.exporting import is_exporting
from cpvt_det.common.structures import has_padding, level_padding_mask
from cpvt_det.layers.checkpointing import recomputed
from cpvt_det.models.backbones.timm_networks import load_weights, pixel_statistics, timm_with
from cpvt_det.position.learned import stretch


class TimmTransformer(nn.Module):
    """A vision transformer of timm that returns one map with the patches' stride. Its parts, in ``body``, have timm's names.

    Patches under the padding are masked as keys. A position table is interpolated to each image's own grid, whereas timm
    interpolates it to the grid of the batch. Rotary positions also use the image's own grid. As a result, an image's tokens do not
    depend on the rest of its batch.

    Args:
        name: timm's name, with or without the tag of its weights, such as ``vit_small_patch14_dinov2.lvd142m``.
        stages: stage n of the only map, as (n,), where 2 ** n is the power of 2 nearest to the stride. For patches of 14 or 16
            pixels, this is (4,).
        freeze_at: if this is at least the map's stage, all weights are frozen; otherwise, all weights are trained.
        mask_padding: whether the padding is kept out of the features; ``False`` treats the whole canvas as the image, as timm does.
        checkpointing: whether to recompute blocks in the backward pass instead of storing their activations.

    Attributes:
        pixel_mean, pixel_std: means and standard deviations of R, G and B, from 0 to 255, for the weights of this name.

    Raises:
        ConfigError: timm is not installed.
        UnknownNameError: a name that timm does not have.
        ValueError: the stages do not exist, ``freeze_at`` is negative, or the stem does more than cut the image into patches.

    Source: arXiv 2010.11929 (ViT); the network is timm's.
    """

    def __init__(
        self, name: str, stages: Sequence[int] = (4,), freeze_at: int = 2, mask_padding: bool = True, checkpointing: bool = False
    ):
        super().__init__()
        if freeze_at < 0:
            raise ValueError(f"freeze_at must be at least 0 (train all), got {freeze_at}")
        timm = timm_with(name)
        try:
            self.body: nn.Module = timm.create_model(name, dynamic_img_size=True)
            self.body.prune_intermediate_layers(prune_head=True)
        except Exception as error:  # exceptions of timm's constructors have no common base class
            raise ValueError(f"timm/{name} does not accept images of any size: {first_line(error)}") from error
        if type(self.body.patch_embed) is not timm.layers.PatchEmbed:
            stem = type(self.body.patch_embed).__name__
            raise ValueError(f"timm/{name} has a stem that does not keep the padding out: {stem}; choose another network")
        stride = max(self.body.patch_embed.patch_size)
        stage = round(math.log2(stride))
        if list(stages) != [stage]:
            raise ValueError(
                f"timm/{name} has one map, of stride {stride}: its stages are ({stage},), got {tuple(stages)}; set "
                f"MODEL.BACKBONE.STAGES to ({stage},), and for more levels MODEL.NECK.NAME to simple_pyramid"
            )
        self.name, self.mask_padding, self.checkpointing = name, mask_padding, checkpointing
        self.strides, self.channels, self.size_divisibility = [stride], [self.body.embed_dim], stride
        self.pixel_mean, self.pixel_std = pixel_statistics(self.body)
        self._is_frozen = freeze_at >= stage
        self.body.requires_grad_(not self._is_frozen)
        self.train(self.training)

    def load_pretrained(self, weights: str, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Load weights, as :func:`cpvt_det.models.backbones.timm_networks.load_weights` does."""
        load_weights(self.body, self.name, weights, read)

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[Tensor]:
        """Extract features.

        Args:
            images: (B, 3, H, W) float, normalised, zero under the padding.
            padding_mask: (B, H, W) bool, True = padded.

        Returns:
            One map, (B, C, ceil(H / stride), ceil(W / stride)) float, after the last norm.
        """
        body, stride = self.body, self.strides[0]
        below, right = (-side % stride for side in images.shape[2:])
        if below or right:
            images = F.pad(images, (0, right, 0, below))
        mask = level_padding_mask(padding_mask, stride)
        mask = mask if self.mask_padding else torch.zeros_like(mask)
        patches = body.patch_embed(images)  # (B, H, W, C)
        tokens = body.norm_pre(body.pos_drop(self._with_table(patches, mask)))
        count = tokens.shape[1] - mask[0].numel()  # class token and registers, which come first
        options = {"attn_mask": F.pad(~mask.flatten(1), (count, 0), value=True)[:, None, None] if has_padding(mask) else None}
        rotations = self._rotations(mask) if getattr(body, "rope", None) is not None else None
        for index, block in enumerate(body.blocks):
            if rotations is not None:
                options = {**options, "rope": rotations[index] if body.rope_mixed else rotations}
            tokens = recomputed(_run_block, block, tokens, options) if self.checkpointing else block(tokens, **options)
        grid = body.norm(tokens)[:, count:].unflatten(1, mask.shape[1:])
        return [grid.permute(0, 3, 1, 2)]  # (B, H, W, C) -> (B, C, H, W)

    def train(self, mode: bool = True) -> "TimmTransformer":
        """Set the mode; a frozen network stays in evaluation mode."""
        super().train(mode and not self._is_frozen)
        self.training = mode
        return self

    def layers_above(self, name: str) -> int:
        """Count the blocks after a parameter: 0 for the last norm, 1 for the last block, the number of blocks + 1 for the stem."""
        total, parts = len(self.body.blocks), name.split(".")
        if parts[:2] == ["body", "blocks"]:
            return total - int(parts[2])
        return 0 if parts[:2] == ["body", "norm"] else total + 1

    def _with_table(self, patches: Tensor, mask: Tensor) -> Tensor:
        """Patches (B, H, W, C) -> tokens (B, N, C): class token and registers, then the patches, with the table of positions."""
        body, first = self.body, [token for token in (self.body.cls_token, self.body.reg_token) if token is not None]
        first = [token.expand(len(patches), -1, -1).to(patches.dtype) for token in first]
        if body.pos_embed is None:
            return torch.cat((*first, patches.flatten(1, 2)), dim=1)
        count = 0 if body.no_embed_class else sum(token.shape[1] for token in first)
        table = body.pos_embed[0, count:].unflatten(0, body.patch_embed.grid_size)
        positions = stretch(table.permute(2, 0, 1), mask, antialias=True).permute(0, 2, 3, 1)  # (B, C, H, W) -> (B, H, W, C)
        tokens = [*first, (patches + positions.to(patches.dtype)).flatten(1, 2)]
        if count:
            starts = body.pos_embed[:, :count].to(patches.dtype).split([token.shape[1] for token in first], dim=1)
            tokens[:-1] = [token + start for token, start in zip(first, starts, strict=True)]
        return torch.cat(tokens, dim=1)

    def _rotations(self, mask: Tensor) -> Tensor:
        """Rotary positions on each image's own grid: (B, 1, N, D), or (layers, B, heads, N, D) if positions differ by layer and
        head.
        """
        if is_exporting():
            raise ValueError(
                f"timm/{self.name} cannot be exported: timm computes its rotary positions only for grids that are known in advance"
            )
        height, width = mask.shape[1:]
        valid = ~mask
        sizes = torch.stack((valid.any(2).sum(1), valid.any(1).sum(1)), dim=1).clamp(min=1).tolist()
        made = {}
        for rows, columns in {tuple(size) for size in sizes}:
            own = self.body.rope.get_embed(shape=[rows, columns]).unflatten(-2, (rows, columns))
            made[rows, columns] = F.pad(own, (0, 0, 0, width - columns, 0, height - rows)).flatten(-3, -2)
        each = [made[tuple(size)] for size in sizes]
        return torch.stack(each, dim=1) if self.body.rope_mixed else torch.stack(each)[:, None]


def _run_block(block: nn.Module, tokens: Tensor, options: Mapping[str, Tensor | None]) -> Tensor:
    return block(tokens, **options)
