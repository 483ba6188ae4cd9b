# SPDX-License-Identifier: Apache-2.0
"""Networks of timm: ``MODEL.BACKBONE.NAME: timm/<name>``; here the convolutional ones, with the padding kept out of them.

On the road of one image: the first part of ``models/detector.py``.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.errors import UnknownNameError, first_line
from cpvt_det.layers.checkpointing import recomputed
from cpvt_det.layers.norm import MaskedBatchNorm2d, MaskedGroupNorm, MaskedSyncBatchNorm2d
from cpvt_det.models.backbones.contract import BACKBONE_REGISTRY
from cpvt_det.models.backbones.masking import (
    Grid,
    InexactError,
    Treatment,
    ValidCells,
    channels_second,
    current_batch,
    kind_of,
    of_batch,
    probe,
    treat,
    unsettle,
)
from cpvt_det.models.backbones.timm_networks import is_transformer, load_weights, pixel_statistics, timm_with
from cpvt_det.models.backbones.timm_transformer import TimmTransformer
from cpvt_det.structures import has_padding

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
    """A vision transformer of timm, which has no batch norms, or else a convolutional network.

    Args:
        name, norm, stages, freeze_at, mask_padding, checkpointing: as in :class:`TimmBackbone` and :class:`TimmTransformer`.

    Raises:
        ConfigError: no package timm.
        UnknownNameError: a name or norm that is not known.
        ValueError: as these classes.
    """
    if is_transformer(name):
        return TimmTransformer(name, stages, freeze_at, mask_padding, checkpointing)
    return TimmBackbone(name, norm, stages, freeze_at, mask_padding, checkpointing)


class TimmBackbone(nn.Module):
    """A convolutional network of timm that returns maps of chosen strides. Names of its parts, in ``body``, are timm's.

    Args:
        name: name of timm's, with or without a tag of weights, such as ``tf_efficientnet_lite0.in1k``.
        norm: what its batch norms do: ``FrozenBN`` (fixed statistics and weights, for pretrained weights), ``BN`` or ``SyncBN``.
            Norms of other kinds are not replaced, and are trained.
        stages: stages to return: stage n is the map of stride 2 ** n. Parts after the last of them are left out, where timm
            does that.
        freeze_at: parts whose output has a stride of up to 2 ** ``freeze_at`` keep their weights and statistics; 0 trains all.
        mask_padding: keep the padding out of convolutions, poolings, means over the map and the statistics of norms, so that an
            image's features do not depend on what it is batched with. Whether that is possible is tried when the network is first
            built: :func:`cpvt_det.models.backbones.masking.probe`.
        checkpointing: blocks are computed again in the backward pass instead of kept.

    Attributes:
        pixel_mean, pixel_std: means and standard deviations of R, G and B, from 0 to 255, for the weights of this name.
        size_divisibility: largest stride inside the network. A canvas that is no multiple of it is padded further on the way.

    Raises:
        ConfigError: no package timm.
        UnknownNameError: a name or norm that is not known.
        ValueError: a network without such maps or blocks, or one that cannot be exact with ``mask_padding``.
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
                f"timm/{name} cannot keep the padding out of its features: {survey.reason}; choose another network, or take it all "
                "the same, with features that depend on the batch, by MODEL.BACKBONE.MASK_PADDING False"
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
            treat(self.body, survey.treatments)
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
        """Take the weights of a classifier, or of another ``body``.

        Args:
            weights: ``pip`` for those of an installed package, ``DEFAULT`` for timm's, downloaded once; or a file of a state dict
                with timm's names, or of a model of ours. Its head, and parts that this backbone does not have, are left out.
            read: reader of a file's state dict.

        Raises:
            UnknownNameError: neither a known name nor a file.
            WeightsError: a missing package, a failing download, or weights of another network.
        """
        load_weights(self.body, self.name, weights, read)

    def forward(self, images: Tensor, padding_mask: Tensor) -> list[Tensor]:
        """Extract features.

        Args:
            images: (B, 3, H, W) float, normalised, zero under the padding.
            padding_mask: (B, H, W) bool, True = padded.

        Returns:
            For each of ``strides``, (B, C_l, ceil(H / stride), ceil(W / stride)) float.
        """
        sides = images.shape[2:]
        below, right = (-side % self.size_divisibility for side in sides)
        if below or right:
            images = F.pad(images, (0, right, 0, below))
            padding_mask = F.pad(padding_mask, (0, right, 0, below), value=True)
        with of_batch(ValidCells(padding_mask) if self.mask_padding and has_padding(padding_mask) else None):
            maps = _maps(self.body, images, self._indices)
        if not (below or right):
            return maps
        sizes = [[-(-side // stride) for side in sides] for stride in self.strides]
        return [map_[:, :, :height, :width] for map_, (height, width) in zip(maps, sizes, strict=True)]

    def layers_above(self, name: str) -> int:
        """How many stages come after a parameter."""
        parts = name.removeprefix("body.").split(".")
        prefixes = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
        stage = next((self._stages[prefix] for prefix in prefixes if prefix in self._stages), 0)
        return max(self._stages.values()) - stage

    def train(self, mode: bool = True) -> "TimmBackbone":
        """Set the mode; what is frozen stays in evaluation, so that statistics are frozen too."""
        super().train(mode)
        for module in self._frozen:
            module.eval()
        return self


@dataclass(frozen=True)
class Survey:
    """What a forward pass shows of a network.

    Attributes:
        strides: pixels per cell of each of its maps.
        units: part, as a block, -> stage, the logarithm of its output's stride; in the order of the forward pass.
        treatments: what keeps the padding out.
        reason: reason why that is not enough; empty if it is, and if it was not tried.
    """

    strides: tuple[int, ...]
    units: Mapping[str, int]
    treatments: tuple[Treatment, ...]
    reason: str


@functools.cache
def survey_network(name: str, is_masked: bool) -> Survey:
    """Run a network of timm, with random weights and in float64, on a small image; each once in a process.

    Args:
        name: name of timm's.
        is_masked: whether to try that the padding can be kept out.

    Raises:
        ConfigError: no package timm.
        UnknownNameError: a name that timm does not have.
        ValueError: a network that timm cannot take maps from.
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)  # the same verdict in every run
        network = _create(name)
        strides, channels = network.feature_info.reduction(), network.feature_info.channels()
        images = torch.randn(2, 3, 2 * max(strides), max(strides)).double()
    body, canvas = network.model.double().eval(), images.shape[2:]
    forward = partial(_maps, body, indices=list(network.out_indices))
    watch = _Watch(body, canvas)
    try:
        with torch.no_grad(), unsettle(body):
            maps = forward(images)
    except Exception as error:  # what timm's networks raise at sizes that they do not take has no common base
        size = f"{canvas[0]} x {canvas[1]} pixels, and a backbone has to run on every canvas"
        raise ValueError(f"timm/{name} does not run on {size}: {first_line(error)}") from error
    watch.remove()
    expected = [(Grid(stride), count) for stride, count in zip(strides, channels, strict=True)]
    if [(Grid.of(canvas, map_), map_.shape[1]) for map_ in maps] != expected:
        shapes = ", ".join(str(tuple(map_.shape)) for map_ in maps)
        raise ValueError(f"timm/{name} must return maps (B, C, H / stride, W / stride), strides {strides}, but returns {shapes}")
    found, reason = [], watch.reason
    if is_masked and not reason:
        _replace_norms(body, "FrozenBN", is_masked=True)
        try:
            found = probe(body, forward, watch.treatments, max(part.out_grid.stride for part in watch.treatments))
        except InexactError as error:
            reason = str(error)
        except Exception as error:  # of a part that takes one shape only; no common base either
            reason = f"it cannot be tried in a batch on a larger canvas: {first_line(error)}"
    return Survey(tuple(strides), watch.units, (*watch.treatments, *found), reason)


class _Watch:
    """Strides of modules, and stages of the network's parts, seen in one forward pass."""

    def __init__(self, body: nn.Module, canvas: Sequence[int]):
        self.units: dict[str, int] = {}
        self.reason = ""
        self._canvas, self._reach, self._seen = canvas, 1, {}
        hooks = [(module, partial(self._see, name)) for name, module in body.named_modules() if kind_of(module)]
        hooks += [(module, partial(self._leave, name)) for name, module in _units(body)]
        self._handles = [module.register_forward_hook(hook) for module, hook in hooks]

    @property
    def treatments(self) -> list[Treatment]:
        return list(self._seen.values())

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _see(self, name: str, module: nn.Module, args: tuple, out: Tensor) -> None:
        grids = [Grid.of(self._canvas, channels_second(module, x)) for x in (args[0], out)]
        if None in grids:
            if kind_of(module) != "counted":  # a norm of one number per channel
                sides = " x ".join(map(str, (args[0] if grids[0] is None else out).shape[2:]))
                self.reason = self.reason or f"{name} has a map of {sides} cells on {self._canvas[0]} x {self._canvas[1]} pixels"
            return
        self._reach = max(self._reach, *(grid.stride for grid in grids))
        made = Treatment(name, kind_of(module, is_padded=grids[0].spare > 0), *grids)
        if self._seen.setdefault(name, made) != made:
            self.reason = self.reason or f"{name} is used at several strides"

    def _leave(self, name: str, *_: object) -> None:
        self.units.setdefault(name, math.ceil(math.log2(self._reach)))


def _units(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """The parts of a network by name: its children, and instead of a sequence or list of parts those parts."""
    for name, child in module.named_children():
        if isinstance(child, (nn.Sequential, nn.ModuleList)):
            yield from _units(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _create(name: str, **options: object) -> nn.Module:
    """timm's extractor of all maps, or of ``out_indices``, with random weights."""
    timm = timm_with(name)
    try:
        return timm.create_model(name, features_only=True, feature_cls="getter", **options)
    except Exception as error:  # what timm's constructors raise has no common base
        raise ValueError(f"timm cannot take feature maps from {name}: {first_line(error)}") from error


def _indices_of(stages: Sequence[int], strides: Sequence[int], name: str) -> list[int]:
    """The last map of each stride, for the stages in order."""
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
    blocks = [block for _, unit in _units(body) for block in _blocks(unit)]
    if not blocks:
        raise ValueError(f"timm/{name} has no blocks to compute again; set MODEL.CHECKPOINTING to False")
    for block in blocks:
        block.forward = partial(_run_again, block)


def _blocks(unit: nn.Module) -> list[nn.Module]:
    """The unit, or if it has several parts of two layers and more, those parts."""
    parts = [part for _, part in _units(unit) if _is_block(part)]
    return [block for part in parts for block in _blocks(part)] if len(parts) > 1 else [unit] * _is_block(unit)


def _is_block(module: nn.Module) -> bool:
    return sum(parameter.ndim > 1 for parameter in module.parameters()) > 1


def _run_again(block: nn.Module, *args: object) -> object:
    return recomputed(_run_block, block, current_batch(), *args)


def _run_block(block: nn.Module, cells: ValidCells | None, *args: object) -> object:
    """In the backward pass too, which knows of no batch."""
    with of_batch(cells):
        return type(block).forward(block, *args)


class _NormAct:
    """The drop and the activation that timm keeps in its norms."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalise and activate; arguments as in :meth:`MaskedBatchNorm2d.forward`."""
        return self.act(self.drop(super().forward(x, valid)))


class _BatchNormAct(_NormAct, MaskedBatchNorm2d):
    """timm's ``BatchNormAct2d`` over valid cells."""


class _SyncBatchNormAct(_NormAct, MaskedSyncBatchNorm2d):
    """The same, over all processes."""


class _GroupNormAct(_NormAct, MaskedGroupNorm):
    """timm's ``GroupNormAct`` over valid cells."""


# Without and with an activation inside.
GROUP_NORMS = (MaskedGroupNorm, _GroupNormAct)
BATCH_NORMS = {"BN": (MaskedBatchNorm2d, _BatchNormAct), "SyncBN": (MaskedSyncBatchNorm2d, _SyncBatchNormAct)}


def _replace_norms(body: nn.Module, norm: str, is_masked: bool) -> None:
    """Norms that can leave out the padding in the place of timm's: batch norms that are trained, and group norms."""
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
