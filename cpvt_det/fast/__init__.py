# SPDX-License-Identifier: Apache-2.0
"""Faster classes for a built model. Parameters and names stay the same, and results stay the same up to rounding.

Models are plain torch. The builders call :func:`accelerate`, which replaces a model's classes with those of this package. At each
call, ``ops/routes.py`` decides whether the faster computation pays off on this processor. If not, the faster class computes what
the plain class does. With ``CPVT_DET_WITHOUT=all`` in the environment, models stay plain.
"""

from torch import nn

from cpvt_det.fast import layers
from cpvt_det.fast.convolution import FastConv2d, FastConvNorm, FastRepVGGBlock
from cpvt_det.fast.resnet import FastResNetBackbone
from cpvt_det.layers.attention import Attention, DeformableAttention
from cpvt_det.models.backbones.resnet import ResNetBackbone
from cpvt_det.models.deformable_detr import DeformableDecoderLayer, DeformableEncoder, DeformableEncoderLayer
from cpvt_det.models.detr import DecoderLayer
from cpvt_det.models.encoder import Encoder, EncoderLayer
from cpvt_det.models.necks import ProjectionNeck
from cpvt_det.models.real_time_detr import ConvNorm, RepVGGBlock
from cpvt_det.ops import routes

__all__ = ["FASTER", "accelerate"]


class FastProjectionNeck(ProjectionNeck, FastConv2d):
    """Faster :class:`ProjectionNeck`."""


FASTER: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: layers.FastLinear,
    nn.Conv2d: FastConv2d,
    nn.Dropout: layers.FastDropout,
    Attention: layers.FastAttention,
    DeformableAttention: layers.FastDeformableAttention,
    EncoderLayer: layers.FastEncoderLayer,
    DecoderLayer: layers.FastDecoderLayer,
    DeformableEncoderLayer: layers.FastDeformableEncoderLayer,
    DeformableDecoderLayer: layers.FastDeformableDecoderLayer,
    Encoder: layers.FastEncoder,
    DeformableEncoder: layers.FastDeformableEncoder,
    ConvNorm: FastConvNorm,
    RepVGGBlock: FastRepVGGBlock,
    ProjectionNeck: FastProjectionNeck,
    ResNetBackbone: FastResNetBackbone,
}
"""Plain class -> the faster class, which has the same parameters."""


def accelerate(model: nn.Module) -> nn.Module:
    """Replace the classes of a model's parts with faster ones, in place.

    Args:
        model: one of our models. Third-party parts, such as timm's, and user-defined parts are left unchanged, with everything in
            them.

    Returns:
        The model.
    """
    if routes.ALL not in routes.left_out():
        model.__class__ = FASTER.get(type(model), type(model))
        for part in model.children():
            if routes.is_known(part):
                accelerate(part)
    return model
