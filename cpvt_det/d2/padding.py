# SPDX-License-Identifier: Apache-2.0
"""The padding kept out of convolutional backbones of detectron2, in the way of :mod:`cpvt_det.models.backbones.masking`."""

import copy
from collections.abc import Callable, Sequence
from functools import partial

import torch
from detectron2.modeling.backbone.resnet import BasicStem
from torch import Tensor, nn

from cpvt_det.errors import first_line
from cpvt_det.models.backbones.masking import Grid, InexactError, Treatment, kind_of, probe, treat, unsettle

Maps = Callable[[nn.Module, Tensor], Sequence[Tensor]]


class PooledStem(nn.Module):
    """A ``BasicStem`` whose pooling is a module, on which a hook can be put; its weights keep their names.

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
    """Put hooks on a backbone that keep the padding of the batch of :func:`masking.of_batch` out, once it was tried that they do.

    Args:
        body: backbone of detectron2, changed in place; names in its state dict stay.
        maps: function of a backbone and (B, 3, H, W) images that returns its maps, (B, C, h, w).
        divisor: number that the sides of canvases are multiples of.

    Raises:
        InexactError: features of an image that depend on what is around it.
    """
    trained = [name for name, module in body.named_modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
    if trained:
        raise InexactError(f"statistics of the norm {trained[0]} count the padding in training; set its norm to FrozenBN")
    for name, module in list(body.named_modules()):
        if isinstance(module, BasicStem):
            body.set_submodule(name, PooledStem(module))
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(0)  # the same verdict in every run
        network = copy.deepcopy(body).cpu().double().eval()
        forward, images = partial(maps, network), torch.randn(2, 3, 2 * divisor, divisor).double()
    try:
        treatments = _treatments(network, forward, images)
        treatments += probe(network, forward, treatments, divisor)
    except InexactError:
        raise
    except Exception as error:  # of a network that takes one size only; such errors have no common base
        raise InexactError(f"it cannot be tried on other canvases: {first_line(error)}") from error
    treat(body, treatments)


def _treatments(network: nn.Module, forward: Callable[[Tensor], Sequence[Tensor]], images: Tensor) -> list[Treatment]:
    """Those that the types of modules need, with the grids that are seen in one forward pass."""
    found: list[Treatment] = []

    def see(name: str, module: nn.Module, args: tuple, out: Tensor) -> None:
        grids = [Grid.of(images.shape[2:], x) for x in (args[0], out)]
        if None not in grids:
            found.append(Treatment(name, kind_of(module), *grids))
        elif kind_of(module) != "counted":
            raise InexactError(f"{name} has a map of {tuple(out.shape[2:])} cells on {tuple(images.shape[2:])} pixels")

    handles = [m.register_forward_hook(partial(see, name)) for name, m in network.named_modules() if kind_of(m)]
    with torch.no_grad(), unsettle(network):
        forward(images)
    for handle in handles:
        handle.remove()
    names = [treatment.module for treatment in found]
    twice = next((name for name in names if names.count(name) > 1), "")
    if twice:
        raise InexactError(f"{twice} is used several times")
    return found
