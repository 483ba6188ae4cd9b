# SPDX-License-Identifier: Apache-2.0
from .deformable_detr_r50_sine_offset_50ep import dataloader, lr_multiplier, model, optimizer, train

optimizer.lr = 2e-4
train.output_dir = "output/lazy/deformable_detr_r50_official"
