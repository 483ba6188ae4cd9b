# SPDX-License-Identifier: Apache-2.0
"""AdamW, learning rate 2e-4 and 2e-5 for the backbone, x0.1 at epoch 11 of 12, batch 16."""

from .optim import lr_multiplier, optimizer

optimizer.lr = 2e-4
lr_multiplier.scheduler.milestones = [81322, 88715]
