# SPDX-License-Identifier: Apache-2.0
from .common.data import dataloader
from .common.optim_12ep import lr_multiplier, optimizer
from .common.train_12ep import train
from .models.deformable_detr_r50_pp import model

model.position.name = "sine_offset"
model.transformer.mixed_supervision = True
model.criterion.class_weight = 1.0
dataloader.train.total_batch_size = 16
train.output_dir = "output/lazy/ms_deformable_detr_r50_pp_sine_offset"
