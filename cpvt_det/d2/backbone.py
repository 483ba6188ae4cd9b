# SPDX-License-Identifier: Apache-2.0
"""Backbones in both directions: detectron2's in our detectors, ours in detectron2's registry."""

import math
from collections.abc import Sequence

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone, build_backbone
from torch import Tensor, nn

from cpvt_det import models
from cpvt_det.d2.padding import keep_padding_out
from cpvt_det.errors import ConfigError, UnknownNameError, config_errors
from cpvt_det.fast import accelerate
from cpvt_det.models import ResNetBackbone
from cpvt_det.models.backbones.masking import InexactError, ValidCells, of_batch
from cpvt_det.registry import IMPORT_HINT
from cpvt_det.structures import has_padding


class Detectron2Backbone(nn.Module):
    """A backbone of detectron2 with the interface of ours: maps from the finest to the coarsest.

    Args:
        body: backbone of detectron2, whose ``output_shape`` contains strides and channels.
        stages: stages whose maps are used; the map of stage n has stride 2 ** n, whatever its name (``res5``, ``p5``, ``scale5``).
        mask_padding: keep the padding out of convolutions, poolings and means over the map, so that an image's features do not
            depend on what it is batched with. Whether that is possible is tried when the backbone is built.

    Raises:
        ValueError: no stage, or a stage for which there is not exactly one map.
        InexactError: a backbone that cannot be exact with ``mask_padding``.
    """

    def __init__(self, body: Backbone, stages: Sequence[int] = (5,), mask_padding: bool = False):
        super().__init__()
        if not stages:
            raise ValueError(f"stages must contain at least one stage, got {list(stages)}")
        self.body = body
        shapes = body.output_shape()
        self.names, self.strides, self.channels = [], [], []
        for stage in sorted(stages):
            names = [name for name, shape in shapes.items() if shape.stride == 2**stage]
            if len(names) != 1:
                found = ", ".join(f"{name} {shape.stride}" for name, shape in shapes.items())
                raise ValueError(
                    f"stage {stage} needs exactly one map of stride {2**stage}, but {type(body).__name__} has the maps {found}; "
                    "change its output features or MODEL.BACKBONE.STAGES"
                )
            self.names.append(names[0])
            self.strides.append(2**stage)
            self.channels.append(shapes[names[0]].channels)
        self.mask_padding = mask_padding
        if mask_padding:
            keep_padding_out(body, self._maps, self.size_divisibility)

    @property
    def size_divisibility(self) -> int:
        """Number by which the sides of images should be divisible: for the largest stride, and for ``body``."""
        # detectron2's Swin does not define it, and its ViT pyramid spells the key differently.
        needed = getattr(self.body, "size_divisibility", 0) or self.body.padding_constraints.get("size_divisiblity", 0)
        return math.lcm(max(self.strides), needed or 1)

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[Tensor]:
        """(B, 3, H, W) images, zero under the padding, and (B, H, W) bool, True = padded -> maps over levels."""
        cells = ValidCells(padding_mask) if self.mask_padding and has_padding(padding_mask) else None
        with of_batch(cells):
            return self._maps(self.body, images)

    def _maps(self, body: nn.Module, images: Tensor) -> list[Tensor]:
        features = body(images)
        return [features[name] for name in self.names]


def build_detector_backbone(cfg: CfgNode) -> nn.Module | None:
    """The backbone if ``MODEL.BACKBONE.NAME`` is in detectron2's registry; ``None`` if it is one of ours.

    Raises:
        ConfigError: ``DC5``, ``NORM``, ``WIDTH`` or ``CHECKPOINTING`` with a backbone of detectron2, ``MASK_PADDING`` with one that
            cannot keep the padding out, stages without a map, or an unknown name.
    """
    node = cfg.MODEL.BACKBONE
    if node.NAME in models.BACKBONE_REGISTRY:
        return None
    if node.NAME not in BACKBONE_REGISTRY:
        known = [*models.BACKBONE_REGISTRY.names, *(name for name, _ in BACKBONE_REGISTRY)]
        raise UnknownNameError("backbone", node.NAME, known, IMPORT_HINT)
    for key, default in (("DC5", False), ("NORM", "FrozenBN"), ("WIDTH", 64)):
        if node[key] != default:
            raise ConfigError(
                f"backbones of detectron2 do not take MODEL.BACKBONE.{key}, got {node[key]!r}; leave it at {default!r}"
            )
    if cfg.MODEL.CHECKPOINTING:
        raise ConfigError(f"backbone {node.NAME} of detectron2 does not support MODEL.CHECKPOINTING: set it to False")
    with config_errors("MODEL.BACKBONE"):
        try:
            return Detectron2Backbone(build_backbone(cfg), node.STAGES, node.MASK_PADDING)
        except InexactError as error:
            raise ConfigError(
                f"backbone {node.NAME} of detectron2 cannot keep the padding out of its features: {error}; choose another one, or "
                "take it all the same, with features that depend on the batch, by MODEL.BACKBONE.MASK_PADDING False"
            ) from error


class _OurBackbone(Backbone):
    """A :class:`ResNetBackbone` for detectron2's own models, with the same keys in its state dict."""

    def __init__(self, resnet: ResNetBackbone):
        super().__init__()
        self.body = resnet.body
        self._resnet = [resnet]  # in a list: not a second path to the same parameters

    def train(self, mode: bool = True) -> "_OurBackbone":
        super().train(mode)
        self._resnet[0].train(mode)  # keeps frozen stages in evaluation
        return self

    def forward(self, images: Tensor) -> dict[str, Tensor]:
        """(B, 3, H, W) images -> maps by name, ``res2`` to ``res5``."""
        resnet = self._resnet[0]
        no_padding = images.new_zeros((images.shape[0], *images.shape[2:]), dtype=bool)
        return dict(zip(self._names(), resnet(images, no_padding), strict=True))

    def output_shape(self) -> dict[str, ShapeSpec]:
        """Channels and strides by name."""
        resnet = self._resnet[0]
        specs = zip(resnet.channels, resnet.strides, strict=True)
        return dict(zip(self._names(), (ShapeSpec(channels=c, stride=s) for c, s in specs), strict=True))

    def _names(self) -> list[str]:
        return [f"res{stage}" for stage in self._resnet[0].stages]


def _stage(name: str) -> int:
    if name not in ("res2", "res3", "res4", "res5"):
        raise ConfigError(f"MODEL.RESNETS.OUT_FEATURES contains {name!r}; allowed are res2, res3, res4 and res5")
    return int(name[-1])


@BACKBONE_REGISTRY.register()
def build_cpvt_resnet_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """torchvision's ResNet for detectron2's models, by ``MODEL.RESNETS.DEPTH``, ``NORM`` and ``OUT_FEATURES``.

    Raises:
        ConfigError: an unknown depth, norm or feature.
    """
    node = cfg.MODEL.RESNETS
    with config_errors("MODEL.RESNETS"):
        resnet = ResNetBackbone(
            f"resnet{node.DEPTH}",
            norm=node.NORM,
            stages=[_stage(name) for name in node.OUT_FEATURES],
            freeze_at=cfg.MODEL.BACKBONE.FREEZE_AT,
            mask_padding=False,  # detectron2's own models give no padding mask
        )
    return _OurBackbone(accelerate(resnet))
