# SPDX-License-Identifier: Apache-2.0
"""The contract of backbones, and the registry of their names."""

from cpvt_det.registry import PartRegistry

BACKBONE_REGISTRY = PartRegistry("BACKBONE", "backbone")
"""``MODEL.BACKBONE.NAME`` -> builder of a backbone, called with those keys of ``MODEL.BACKBONE`` that it names, in lower case
(``stages``, ``norm``, ``freeze_at``, ``mask_padding``, ``width``), with ``dilation`` for ``DC5``, and with ``checkpointing``.

The contract of a backbone, an ``nn.Module``:

- ``strides`` and ``channels``: pixels per cell and channels of each map, from the finest map to the coarsest;
- ``size_divisibility``: number that the sides of canvases are multiples of;
- ``forward(images, padding_mask) -> maps``: (B, 3, H, W) normalised images, zero under the padding, and their (B, H, W) bool mask,
  True = padded -> over maps (B, C_l, ceil(H / stride), ceil(W / stride)); what lies under their padding does not matter;
- ``load_pretrained(weights, read)``, for ``MODEL.BACKBONE.WEIGHTS``: ``weights`` is that key, ``read(path)`` a function that reads
  the state dict of a file safely. Optional: without it, the backbone has no pretrained weights;
- ``pixel_mean`` and ``pixel_std``, three numbers each, for pixel values from 0 to 255: what its pretrained weights
  expect. Optional; used where ``MODEL.PIXEL_MEAN`` and ``PIXEL_STD`` have their defaults.
"""
