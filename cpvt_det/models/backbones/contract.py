# SPDX-License-Identifier: Apache-2.0
"""The contract of backbones, and the registry of their names."""

from collections.abc import Collection, Mapping

from torch import Tensor, nn

from cpvt_det.errors import WeightsError
from cpvt_det.registry import PartRegistry

BACKBONE_REGISTRY = PartRegistry("BACKBONE", "backbone")
"""``MODEL.BACKBONE.NAME`` -> builder of a backbone, called with the keys of ``MODEL.BACKBONE`` in lower case: its options, and
those of ``stages``, ``norm``, ``width``, ``dc5``, ``freeze_at`` and ``mask_padding`` that it names; with ``checkpointing``, and
``position``, a builder of the encoding of ``MODEL.BACKBONE.POSITION``.

The contract of a backbone, an ``nn.Module``:

- ``strides`` and ``channels``: pixels per cell and channels of each map, from the finest map to the coarsest;
- ``size_divisibility``: number that the sides of canvases are multiples of;
- ``forward(images, padding_mask) -> maps``: (B, 3, H, W) normalised images, zero under the padding, and their (B, H, W) bool mask,
  True = padded -> over maps (B, C_l, ceil(H / stride), ceil(W / stride)); what lies under their padding does not matter;
- ``load_pretrained(weights, read)``, for ``MODEL.BACKBONE.WEIGHTS``: ``weights`` is that key, ``read(path)`` a function that reads
  the state dict of a file safely. Optional: without it, the backbone has no pretrained weights;
- ``pixel_mean`` and ``pixel_std``, three numbers each, for pixel values from 0 to 255: what its pretrained weights
  expect. Optional; used where ``MODEL.PIXEL_MEAN`` and ``PIXEL_STD`` have their defaults;
- ``tokens(images, padding_mask) -> (special, patches, padding_mask)``, for classifiers, of a transformer: class and distillation
  token (B, 1 or 2, C), or ``None``; patches (B, N, C), and their mask (B, N); and ``num_tokens``, the number of the former.
  Optional: a classifier takes the last map otherwise;
- ``layers_above(name)``: number of layers, or of stages of a convolutional network, after the parameter of that name, for
  ``SOLVER.LAYER_DECAY``. Optional.
"""


def load_all(body: nn.Module, found: Mapping[str, Tensor], what: str, spare: Collection[str] = ()) -> None:
    """Load the weights of a whole network; the counts of batches in norms may be missing.

    Args:
        body: the network.
        found: its weights.
        what: description of the weights and the network, for errors.
        spare: names of tensors that may be there besides, and are left out.

    Raises:
        WeightsError: a tensor that is missing, of another shape, or of no part of the network.
    """
    own = body.state_dict()
    for key in (key for key in [*own, *found] if not key.endswith("num_batches_tracked")):
        if key not in found or (key not in own and key not in spare):
            raise WeightsError(f"{what}: only the {'file' if key in found else 'network'} has {key}")
        if key in own and found[key].shape != own[key].shape:
            raise WeightsError(f"{what}: {key} is {tuple(found[key].shape)}, not {tuple(own[key].shape)}")
    body.load_state_dict({key: tensor for key, tensor in found.items() if key in own}, strict=False)
