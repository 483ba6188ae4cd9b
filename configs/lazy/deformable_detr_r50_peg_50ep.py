# SPDX-License-Identifier: Apache-2.0
from .common.data import dataloader
from .common.optim import lr_multiplier, optimizer
from .common.train import train
from .models.deformable_detr_r50 import model

model.position.name = "peg"
train.output_dir = "output/lazy/deformable_detr_r50_peg"
