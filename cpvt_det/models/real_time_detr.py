# SPDX-License-Identifier: Apache-2.0
"""RT-DETR and D-FINE: a hybrid encoder, queries from the encoder's best proposals, and a decoder that refines their boxes.

The hybrid encoder has attention within the coarsest level and convolutions across levels; D-FINE has a lighter version of it.
Padded cells are set to zero where a convolution looks across cells, and norms leave padded cells out.

Place in the pipeline: the parts that ``models/detector.py`` calls.

Source: arXiv 2304.08069, section 4.2; arXiv 2410.13842, section 4.3; names of parameters as in lyuwenyu/RT-DETR and
Peterande/D-FINE.
"""

import itertools
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common import defaults
from cpvt_det.common.errors import UnknownNameError
from cpvt_det.common.structures import Levels, flatten_levels, has_padding, level_padding_mask
from cpvt_det.layers.heads import box_head, class_head, full_precision
from cpvt_det.layers.norm import MaskedBatchNorm2d, NoNorm, fold_norm, folded, make_norm
from cpvt_det.models.box_queries import MixedQueries
from cpvt_det.models.detector import Detector, Memory
from cpvt_det.models.encoder import Encoder
from cpvt_det.models.image_model import require_contract
from cpvt_det.models.necks import NECK_REGISTRY
from cpvt_det.position.encoding import PositionEncoding


class ConvNorm(nn.Module):
    """A convolution without a bias, a norm over the valid cells, and optionally SiLU.

    Args:
        inputs, outputs: channels before and after.
        kernel_size: k, odd.
        norm: name of the norm, as in :func:`cpvt_det.layers.norm.make_norm`.
        stride: stride of the convolution.
        groups: groups of channels of the convolution.
        activates: whether SiLU follows the norm.
    """

    def __init__(
        self, inputs: int, outputs: int, kernel_size: int, norm: str, stride: int = 1, groups: int = 1, activates: bool = True
    ):
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size, stride, kernel_size // 2, groups=groups, bias=False)
        self.norm = make_norm(norm, outputs)
        self.act = nn.SiLU() if activates else nn.Identity()

    def forward(self, x: Tensor, valid: Tensor | None, after: Tensor | None = None) -> Tensor:
        """Convolve.

        Args:
            x: (B, C, H, W) float; values under the padding do not matter.
            valid: (B, 1, H, W) bool, True = valid; ``None`` if nothing is padded.
            after: mask of the output's cells, in the form of ``valid``, for a stride above 1. It is a separate argument because a
                level may have padding even if the next level has none.
        """
        if valid is not None and max(self.conv.kernel_size) > 1:
            x = x.masked_fill(~valid, 0)
        return self.act(self.norm(self.conv(x), valid if self.conv.stride == (1, 1) else after))

    def fold(self) -> None:
        """Merge a batch norm into the convolution, in place, for inference; outputs change only by rounding."""
        if isinstance(self.norm, MaskedBatchNorm2d):
            fold_norm(self.conv, self.norm)
            self.norm = NoNorm()


class RepVGGBlock(nn.Module):
    """The sum of a 3x3 and a 1x1 convolution, each with its own norm, followed by SiLU (arXiv 2101.03697).

    Args:
        channels: C.
        norm: as in :class:`ConvNorm`.
    """

    def __init__(self, channels: int, norm: str):
        super().__init__()
        self.conv1 = ConvNorm(channels, channels, 3, norm, activates=False)
        self.conv2 = ConvNorm(channels, channels, 1, norm, activates=False)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """(B, C, H, W) -> the same; ``valid`` as in :class:`ConvNorm`."""
        x = self.conv1(x, valid) if self.conv2 is None else self.conv1(x, valid) + self.conv2(x, valid)
        return F.silu(x)

    def merged(self) -> tuple[Tensor, Tensor]:
        """Weight and bias of one 3x3 convolution that replaces both convolutions, with their batch norms folded in."""
        (weight, bias), (pointwise, shift) = (folded(branch.conv, branch.norm) for branch in (self.conv1, self.conv2))
        return weight + F.pad(pointwise, (1, 1, 1, 1)), bias + shift

    @torch.no_grad()
    def fold(self) -> None:
        """Merge the norms and the 1x1 convolution into the 3x3 convolution, in place, for inference.

        Outputs of valid cells change only by rounding. Outputs of padded cells may change, because a separate 1x1 convolution
        also sees the values under the padding.
        """
        if self.conv2 is None or not isinstance(self.conv2.norm, MaskedBatchNorm2d):
            return
        self.conv1.conv.weight, self.conv1.conv.bias = map(nn.Parameter, self.merged())
        self.conv1.norm, self.conv2 = NoNorm(), None


class CSPLayer(nn.Module):
    """The sum of two branches. Each branch begins with a 1x1 convolution, and one of them continues through blocks.

    Args:
        inputs, outputs: channels before and after.
        hidden: channels of the branches.
        num_blocks: number of :class:`RepVGGBlock` in one branch.
        norm: as in :class:`ConvNorm`.
    """

    def __init__(self, inputs: int, outputs: int, hidden: int, num_blocks: int, norm: str):
        super().__init__()
        self.conv1 = ConvNorm(inputs, hidden, 1, norm)
        self.conv2 = ConvNorm(inputs, hidden, 1, norm)
        self.bottlenecks = nn.ModuleList(RepVGGBlock(hidden, norm) for _ in range(num_blocks))
        self.conv3 = ConvNorm(hidden, outputs, 1, norm) if hidden != outputs else None

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """(B, C, H, W) -> (B, C', H, W); ``valid`` as in :class:`ConvNorm`."""
        deep = self.conv1(x, valid)
        for block in self.bottlenecks:
            deep = block(deep, valid)
        x = deep + self.conv2(x, valid)
        return x if self.conv3 is None else self.conv3(x, valid)


class ELANLayer(nn.Module):
    """D-FINE's fusion block. Half of the channels pass through two CSP layers in turn, and all intermediate results are
    concatenated.

    Args:
        inputs, outputs: channels before and after.
        hidden: channels of the CSP layers.
        num_blocks: number of blocks of each CSP layer.
        norm: as in :class:`ConvNorm`.
    """

    def __init__(self, inputs: int, outputs: int, hidden: int, num_blocks: int, norm: str):
        super().__init__()
        self.cv1 = ConvNorm(inputs, 2 * outputs, 1, norm)
        self.cv2, self.cv3 = (
            nn.ModuleList([CSPLayer(width, hidden, hidden, num_blocks, norm), ConvNorm(hidden, hidden, 3, norm)])
            for width in (outputs, hidden)
        )
        self.cv4 = ConvNorm(2 * outputs + 2 * hidden, outputs, 1, norm)

    def forward(self, x: Tensor, valid: Tensor | None) -> Tensor:
        """(B, C, H, W) -> (B, C', H, W); ``valid`` as in :class:`ConvNorm`."""
        made = list(self.cv1(x, valid).chunk(2, dim=1))
        for csp, convolution in (self.cv2, self.cv3):
            made.append(convolution(csp(made[-1], valid), valid))
        return self.cv4(torch.cat(made, dim=1), valid)


class SeparateDown(nn.Module):
    """D-FINE's step to the next coarser level: a 1x1 convolution, then a depthwise one of stride 2.

    Args:
        channels: C.
        norm: as in :class:`ConvNorm`.
    """

    def __init__(self, channels: int, norm: str):
        super().__init__()
        self.cv1 = ConvNorm(channels, channels, 1, norm, activates=False)
        self.cv2 = ConvNorm(channels, channels, 3, norm, stride=2, groups=channels, activates=False)

    def forward(self, x: Tensor, valid: Tensor | None, after: Tensor | None) -> Tensor:
        """(B, C, H, W) -> (B, C, H / 2, W / 2); masks as in :class:`ConvNorm`."""
        return self.cv2(self.cv1(x, valid), valid, after)


FUSIONS = ("csp", "elan")


class HybridEncoder(nn.Module):
    """Attention within the coarsest level (AIFI), then a top-down and a bottom-up path across levels.

    Args:
        num_levels: L; each level has half the height and width of the previous level.
        channels: channels of the features.
        outputs: C, channels of the tokens. 1x1 convolutions make the tokens if ``fusion`` is ``csp`` or if C differs from
            ``channels``.
        encoder: attention within the coarsest level, on ``channels`` channels.
        fusion: ``csp``, as in RT-DETR, or ``elan``, as in D-FINE.
        expansion: width of the fusion's inner layers, as a fraction of ``channels``.
        depth: blocks of each CSP layer.
        norm: ``BN``, ``SyncBN``, ``GN`` or ``none``; norms are over valid cells.

    Raises:
        UnknownNameError: an unknown fusion or norm.
        ValueError: no level, no block, or inner layers without a channel.
    """

    def __init__(
        self,
        num_levels: int,
        channels: int,
        outputs: int,
        encoder: Encoder,
        fusion: str = "csp",
        expansion: float = 1.0,
        depth: int = 3,
        norm: str = "BN",
    ):
        super().__init__()
        if fusion not in FUSIONS:
            raise UnknownNameError("fusion of the hybrid encoder", fusion, FUSIONS)
        is_light = fusion == "elan"
        hidden = round(expansion * channels // 2) if is_light else int(expansion * channels)
        if num_levels < 1 or depth < 1 or hidden < 1:
            raise ValueError(
                f"a hybrid encoder needs at least one level, one block and one inner channel, got {num_levels} levels, depth "
                f"{depth} and expansion {expansion} of {channels} channels"
            )
        self.encoder, self.num_levels = encoder, num_levels
        block, steps = ELANLayer if is_light else CSPLayer, range(num_levels - 1)
        self.lateral_convs = nn.ModuleList(ConvNorm(channels, channels, 1, norm, activates=not is_light) for _ in steps)
        self.fpn_blocks, self.pan_blocks = (
            nn.ModuleList(block(2 * channels, channels, hidden, depth, norm) for _ in steps) for _ in range(2)
        )
        self.downsample_convs = nn.ModuleList(
            SeparateDown(channels, norm) if is_light else ConvNorm(channels, channels, 3, norm, stride=2) for _ in steps
        )
        has_outputs = not is_light or outputs != channels
        self.output_proj = nn.ModuleList(
            ConvNorm(channels, outputs, 1, norm, activates=False) for _ in range(num_levels if has_outputs else 0)
        )

    @property
    def layers(self) -> nn.ModuleList:
        """The attention layers."""
        return self.encoder.layers

    def forward(self, features: Sequence[Tensor], levels: Levels, position: PositionEncoding) -> list[Tensor]:
        """Encode.

        Args:
            features: maps of the levels, (B, C', H_l, W_l) float each.
            levels: layout of their cells.
            position: encoding of the coarsest level's cells.

        Returns:
            A map (B, C, H_l, W_l) per level, zero under the padding.
        """
        valid = [~mask[:, None] if has_padding(mask) else None for mask in levels.masks]
        coarsest, mask, shape = features[-1], levels.masks[-1], levels.shapes[-1]
        additive = position([coarsest], [mask])
        positions = None if additive is None else flatten_levels(additive)
        tokens = self.encoder(flatten_levels([coarsest]), positions, mask.flatten(1), [shape], position)
        maps = [*features[:-1], tokens.transpose(1, 2).unflatten(2, shape)]  # (B, N, C') -> (B, C', H, W)
        last = len(maps) - 1
        for step, level in enumerate(range(last - 1, -1, -1)):
            maps[level + 1] = self.lateral_convs[step](maps[level + 1], valid[level + 1])
            height, width = maps[level].shape[2:]
            above = F.interpolate(maps[level + 1], scale_factor=2.0, mode="nearest")[:, :, :height, :width]
            maps[level] = self.fpn_blocks[step](torch.cat((above, maps[level]), dim=1), valid[level])
        for step in range(last):
            below = self.downsample_convs[step](maps[step], valid[step], valid[step + 1])
            maps[step + 1] = self.pan_blocks[step](torch.cat((below, maps[step + 1]), dim=1), valid[step + 1])
        if self.output_proj:
            maps = [project(x, here) for project, x, here in zip(self.output_proj, maps, valid, strict=True)]
        return [x if here is None else x.masked_fill(~here, 0) for x, here in zip(maps, valid, strict=True)]


class HybridTransformer(nn.Module):
    """A hybrid encoder and a decoder that meet the contract of :class:`cpvt_det.models.detr.Transformer`.

    Args:
        encoder: the hybrid encoder.
        decoder: decoder for tokens of several levels, such as :class:`cpvt_det.models.deformable_detr.DeformableDecoder`.
    """

    def __init__(self, encoder: HybridEncoder, decoder: nn.Module):
        super().__init__()
        self.encoder = encoder
        self.decoder = decoder
        for layer in decoder.layers:
            nn.init.xavier_uniform_(layer.linear1.weight)
            nn.init.xavier_uniform_(layer.linear2.weight)

    def encode(self, features: Sequence[Tensor], levels: Levels, position: PositionEncoding) -> Memory:
        """Encode; arguments as in :meth:`HybridEncoder.forward`."""
        tokens = flatten_levels(self.encoder(features, levels, position))
        return Memory(tokens, tokens)


@NECK_REGISTRY.register_as("normed")
class NormedNeck(nn.ModuleList):
    """RT-DETR's neck: a 1x1 convolution and a batch norm per backbone map. Each map has twice the stride of the previous map.

    Args:
        map_channels: channels of the backbone's maps, all of which are used.
        map_strides: strides of the backbone's maps.
        channels: C.
        norm: kind of the norms: BN, SyncBN, GN or none.

    Raises:
        ValueError: a stride is not twice the previous stride.
    """

    def __init__(self, map_channels: Sequence[int], map_strides: Sequence[int], channels: int, norm: str = "BN"):
        if any(2 * fine != coarse for fine, coarse in itertools.pairwise(map_strides)):
            raise ValueError(
                f"the hybrid encoder needs maps that each have twice the stride of the one before, got {list(map_strides)}; "
                "set MODEL.BACKBONE.STAGES to neighbouring stages, such as (3, 4, 5), without DC5"
            )
        super().__init__(ConvNorm(width, channels, 1, norm, activates=False) for width in map_channels)
        self.strides = list(map_strides)

    def forward(self, maps: Sequence[Tensor], padding_mask: Tensor) -> tuple[list[Tensor], Levels]:
        """Project the maps; arguments and result as in :data:`cpvt_det.models.necks.NECK_REGISTRY`."""
        masks = [level_padding_mask(padding_mask, stride) for stride in self.strides]
        features = []
        for project, x, mask in zip(self, maps, masks, strict=True):
            valid = ~mask[:, None] if has_padding(mask) else None
            x = x if valid is None else x.masked_fill(~valid, 0)  # a backbone may leave anything there
            x = project(x, valid)
            features.append(x if valid is None else x.masked_fill(~valid, 0))
        return features, Levels.from_masks(masks, full_precision(features[0]).dtype)


class RealTimeDETR(Detector):
    """RT-DETR, or D-FINE if the decoder refines distributions.

    Args:
        backbone: module that meets the contract of :data:`cpvt_det.models.backbones.BACKBONE_REGISTRY`; all its maps are used.
        position: encoding of the coarsest level's cells.
        transformer: hybrid encoder and decoder.
        neck: neck that makes features with the encoder's number of channels.
        channels: C, of the tokens and queries.
        num_queries: Q.
        num_logits: K', the number of logits that the classification needs for K classes.
        prior_probability: initial probability of every class.
        pixel_mean, pixel_std: mean and standard deviation per channel, in pixel values from 0 to 255.
        frozen: names of parts that are not trained, as in :meth:`Detector.freeze`.
        queries: query source. ``None`` for :class:`MixedQueries`, with contents and classes from the proposals' tokens.

    Raises:
        UnknownNameError: a name in ``frozen`` that matches no part.
        ValueError: there are no queries, or the encoder and the neck have different numbers of levels.

    Source: arXiv 2304.08069, arXiv 2407.17140 (RT-DETRv2), arXiv 2410.13842 (D-FINE).
    """

    refine_boxes = True

    def __init__(
        self,
        backbone: nn.Module,
        position: PositionEncoding,
        transformer: HybridTransformer,
        neck: nn.Module,
        channels: int,
        num_queries: int,
        num_logits: int,
        prior_probability: float = 0.01,
        pixel_mean: Sequence[float] = defaults.PIXEL_MEAN,
        pixel_std: Sequence[float] = defaults.PIXEL_STD,
        frozen: Sequence[str] = (),
        queries: nn.Module | None = None,
    ):
        super().__init__(backbone, neck, position, transformer, pixel_mean, pixel_std)
        if len(neck.strides) != transformer.encoder.num_levels:
            raise ValueError(f"the neck produces {len(neck.strides)} levels, but the encoder has {transformer.encoder.num_levels}")
        layers = range(len(transformer.decoder.layers))
        bins = getattr(transformer.decoder, "num_bins", 0)
        self.class_embed = nn.ModuleList(class_head(channels, num_logits, prior_probability) for _ in layers)
        self.bbox_embed = nn.ModuleList(box_head(channels, 0.0, 4 * (bins + 1)) for _ in layers)
        if queries is None:
            chosen = {"class_proposals": True, "token_content": True, "refined_positions": True, "position_sines": False}
            queries = MixedQueries(channels, num_queries, num_logits, prior_probability, **chosen)
        self.queries = queries
        require_contract(self.queries, "query source", "num_queries")
        self.freeze(frozen)
