# SPDX-License-Identifier: Apache-2.0
"""The contract of backbones, and the registry of their names."""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from cpvt_det.common.errors import WeightsError
from cpvt_det.common.registry import PartRegistry

BACKBONE_REGISTRY = PartRegistry("BACKBONE", "backbone")
"""``MODEL.BACKBONE.NAME`` -> builder of a backbone. It is called with keys of ``MODEL.BACKBONE`` in lower case: its own options,
and whichever of ``stages``, ``norm``, ``width``, ``dc5``, ``freeze_at`` and ``mask_padding`` its signature names. The same applies
to ``checkpointing``, and to ``position``, a builder of the encoding of ``MODEL.BACKBONE.POSITION``.

The contract of a backbone, an ``nn.Module``:

- ``strides`` and ``channels``: pixels per cell and channels of each map, from the finest map to the coarsest;
- ``size_divisibility``: number that must divide the height and width of every canvas;
- ``forward(images, padding_mask) -> maps``: takes (B, 3, H, W) normalised images, zero under the padding, and their (B, H, W) bool
  mask, True = padded; returns maps (B, C_l, ceil(H / stride), ceil(W / stride)), whose values under the padding do not matter;
- ``load_pretrained(weights, read)``, for ``MODEL.BACKBONE.WEIGHTS``: ``weights`` is the value of that key, and ``read(path)`` is a
  function that safely reads the state dict of a file. Optional: without it, the backbone has no pretrained weights;
- ``pixel_mean`` and ``pixel_std``, three numbers each, for pixel values from 0 to 255: the statistics that its pretrained weights
  expect. Optional; used where ``MODEL.PIXEL_MEAN`` and ``PIXEL_STD`` have their defaults;
- ``tokens(images, padding_mask) -> (special, patches, padding_mask)``, for classifiers on a transformer: class and distillation
  token (B, 1 or 2, C), or ``None``; patches (B, N, C); and their mask (B, N). It comes with ``num_tokens``, the number of special
  tokens. Optional: without it, a classifier uses the last map;
- ``layers_above(name)``: number of layers, or of stages of a convolutional network, after the parameter of that name, for
  ``SOLVER.LAYER_DECAY``. Optional.
"""


def load_all(body: nn.Module, found: Mapping[str, Tensor], what: str, spare: Collection[str] = ()) -> None:
    """Load the weights of a whole network. Only the batch counters of norms may be missing.

    Args:
        body: the network.
        found: its weights.
        what: description of the weights and the network, for errors.
        spare: names of tensors in ``found`` that are ignored.

    Raises:
        WeightsError: a tensor is missing, has a different shape, or belongs to no part of the network.
    """
    own = body.state_dict()
    for key in (key for key in [*own, *found] if not key.endswith("num_batches_tracked")):
        if key not in found or (key not in own and key not in spare):
            raise WeightsError(f"{what}: only the {'file' if key in found else 'network'} has {key}")
        if key in own and found[key].shape != own[key].shape:
            raise WeightsError(f"{what}: {key} is {tuple(found[key].shape)}, not {tuple(own[key].shape)}")
    body.load_state_dict({key: tensor for key, tensor in found.items() if key in own}, strict=False)
