# SPDX-License-Identifier: Apache-2.0
"""12 epochs x 118,287 images / 16 images per iteration = 88,715 iterations; evaluation every 4 epochs."""

from .train import train

train.max_iter = 88715
train.eval_period = 29572
