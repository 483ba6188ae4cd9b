#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Train and evaluate with or without detectron2: the same function as ``cpvt-det train``."""

from cpvt_det.cli.train import train

if __name__ == "__main__":
    train(prog_name="train_net.py")
