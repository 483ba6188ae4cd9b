# SPDX-License-Identifier: Apache-2.0
"""The tiny ViTDet with PEG in place of its position table: after the first block, as in CPVT."""

from detectron2.config import LazyCall as L

from cpvt_det.plug import add_peg

from .vitdet_tiny_shapes import dataloader, lr_multiplier, model, optimizer, train

model.backbone.net = L(add_peg)(model=model.backbone.net, position="replace", zero_init=False)
train.output_dir = "output/plug/vitdet_tiny_peg"
