#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Train and evaluate with or without detectron2: the same function as ``cpvt-det train``."""

from cpvt_det.cli.train import train
from cpvt_det.common.memory import limit_spinning

if __name__ == "__main__":
    limit_spinning()
    train(prog_name="train_net.py")
