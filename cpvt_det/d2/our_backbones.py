# SPDX-License-Identifier: Apache-2.0
"""Our vision transformers, and PEG, in detectron2's own models, chosen in YAML: ``MODEL.BACKBONE.NAME: cpvt_tiny`` and so on."""

import itertools

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone
from torch import Tensor, nn

from cpvt_det import builders
from cpvt_det.checkpoint.load import load_backbone_weights
from cpvt_det.errors import ConfigError, config_errors
from cpvt_det.fast import accelerate
from cpvt_det.models import SimplePyramid
from cpvt_det.models.backbones.vit import OWN_POSITIONS
from cpvt_det.plug.attach import attach
from cpvt_det.plug.families import DetectronBackbone


class VisionPyramid(Backbone):
    """A vision transformer and a simple pyramid on its map, with maps ``p<stage>`` of stride 2 ** stage.

    detectron2 gives a backbone no padding mask, but it pads normalised images with zeros, below and on the right. Rows and columns
    there that contain only zeros are therefore taken as padding. An image's maps are then the same in any batch, and zero under the
    padding. A pixel of the image itself can be such a zero only if ``MODEL.PIXEL_MEAN`` is a whole number.

    Args:
        trunk: backbone with one map.
        stages: consecutive stages of the maps, such as 3 to 7.
        channels: channels of the maps.

    Raises:
        ValueError: no stages, or stages with a gap.
    """

    def __init__(self, trunk: nn.Module, stages: tuple[int, ...], channels: int):
        super().__init__()
        stages = sorted(stages)
        if not stages or any(coarse - fine != 1 for fine, coarse in itertools.pairwise(stages)):
            raise ValueError(f"a pyramid has stages one after another, such as (3, 4, 5, 6, 7), got {tuple(stages)}")
        self.trunk = trunk
        self.pyramid = SimplePyramid(trunk.channels, trunk.strides, channels, len(stages), 2 ** stages[0])
        self._shapes = {f"p{stage}": ShapeSpec(channels=channels, stride=2**stage) for stage in stages}

    @property
    def size_divisibility(self) -> int:
        """Number by which the sides of images are divisible."""
        return self.trunk.size_divisibility

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(B, 3, H, W) images -> maps by name."""
        mask = zero_borders(images)
        features, _ = self.pyramid(self.trunk(images, mask), mask)
        return dict(zip(self._shapes, features, strict=True))

    def output_shape(self) -> dict[str, ShapeSpec]:
        """Channels and strides by name."""
        return dict(self._shapes)


def zero_borders(images: Tensor) -> Tensor:
    """Find the padding of normalised images without a known mask.

    Args:
        images: (B, 3, H, W) float.

    Returns:
        (B, H, W) bool, True in the rows below and the columns right of all nonzero pixels; False everywhere in an image of zeros.
    """
    has_content = (images.detach() != 0).any(1)
    rows, columns = (has_content.any(axis).flip(1).cumsum(1).flip(1) > 0 for axis in (2, 1))  # (B, H), (B, W)
    is_empty = ~rows.any(1)[:, None, None]
    return ~(rows[:, :, None] & columns[:, None, :] | is_empty)


def build_vision_pyramid(cfg: CfgNode, input_shape: ShapeSpec) -> VisionPyramid:
    """A transformer from ``MODEL.BACKBONE``, with a pyramid of the ``STAGES`` that has ``MODEL.FPN.OUT_CHANNELS`` channels.

    Raises:
        ConfigError: settings that the transformer or the pyramid refuses.
        WeightsError: ``MODEL.BACKBONE.WEIGHTS`` that do not fit.
    """
    node = cfg.MODEL.BACKBONE
    own = cfg.clone()
    own.defrost()
    own.MODEL.BACKBONE.STAGES = (node.PATCH_SIZE.bit_length() - 1,)
    with config_errors("MODEL.BACKBONE"):
        backbone = accelerate(VisionPyramid(builders.build_backbone(own), node.STAGES, cfg.MODEL.FPN.OUT_CHANNELS))
    if node.WEIGHTS:
        load_backbone_weights(backbone.trunk, node.WEIGHTS, node.NAME)
    return backbone


for _name in OWN_POSITIONS:
    BACKBONE_REGISTRY._do_register(_name, build_vision_pyramid)


@BACKBONE_REGISTRY.register()
def build_peg_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """The backbone ``MODEL.PEG.BACKBONE`` with a PEG on each of the maps ``MODEL.PEG.IN_FEATURES``.

    Only the keys ``peg.<map>`` are added to its state dict, so that weights of the backbone without PEG load. detectron2 gives a
    backbone no padding mask, so PEG sees the padding, which is zero in the image, like any convolution.

    Raises:
        ConfigError: a backbone that is not registered, or this one; settings that PEG refuses.
        PlugError: a map that the backbone does not have.
    """
    node = cfg.MODEL.PEG
    if node.BACKBONE == "build_peg_backbone" or node.BACKBONE not in BACKBONE_REGISTRY:
        raise ConfigError(f"MODEL.PEG.BACKBONE must be another backbone of detectron2's registry, got {node.BACKBONE!r}")
    backbone = BACKBONE_REGISTRY.get(node.BACKBONE)(cfg, input_shape)
    maps = list(node.IN_FEATURES) or list(backbone.output_shape())
    with config_errors("MODEL.PEG"):
        attach(backbone, DetectronBackbone(), maps, kernel_size=node.KERNEL_SIZE, norm=node.NORM, zero_init=node.ZERO_INIT)
    return backbone
