# SPDX-License-Identifier: Apache-2.0
from .dab_deformable_detr_r50_sine_offset_50ep import dataloader, lr_multiplier, optimizer, train
from .models.deformable_detr_r50_pp import model

model.position.name = "sine_offset"
model.transformer.look_forward_twice = False
model.queries.class_proposals = True
model.queries.refined_positions = True
model.queries.scaled_positions = True
model.queries.token_content = True
model.criterion.class_weight = 1.0
train.output_dir = "output/lazy/dab_deformable_detr_r50_sine_offset_two_stage"
