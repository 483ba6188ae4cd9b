# SPDX-License-Identifier: Apache-2.0
from .common.data import dataloader
from .common.optim_12ep import lr_multiplier, optimizer
from .common.train_12ep import train
from .models.dino_r50 import model

model.position.name = "sine_offset"
dataloader.train.total_batch_size = 16
optimizer.lr = 1e-4
optimizer.params.backbone_lr = 1e-5
optimizer.params.points_lr_multiplier = 1.0
train.output_dir = "output/lazy/dino_r50_4scale_sine_offset"
