# SPDX-License-Identifier: Apache-2.0
from .common.data import dataloader
from .common.optim import lr_multiplier, optimizer
from .common.train import train
from .models.detr_r50 import model

model.position.name = "sine+peg"
model.decoder_position = "same"  # the encoder has the same sine map
train.output_dir = "output/lazy/detr_r50_sine+peg"
