# SPDX-License-Identifier: Apache-2.0
"""ResNet-D, RT-DETR's backbone: the stem has three convolutions, and shortcuts of stride 2 use average pooling.

Place in the pipeline: the first step of ``models/detector.py``.
"""

from collections.abc import Sequence
from functools import partial

from torch import nn
from torchvision.models.resnet import ResNet

from cpvt_det.models.backbones.contract import BACKBONE_REGISTRY
from cpvt_det.models.backbones.resnet import DEPTHS, STEM_WIDTH, ResNetBackbone

SHALLOW = ("resnet18", "resnet34")


class ResNetDBackbone(ResNetBackbone):
    """A ResNet-D that returns the maps of chosen stages. Its parts have timm's names.

    Args:
        name: ``resnet18``, ``resnet34``, ``resnet50`` or ``resnet101``. ``resnet18`` and ``resnet34`` also have a convolution in
            the first shortcut of stage 2, as in RT-DETR's code.
        norm, stages, freeze_at, mask_padding, width, checkpointing: as in :class:`ResNetBackbone`.

    Raises:
        UnknownNameError, ValueError: as in :class:`ResNetBackbone`.

    Source: arXiv 1812.01187, section 4; lyuwenyu/RT-DETR ``src/nn/backbone/presnet.py``.
    """

    masks_stages = True  # average pooling over four cells reaches across the padding's border
    stem = (("conv1.0", "conv1.1"), ("conv1.3", "conv1.4"), ("conv1.6", "bn1"))

    def __init__(
        self,
        name: str,
        norm: str = "FrozenBN",
        stages: Sequence[int] = (3, 4, 5),
        freeze_at: int = 2,
        mask_padding: bool = True,
        width: int = STEM_WIDTH,
        checkpointing: bool = False,
    ):
        super().__init__(name, norm, stages, False, freeze_at, mask_padding, width, checkpointing)
        self.name = f"{name}d"

    def make_trunk(self, name: str, norm: str, dilation: bool, last_stage: int, width: int) -> ResNet:
        trunk = super().make_trunk(name, norm, dilation, last_stage, width)
        half, expansion = width // 2, DEPTHS[name][0].expansion
        stem = [_convolution(3, half, 2), trunk._norm_layer(half), nn.ReLU(), _convolution(half, half)]
        trunk.conv1 = nn.Sequential(*stem, trunk._norm_layer(half), nn.ReLU(), _convolution(half, width))
        for index in range(last_stage - 1):
            block, outputs = getattr(trunk, f"layer{index + 1}")[0], width * 2**index * expansion
            inputs = width if index == 0 else outputs // 2
            if index:
                pool = nn.AvgPool2d(2, 2, ceil_mode=True)
                block.downsample[0] = nn.Sequential(pool, _convolution(inputs, outputs, kernel_size=1))
            elif name in SHALLOW:
                block.downsample = nn.Sequential(_convolution(inputs, outputs, kernel_size=1), trunk._norm_layer(outputs))
        return trunk


def _convolution(inputs: int, outputs: int, stride: int = 1, kernel_size: int = 3) -> nn.Conv2d:
    made = nn.Conv2d(inputs, outputs, kernel_size, stride, kernel_size // 2, bias=False)
    nn.init.kaiming_normal_(made.weight, mode="fan_out", nonlinearity="relu")
    return made


for _name in (*SHALLOW, "resnet50", "resnet101"):
    BACKBONE_REGISTRY.register_as(f"{_name}d")(partial(ResNetDBackbone, _name))
