# SPDX-License-Identifier: Apache-2.0
from .deformable_detr_r50_pp_sine_offset_12ep import dataloader, lr_multiplier, model, optimizer, train

model.queries.hybrid = 1500
train.output_dir = "output/lazy/h_deformable_detr_r50_official"
