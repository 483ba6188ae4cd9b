#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Train and evaluate with or without detectron2: the same as ``cpvt-det train``."""

import sys

from cpvt_det.cli import main

if __name__ == "__main__":
    main(["train", *sys.argv[1:]], prog_name="train_net.py")
