# SPDX-License-Identifier: Apache-2.0
"""Networks of timm, chosen by ``MODEL.BACKBONE.NAME: timm/<name>``. This file makes the convolutional ones independent of padding.

Place in the pipeline: the first step of ``models/detector.py``.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.errors import UnknownNameError, first_line
from cpvt_det.common.structures import has_padding
from cpvt_det.layers.checkpointing import recomputed
from cpvt_det.layers.norm import MaskedBatchNorm2d, MaskedGroupNorm, MaskedSyncBatchNorm2d
from cpvt_det.models.backbones import masking
from cpvt_det.models.backbones.contract import BACKBONE_REGISTRY
from cpvt_det.models.backbones.timm_networks import is_transformer, load_weights, pixel_statistics, timm_with
from cpvt_det.models.backbones.timm_transformer import TimmTransformer

NORMS = ("FrozenBN", "BN", "SyncBN")


@BACKBONE_REGISTRY.register_as("timm/<name>")
def timm_backbone(
    name: str,
    norm: str = "FrozenBN",
    stages: Sequence[int] = (5,),
    freeze_at: int = 2,
    mask_padding: bool = True,
    checkpointing: bool = False,
) -> "TimmBackbone | TimmTransformer":
    """Build a convolutional network of timm, or a vision transformer of timm. Vision transformers have no batch norms.

    Args:
        name, norm, stages, freeze_at, mask_padding, checkpointing: as in :class:`TimmBackbone` and :class:`TimmTransformer`.

    Raises:
        ConfigError: timm is not installed.
        UnknownNameError: an unknown name or norm.
        ValueError: as in these classes.
    """
    if is_transformer(name):
        return TimmTransformer(name, stages, freeze_at, mask_padding, checkpointing)
    return TimmBackbone(name, norm, stages, freeze_at, mask_padding, checkpointing)


class TimmBackbone(nn.Module):
    """A convolutional network of timm that returns maps of chosen strides. Its parts, in ``body``, have timm's names.

    Args:
        name: timm's name, with or without the tag of its weights, such as ``tf_efficientnet_lite0.in1k``.
        norm: kind of its batch norms: ``FrozenBN`` (fixed statistics and weights, for pretrained weights), ``BN`` or ``SyncBN``.
            Norms other than batch norms keep their kind, and are trained.
        stages: stages to return; stage n is the map of stride 2 ** n. Parts after the last of them are left out if timm supports
            this.
        freeze_at: number of the last frozen stage. Parts whose output has a stride of at most 2 ** ``freeze_at`` keep their
            weights and statistics. 0 trains all parts.
        mask_padding: whether to keep the padding out of convolutions, poolings, means over the map and the statistics of norms, so
            that an image's features do not depend on the rest of its batch. Whether that is possible is tested when the network is
            first built, by :func:`cpvt_det.models.backbones.masking.probe`.
        checkpointing: whether to recompute blocks in the backward pass instead of storing their activations.

    Attributes:
        pixel_mean, pixel_std: means and standard deviations of R, G and B, from 0 to 255, for the weights of this name.
        size_divisibility: largest stride inside the network. A canvas that is not a multiple of it is padded in ``forward``.

    Raises:
        ConfigError: timm is not installed.
        UnknownNameError: an unknown name or norm.
        ValueError: the network has no maps of these strides or no blocks to recompute, or its features depend on the padding
            although ``mask_padding`` is set.
    """

    def __init__(
        self,
        name: str,
        norm: str = "FrozenBN",
        stages: Sequence[int] = (5,),
        freeze_at: int = 2,
        mask_padding: bool = True,
        checkpointing: bool = False,
    ):
        super().__init__()
        if norm not in NORMS:
            raise UnknownNameError("norm of a timm backbone", norm, NORMS)
        if freeze_at < 0:
            raise ValueError(f"freeze_at must be at least 0 (train all), got {freeze_at}")
        survey = survey_network(name, mask_padding)
        if mask_padding and survey.reason:
            raise ValueError(
                f"timm/{name} cannot keep the padding out of its features: {survey.reason}; choose another network, or set "
                "MODEL.BACKBONE.MASK_PADDING to False and accept features that depend on the batch"
            )
        network = _create(name, out_indices=_indices_of(stages, survey.strides, name))
        self.name, self.mask_padding, self.checkpointing = name, mask_padding, checkpointing
        self.body: nn.Module = network.model
        self._indices = list(network.out_indices)
        self.strides, self.channels = network.feature_info.reduction(), network.feature_info.channels()
        names = dict(self.body.named_modules())
        self.size_divisibility = max(part.out_grid.stride for part in survey.treatments if part.module in names)
        _replace_norms(self.body, norm, mask_padding)
        if mask_padding:
            masking.treat(self.body, survey.treatments)
        if checkpointing:
            _recompute_blocks(self.body, name)
        self.pixel_mean, self.pixel_std = pixel_statistics(self.body)
        self._stages = {name: stage for name, stage in survey.units.items() if name in names}
        units = [name for name, stage in self._stages.items() if 0 < freeze_at >= stage]
        self._frozen = [part for name in units for part in self.body.get_submodule(name).modules()]
        self._frozen += [part for part in self.body.modules() if norm == "FrozenBN" and isinstance(part, nn.BatchNorm2d)]
        for module in self._frozen:
            for parameter in module.parameters(recurse=False):
                parameter.requires_grad_(False)
        self.train(self.training)

    def load_pretrained(self, weights: str, read: Callable[[str], Mapping[str, Tensor]]) -> None:
        """Load the weights of a classifier, or of another ``body``.

        Args:
            weights: ``pip`` for the weights of an installed package, ``DEFAULT`` for timm's weights, which are downloaded once,
                or a file with the state dict of one of our models or with timm's names. The head, and parts that this backbone
                does not have, are ignored.
            read: function that reads a file's state dict.

        Raises:
            UnknownNameError: ``weights`` is neither a known name nor a file.
            WeightsError: the package is missing, the download failed, or the weights belong to a different network.
        """
        load_weights(self.body, self.name, weights, read)

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[Tensor]:
        """Extract features.

        Args:
            images: (B, 3, H, W) float, normalised, zero under the padding.
            padding_mask: (B, H, W) bool, True = padded.

        Returns:
            A map (B, C_l, ceil(H / stride), ceil(W / stride)) float for each of ``strides``.
        """
        sides = images.shape[2:]
        below, right = (-side % self.size_divisibility for side in sides)
        if below or right:
            images = F.pad(images, (0, right, 0, below))
            padding_mask = F.pad(padding_mask, (0, right, 0, below), value=True)
        with masking.of_batch(masking.ValidCells(padding_mask) if self.mask_padding and has_padding(padding_mask) else None):
            maps = _maps(self.body, images, self._indices)
        if not (below or right):
            return maps
        sizes = [[-(-side // stride) for side in sides] for stride in self.strides]
        return [map_[:, :, :height, :width] for map_, (height, width) in zip(maps, sizes, strict=True)]

    def layers_above(self, name: str) -> int:
        """Count the stages after a parameter."""
        parts = name.removeprefix("body.").split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        stage = next((self._stages[prefix] for prefix in prefixes if prefix in self._stages), 0)
        return max(self._stages.values()) - stage

    def train(self, mode: bool = True) -> "TimmBackbone":
        """Set the mode; frozen parts stay in evaluation mode, so that their statistics are frozen too."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self


@dataclass(frozen=True)
class Survey:
    """The facts about a network that a forward pass reveals.

    Attributes:
        strides: pixels per cell of each of its maps.
        units: stage of each part, such as a block, in the order of the forward pass. The stage is the base-2 logarithm of the
            stride of the part's output.
        treatments: treatments of modules that keep the padding out.
        reason: the reason why the treatments are not enough; empty if they are enough, or if this was not tested.
    """

    strides: tuple[int, ...]
    units: Mapping[str, int]
    treatments: tuple[masking.Treatment, ...]
    reason: str


@functools.cache
def survey_network(name: str, is_masked: bool) -> Survey:
    """Run a network of timm, with random weights and in float64, on small images. Each network runs only once per process.

    Args:
        name: timm's name.
        is_masked: whether to test that the padding can be kept out.

    Raises:
        ConfigError: timm is not installed.
        UnknownNameError: a name that timm does not have.
        ValueError: a network from which timm cannot extract maps.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)  # the same verdict in every run
        network = _create(name)
        strides, channels = network.feature_info.reduction(), network.feature_info.channels()
        images = torch.randn(2, 3, 2 * max(strides), max(strides)).double()
    body, canvas = network.model.double().eval(), images.shape[2:]
    forward = partial(_maps, body, indices=list(network.out_indices))
    watch = _UnitWatch(body, canvas)
    try:
        with torch.no_grad(), masking.unsettle(body):
            maps = forward(images)
    except Exception as error:  # exceptions of timm's networks at unsupported sizes have no common base class
        size = f"{canvas[0]} x {canvas[1]} pixels, and a backbone has to run on every canvas"
        raise ValueError(f"timm/{name} does not run on {size}: {first_line(error)}") from error
    treatments = watch.treatments()
    expected = [(masking.Grid(stride), count) for stride, count in zip(strides, channels, strict=True)]
    if [(masking.Grid.of(canvas, map_), map_.shape[1]) for map_ in maps] != expected:
        shapes = ", ".join(str(tuple(map_.shape)) for map_ in maps)
        raise ValueError(f"timm/{name} must return maps (B, C, H / stride, W / stride), strides {strides}, but returns {shapes}")
    found, reason = [], watch.reason
    if is_masked and not reason:
        _replace_norms(body, "FrozenBN", is_masked=True)
        try:
            found = masking.probe(body, forward, treatments, max(part.out_grid.stride for part in treatments))
        except masking.InexactError as error:
            reason = str(error)
        except Exception as error:  # from a part that accepts only one shape; no common base class here either
            reason = f"it cannot be run in a batch on a larger canvas: {first_line(error)}"
    return Survey(tuple(strides), watch.units, (*treatments, *found), reason)


class _UnitWatch(masking.Watch):
    """An observer that also notes the stage of each of the network's parts."""

    def __init__(self, body: nn.Module, canvas: Sequence[int]):
        super().__init__(body, canvas)
        self.units: dict[str, int] = {}
        self.handles += [unit.register_forward_hook(partial(self._leave, name)) for name, unit in _units(body)]

    def _leave(self, name: str, *_: object) -> None:
        self.units.setdefault(name, math.ceil(math.log2(self.reach)))


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of a network by name: its children, with each sequence or list replaced by its members."""
    for name, child in module.named_children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from _units(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _create(name: str, **options: object) -> nn.Module:
    """timm's extractor for all maps, or only for the maps in ``out_indices``, with random weights."""
    timm = timm_with(name)
    try:
        return timm.create_model(name, features_only=True, feature_cls="getter", **options)
    except Exception as error:  # exceptions of timm's constructors have no common base class
        raise ValueError(f"timm cannot take feature maps from {name}: {first_line(error)}") from error


def _indices_of(stages: Sequence[int], strides: Sequence[int], name: str) -> list[int]:
    """The index of the last map with each stage's stride, in the order of the stages."""
    last = {stride: index for index, stride in enumerate(strides)}
    if not stages or not {2**stage for stage in stages} <= last.keys():
        known = ", ".join(str(stride.bit_length() - 1) for stride in last if stride.bit_count() == 1) or "none"
        raise ValueError(
            f"timm/{name} has maps of strides {', '.join(map(str, last))}, so its stages must be among {known}, got {list(stages)}"
        )
    return [last[2**stage] for stage in sorted(stages)]


def _maps(body: nn.Module, images: Tensor, indices: Sequence[int]) -> list[Tensor]:
    return body.forward_intermediates(images, indices=list(indices), output_fmt="NCHW", intermediates_only=True)


def _recompute_blocks(body: nn.Module, name: str) -> None:
    if not (blocks := [block for _, unit in _units(body) for block in _blocks(unit)]):
        raise ValueError(f"timm/{name} has no blocks to recompute; set MODEL.CHECKPOINTING to False")
    for block in blocks:
        block.forward = partial(_run_again, block)


def _blocks(unit: nn.Module) -> list[nn.Module]:
    """The blocks of a unit: its parts if several of them have at least two layers, otherwise the unit itself."""
    parts = [part for _, part in _units(unit) if _is_block(part)]
    return [block for part in parts for block in _blocks(part)] if len(parts) > 1 else [unit] * _is_block(unit)


def _is_block(module: nn.Module) -> bool:
    return sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def _run_again(block: nn.Module, *args: object) -> object:
    return recomputed(_run_block, block, masking.current_batch(), *args)


def _run_block(block: nn.Module, cells: masking.ValidCells | None, *args: object) -> object:
    """Run a block while its batch is set. Otherwise the backward pass, which recomputes the block, would not know the batch."""
    with masking.of_batch(cells):
        return type(block).forward(block, *args)


class _NormAct:
    """Mixin with the dropout and the activation that timm's norms contain."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalise and activate; arguments as in :meth:`MaskedBatchNorm2d.forward`."""
        return self.act(self.drop(super().forward(x, valid)))


class _BatchNormAct(_NormAct, MaskedBatchNorm2d):
    """timm's ``BatchNormAct2d`` over valid cells."""


class _SyncBatchNormAct(_NormAct, MaskedSyncBatchNorm2d):
    """timm's ``BatchNormAct2d`` over valid cells of all processes."""


class _GroupNormAct(_NormAct, MaskedGroupNorm):
    """timm's ``GroupNormAct`` over valid cells."""


# In each pair, the second norm has an activation inside.
GROUP_NORMS = (MaskedGroupNorm, _GroupNormAct)
BATCH_NORMS = {"BN": (MaskedBatchNorm2d, _BatchNormAct), "SyncBN": (MaskedSyncBatchNorm2d, _SyncBatchNormAct)}


def _replace_norms(body: nn.Module, norm: str, is_masked: bool) -> None:
    """Replace timm's group norms, and batch norms that are trained, with norms that can leave out the padding."""
    for name, module in list(body.named_modules()):
        has_act = hasattr(module, "act")
        if isinstance(module, nn.BatchNorm2d) and norm in BATCH_NORMS and module.bias is not None:
            made = BATCH_NORMS[norm][has_act](module.num_features, module.eps, module.momentum)
        elif isinstance(module, nn.GroupNorm) and is_masked and module.bias is not None:
            made = GROUP_NORMS[has_act](module.num_groups, module.num_channels, module.eps)
        else:
            continue
        if has_act:
            made.drop, made.act = module.drop, module.act
        made.load_state_dict(module.state_dict())
        body.set_submodule(name, made.to(module.weight))
