# SPDX-License-Identifier: Apache-2.0
"""detectron2's backbones in our detectors, and ours in detectron2's models.

For detectron2's backbones, :mod:`cpvt_det.models.backbones.masking` keeps the padding out. Our vision transformers and PEG are
chosen in YAML: ``MODEL.BACKBONE.NAME: cpvt_tiny`` and so on.
"""

import copy
import itertools
import math
import operator
from collections.abc import Callable, Sequence
from functools import partial

import torch
from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone, build_backbone
from detectron2.modeling.backbone.resnet import BasicStem
from torch import Tensor, nn

from cpvt_det import builders, models
from cpvt_det.checkpoint.load import load_backbone_weights
from cpvt_det.common.errors import ConfigError, UnknownNameError, config_errors, first_line
from cpvt_det.common.registry import IMPORT_HINT
from cpvt_det.common.structures import has_padding
from cpvt_det.fast import accelerate
from cpvt_det.models.backbones import masking
from cpvt_det.models.backbones.vit import OWN_POSITIONS
from cpvt_det.plug.attach import attach
from cpvt_det.plug.families import DetectronBackbone

Maps = Callable[[nn.Module, Tensor], Sequence[Tensor]]


class Detectron2Backbone(nn.Module):
    """A backbone of detectron2 with the interface of ours: maps from the finest to the coarsest.

    Args:
        body: backbone of detectron2, whose ``output_shape`` contains strides and channels.
        stages: stages whose maps are used; the map of stage n has stride 2 ** n, whatever its name (``res5``, ``p5``, ``scale5``).
        mask_padding: whether to keep the padding out of convolutions, poolings and means over the map, so that an image's features
            do not depend on the other images of its batch. A test during construction checks that this is possible.

    Raises:
        ValueError: no stage, or a stage for which there is not exactly one map.
        InexactError: with ``mask_padding``, a backbone that cannot keep the padding out.
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
        """Number by which the sides of images should be divisible, as the largest stride and ``body`` require it."""
        # detectron2's Swin does not define it, and its ViT pyramid spells the key differently.
        needed = getattr(self.body, "size_divisibility", 0) or self.body.padding_constraints.get("size_divisiblity", 0)
        return math.lcm(max(self.strides), needed or 1)

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[Tensor]:
        """(B, 3, H, W) images, zero under the padding, and (B, H, W) bool, True = padded -> maps over levels."""
        cells = masking.ValidCells(padding_mask) if self.mask_padding and has_padding(padding_mask) else None
        with masking.of_batch(cells):
            return self._maps(self.body, images)

    def _maps(self, body: nn.Module, images: Tensor) -> list[Tensor]:
        features = body(images)
        return [features[name] for name in self.names]


def build_detector_backbone(cfg: CfgNode) -> nn.Module | None:
    """The backbone if ``MODEL.BACKBONE.NAME`` is in detectron2's registry; ``None`` if it is one of ours.

    Raises:
        ConfigError: ``DC5``, ``NORM``, ``WIDTH`` or ``CHECKPOINTING`` with a backbone of detectron2, ``MASK_PADDING`` with a
            backbone that cannot keep the padding out, stages without a map, or an unknown name.
    """
    node = cfg.MODEL.BACKBONE
    if node.NAME in models.BACKBONE_REGISTRY:
        return None
    if node.NAME not in BACKBONE_REGISTRY:
        known = [*models.BACKBONE_REGISTRY.names, *(name for name, _ in BACKBONE_REGISTRY)]
        raise UnknownNameError("backbone", node.NAME, known, IMPORT_HINT)
    ours = {"BACKBONE.DC5": False, "BACKBONE.NORM": "FrozenBN", "BACKBONE.WIDTH": 64, "CHECKPOINTING": False}
    for key, default in ours.items():
        value = operator.attrgetter(key)(cfg.MODEL)
        if value != default:
            raise ConfigError(f"backbones of detectron2 do not support MODEL.{key}, got {value!r}; leave it at {default!r}")
    with config_errors("MODEL.BACKBONE"):
        try:
            return Detectron2Backbone(build_backbone(cfg), node.STAGES, node.MASK_PADDING)
        except masking.InexactError as error:
            raise ConfigError(
                f"backbone {node.NAME} of detectron2 cannot keep the padding out of its features: {error}; choose another one, or "
                "set MODEL.BACKBONE.MASK_PADDING to False and accept features that depend on the batch"
            ) from error


class PooledStem(nn.Module):
    """A ``BasicStem`` whose pooling is a module, so that it can have a hook; its weights keep their names.

    Args:
        stem: stem of a ResNet of detectron2.
    """

    def __init__(self, stem: BasicStem):
        super().__init__()
        self.conv1 = stem.conv1
        self.max_pool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) -> (B, C, H / 4, W / 4)."""
        return self.max_pool(self.conv1(x).relu_())


def keep_padding_out(body: nn.Module, maps: Maps, divisor: int) -> None:
    """Add hooks to a backbone that keep out the padding of the batch that :func:`masking.of_batch` describes, and test that they
    do.

    Args:
        body: a detectron2 backbone, modified in place; its state-dict keys do not change.
        maps: function of a backbone and (B, 3, H, W) images that returns its maps, (B, C, h, w).
        divisor: number by which the sides of canvases are divisible.

    Raises:
        InexactError: features of an image that depend on the canvas around it.
    """
    trained = [name for name, module in body.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if trained:
        raise masking.InexactError(
            f"in training, the statistics of the norm {trained[0]} include the padding; set its norm to FrozenBN"
        )
    for name, module in list(body.named_modules()):
        if isinstance(module, BasicStem):
            body.set_submodule(name, PooledStem(module))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)  # the same verdict in every run
        network = copy.deepcopy(body).cpu().double().eval()
        forward, images = partial(maps, network), torch.randn(2, 3, 2 * divisor, divisor).double()
    watch = masking.Watch(network, images.shape[2:])
    try:
        with torch.no_grad(), masking.unsettle(network):
            forward(images)
        treatments = watch.treatments()
        if watch.reason:
            raise masking.InexactError(watch.reason)
        treatments += masking.probe(network, forward, treatments, divisor)
    except masking.InexactError:
        raise
    except Exception as error:  # from a network that accepts only one size; such errors have no common base class
        raise masking.InexactError(watch.reason or f"it cannot be run on other canvas sizes: {first_line(error)}") from error
    masking.treat(body, treatments)


class VisionPyramid(Backbone):
    """A vision transformer with a simple pyramid on its map; the result has maps ``p<stage>`` of stride 2 ** stage.

    detectron2 gives a backbone no padding mask, but it pads normalised images with zeros, below and on the right. So rows at the
    bottom and columns at the right that contain only zeros count as padding. With this rule, an image's maps are the same in any
    batch, and zero under the padding. A pixel of the image itself can be such a zero only if ``MODEL.PIXEL_MEAN`` is a whole
    number.

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
            raise ValueError(f"a pyramid needs consecutive stages, such as (3, 4, 5, 6, 7), got {tuple(stages)}")
        self.trunk = trunk
        self.pyramid = models.SimplePyramid(trunk.channels, trunk.strides, channels, len(stages), 2 ** stages[0])
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
    """A transformer from ``MODEL.BACKBONE``, with a pyramid of maps for its ``STAGES``, each with ``MODEL.FPN.OUT_CHANNELS``
    channels.

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

    Only the keys ``peg.<map>`` are added to the state dict, so that weights of the backbone without PEG can be loaded. detectron2
    gives a backbone no padding mask. So PEG, like any convolution, also reads what the backbone computes under the padding, where
    the image is zero.

    Raises:
        ConfigError: a backbone that is not registered, or ``build_peg_backbone`` itself; settings that PEG refuses.
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
