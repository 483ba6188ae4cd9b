# SPDX-License-Identifier: Apache-2.0
from .deformable_detr_r50_official_refine_50ep import dataloader, lr_multiplier, model, optimizer, train

model.two_stage = True
train.output_dir = "output/lazy/deformable_detr_r50_official_two_stage"
