# SPDX-License-Identifier: Apache-2.0
from .dino_r50_4scale_official_12ep import dataloader, lr_multiplier, model, optimizer, train

model.num_levels = 5
model.backbone.stages = [2, 3, 4, 5]
train.output_dir = "output/lazy/dino_r50_5scale_official"
