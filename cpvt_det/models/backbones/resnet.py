# SPDX-License-Identifier: Apache-2.0
"""ResNet and ResNet-D feature extractors. They are torchvision's, except that the padding stays zero in every feature map.

Place in the pipeline: the first step of ``models/detector.py``.
"""

import http.client
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
import torchvision
from torch import Tensor, nn
from torchvision.models.resnet import BasicBlock, Bottleneck, ResNet
from torchvision.ops import FrozenBatchNorm2d

from cpvt_det.common.errors import UnknownNameError, WeightsError, first_line
from cpvt_det.common.structures import has_padding, level_padding_mask
from cpvt_det.layers.checkpointing import recomputed
from cpvt_det.layers.norm import BACKBONE_NORMS, NORM_LAYERS
from cpvt_det.models.backbones.contract import BACKBONE_REGISTRY, load_all

STEM_WIDTH = 64
DEPTHS = {
    "resnet10": (BasicBlock, (1, 1, 1, 1)),  # for small images on CPUs; torchvision has no weights for it
    "resnet18": (BasicBlock, (2, 2, 2, 2)),
    "resnet34": (BasicBlock, (3, 4, 6, 3)),
    "resnet50": (Bottleneck, (3, 4, 6, 3)),
    "resnet101": (Bottleneck, (3, 4, 23, 3)),
}
SHALLOW = ("resnet18", "resnet34")


@dataclass
class MaskedOps:
    """Convolutions, norms and ReLU that keep the padding at zero. The mask of each stride is made once per batch.

    Attributes:
        padding_mask: (B, H, W) bool, True = padded. ``None`` masks no cell. Either nothing is padded, or padded cells keep the
            convolutions' outputs, as in the official code.
        dtype: dtype of the maps.
        by_stride: masks made so far, stride -> (B, 1, H, W) float, 1 = valid.
    """

    padding_mask: Tensor | None
    dtype: torch.dtype
    by_stride: dict[int, Tensor] = field(default_factory=dict)

    def at(self, stride: int) -> Tensor | None:
        """The mask of a stride, (B, 1, H, W) float, 1 = valid; ``None`` if no cell is masked."""
        if self.padding_mask is not None and stride not in self.by_stride:
            valid = ~level_padding_mask(self.padding_mask, stride)
            self.by_stride[stride] = valid[:, None].to(self.dtype)
        return self.by_stride.get(stride)

    def rectify(self, x: Tensor, stride: int) -> Tensor:
        """The ReLU of ``x`` (B, C, H, W), in place, with zeros under the padding."""
        return x.relu_() if self.padding_mask is None else x.mul_(self.at(stride).to(x.dtype)).relu_()

    def convolve(self, convolution: nn.Conv2d, norm: nn.Module, x: Tensor, stride: int, residual: Tensor | None = None) -> Tensor:
        """``norm(convolution(x))`` with this stride, plus a residual. The residual may be overwritten. Statistics use valid cells
        only.
        """
        x = convolution(x)
        x = norm(x) if isinstance(norm, FrozenBatchNorm2d) else norm(x, self.at(stride))
        return x if residual is None else x.add_(residual)


class ResNetBackbone(nn.Module):
    """A torchvision ResNet that returns the maps of chosen stages.

    Args:
        name: ``resnet10``, ``resnet18``, ``resnet34``, ``resnet50`` or ``resnet101``.
        norm: ``FrozenBN`` (fixed statistics, for pretrained weights), ``BN``, ``SyncBN`` or ``GN`` (to train from scratch).
        stages: stages to return, from 2 to 5; stages after the last of them are not built.
        dc5: whether stage 5 is dilated and has the stride of stage 4.
        freeze_at: last frozen stage. Stages up to this one keep their weights and statistics; 1 is the stem, and 0 trains all
            stages.
        mask_padding: whether to zero the padded part of every feature map before a convolution or pooling with a kernel above 1,
            and to leave the padding out of the statistics of BN, SyncBN and GN. The padding then acts like the convolution's own
            zero padding, and an image's features do not depend on the rest of its batch. In training, a batch's features do not
            depend on its padding.
        width: channels of the stem; the channels of all stages scale with it.
        checkpointing: whether to recompute blocks in the backward pass instead of storing their activations.

    Raises:
        UnknownNameError: an unknown name or norm.
        ValueError: no stages, stages outside 2 to 5, a ``freeze_at`` outside 0 to 5, or a width below 1.
    """

    masked_ops = MaskedOps
    masks_stages = False  # whether the last map of every stage is zero under the padding, returned or not
    stem = (("conv1", "bn1"),)  # convolutions and norms at stride 2

    def __init__(
        self,
        name: str = "resnet50",
        norm: str = "FrozenBN",
        stages: Sequence[int] = (5,),
        dc5: bool = False,
        freeze_at: int = 2,
        mask_padding: bool = True,
        width: int = STEM_WIDTH,
        checkpointing: bool = False,
    ):
        super().__init__()
        if name not in DEPTHS:
            raise UnknownNameError("backbone", name, DEPTHS)
        if norm not in BACKBONE_NORMS:
            raise UnknownNameError("backbone norm", norm, BACKBONE_NORMS)
        if not stages or not set(stages) <= {2, 3, 4, 5}:
            raise ValueError(f"backbone stages must be among 2, 3, 4, 5, got {list(stages)}")
        if dc5 and 5 not in stages:
            raise ValueError(f"DC5 dilates stage 5, which is not among the stages {tuple(stages)}")
        if not 0 <= freeze_at <= 5:
            raise ValueError(f"freeze_at must be from 0 (train all) to 5, got {freeze_at}")
        if width < 1:
            raise ValueError(f"backbone width must be at least 1, got {width}")
        self.name = name
        self.stages = sorted(stages)
        self.mask_padding = mask_padding
        self.freeze_at = freeze_at
        self.checkpointing = checkpointing
        self.body = self.make_trunk(name, norm, dc5, last_stage=self.stages[-1], width=width)
        strides = {2: 4, 3: 8, 4: 16, 5: 16 if dc5 else 32}
        expansion = DEPTHS[name][0].expansion
        self.strides = [strides[stage] for stage in self.stages]
        self.size_divisibility = max(self.strides)
        self.channels = [width * 2 ** (stage - 2) * expansion for stage in self.stages]
        for module in self._frozen_modules():
            module.requires_grad_(False)
        self.train(self.training)

    def load_pretrained(self, weights: str, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Load the weights of a classifier.

        Args:
            weights: torchvision's name for weights (``IMAGENET1K_V1``, ``DEFAULT``), which are downloaded once, or a file with
                the state dict of a torchvision ResNet or of one of our models. The classifier, and stages that this backbone does
                not have, are ignored.
            read: function that reads a file's state dict.

        Raises:
            UnknownNameError: ``weights`` is neither a known name nor a file.
            WeightsError: the download failed, or the weights belong to a different network.
        """
        has_weights = self.name in torchvision.models.list_models(module=torchvision.models)
        known = torchvision.models.get_model_weights(self.name).__members__ if has_weights else {}
        if weights in known:
            state_dict = _download(known[weights])
        elif Path(weights).expanduser().is_file():
            state_dict = read(weights)
        else:
            raise UnknownNameError("backbone weights (a name of torchvision's, or a file)", weights, known)
        absent = {f"layer{n}" for n in range(1, 5)} - {name for name, _ in self.body.named_children()} | {"fc"}
        found = {key: tensor for key, tensor in state_dict.items() if key.split(".")[0] not in absent}
        load_all(self.body, found, f"{weights} does not fit {self.name}")

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[Tensor]:
        """Extract features.

        Args:
            images: (B, 3, H, W) float, normalised, zero under the padding.
            padding_mask: (B, H, W) bool, True = padded.

        Returns:
            A map (B, C_l, ceil(H / stride), ceil(W / stride)) float for each of ``stages``.
        """
        is_masked = self.mask_padding and has_padding(padding_mask)
        valid = self.masked_ops(padding_mask if is_masked else None, images.dtype)
        body = self.body
        x = images
        for convolution, norm in self.stem:
            x = valid.rectify(valid.convolve(body.get_submodule(convolution), body.get_submodule(norm), x, 2), 2)
        x = body.maxpool(x)
        if is_masked:  # the first padded cells' windows reach back into the image
            x = valid.rectify(x, 4)
        run_block = partial(recomputed, _run_block) if self.checkpointing else _run_block
        stride, features = 4, []
        for stage in range(2, self.stages[-1] + 1):
            blocks = getattr(body, f"layer{stage - 1}")
            for block in blocks:
                is_returned = (stage in self.stages or self.masks_stages) and block is blocks[-1]
                x, stride = run_block(block, x, stride, valid, is_returned)
            if stage in self.stages:
                features.append(x)
        return features

    def make_trunk(self, name: str, norm: str, dilation: bool, last_stage: int, width: int) -> ResNet:
        """Build torchvision's network up to a stage."""
        block, depths = DEPTHS[name]
        if dilation and block is BasicBlock:
            raise ValueError(
                f"{name} has no dilated stage 5 (DC5): torchvision dilates bottleneck blocks only; use resnet50 or resnet101"
            )
        dilated = [False, False, dilation]
        trunk = torchvision.models.ResNet(block, depths, norm_layer=NORM_LAYERS[norm], replace_stride_with_dilation=dilated)
        if width != STEM_WIDTH:  # rebuilt in the way of torchvision's constructor, which supports only 64 channels in the stem
            trunk.inplanes, trunk.dilation = width, 1
            trunk.conv1 = nn.Conv2d(3, width, kernel_size=7, stride=2, padding=3, bias=False)
            trunk.bn1 = trunk._norm_layer(width)
            for index, depth in enumerate(depths):
                dilate, stride = dilation and index == 3, 2 if index else 1
                setattr(trunk, f"layer{index + 1}", trunk._make_layer(block, width * 2**index, depth, stride, dilate))
            for module in trunk.modules():
                if isinstance(module, nn.Conv2d):
                    nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
        del trunk.fc, trunk.avgpool
        for stage in range(last_stage + 1, 6):
            delattr(trunk, f"layer{stage - 1}")
        return trunk

    def layers_above(self, name: str) -> int:
        """Count the stages after a parameter; the stem is stage 1."""
        part = name.split(".")[1]
        return self.stages[-1] - (int(part.removeprefix("layer")) + 1 if part.startswith("layer") else 1)

    def train(self, mode: bool = True) -> "ResNetBackbone":
        """Set the mode; norms of frozen stages stay in evaluation mode, so that their statistics are frozen too."""
        super().train(mode)
        for module in self._frozen_modules():
            module.eval()
        return self

    def _frozen_modules(self) -> list[nn.Module]:
        body = self.body
        stem = [body.conv1, body.bn1] if self.freeze_at >= 1 else []
        stages = range(2, min(self.freeze_at, self.stages[-1]) + 1)
        return stem + [getattr(body, f"layer{stage - 1}") for stage in stages]


for _name in DEPTHS:
    BACKBONE_REGISTRY.register_as(_name)(partial(ResNetBackbone, _name))


def _download(weights: torchvision.models.WeightsEnum) -> Mapping[str, Tensor]:
    try:
        return weights.get_state_dict(progress=False, check_hash=True, weights_only=True)
    except (OSError, RuntimeError, http.client.HTTPException) as error:
        folder = Path(torch.hub.get_dir()) / "checkpoints"
        raise WeightsError(
            f"cannot download {weights} from {weights.url} ({first_line(error)}); no network? give a local file in "
            f"MODEL.BACKBONE.WEIGHTS, or put that file into {folder}"
        ) from error


def _run_block(block: BasicBlock | Bottleneck, x: Tensor, stride: int, valid: MaskedOps, is_returned: bool) -> tuple[Tensor, int]:
    """Run torchvision's residual block with the padding zeroed before every 3x3 convolution; return the output and its stride.

    Between two bottlenecks, only a norm that computes statistics looks across cells. Without such a norm, the wide map between
    the bottlenecks need not be masked.
    """
    out_stride = stride * block.stride
    is_looked_across = is_returned or isinstance(block, BasicBlock) or not isinstance(block.bn1, FrozenBatchNorm2d)
    shortcut = x
    if block.downsample is not None:
        shortcut = valid.convolve(*block.downsample, x, out_stride)
    if isinstance(block, Bottleneck):
        x = valid.rectify(valid.convolve(block.conv1, block.bn1, x, stride), stride)
        x = valid.convolve(block.conv2, block.bn2, x, out_stride).relu_()
        x = valid.convolve(block.conv3, block.bn3, x, out_stride, shortcut)
    else:
        x = valid.rectify(valid.convolve(block.conv1, block.bn1, x, out_stride), out_stride)
        x = valid.convolve(block.conv2, block.bn2, x, out_stride, shortcut)
    return valid.rectify(x, out_stride) if is_looked_across else x.relu_(), out_stride


class ResNetDBackbone(ResNetBackbone):
    """A ResNet-D, RT-DETR's backbone, that returns the maps of chosen stages: the stem has three convolutions, and shortcuts of
    stride 2 use average pooling. Its parts have timm's names.

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
