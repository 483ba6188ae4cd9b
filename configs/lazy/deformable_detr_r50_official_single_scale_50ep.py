# SPDX-License-Identifier: Apache-2.0
from .deformable_detr_r50_official_50ep import dataloader, lr_multiplier, model, optimizer, train

model.backbone.stages = [5]
model.num_levels = 1
train.output_dir = "output/lazy/deformable_detr_r50_official_single_scale"
