# SPDX-License-Identifier: Apache-2.0
"""Default values that the config and the constructors share. Unless noted otherwise, they are the values of DETR-R50, arXiv
2005.12872. This module imports nothing.
"""

PIXEL_MEAN = (123.675, 116.28, 103.53)
"""Mean of the R, G and B channels of ImageNet, for pixel values from 0 to 255."""
PIXEL_STD = (58.395, 57.12, 57.375)
CHANNELS = 256
HEADS = 8
LAYERS = 6
"""Number of layers in the encoder, and in the decoder."""
FFN_CHANNELS = 2048
DROPOUT = 0.1
CLASS_WEIGHT, L1_WEIGHT, GIOU_WEIGHT = 1.0, 5.0, 2.0
"""Weights of the losses and of the matching costs."""
BACKGROUND_WEIGHT = 0.1
FOCAL_ALPHA, FOCAL_GAMMA = 0.25, 2.0
MAL_GAMMA = 1.5
VARIFOCAL_ALPHA, VARIFOCAL_GAMMA = 0.75, 2.0
IA_BCE_ALPHA, IA_BCE_GAMMA = 0.25, 2.0
TEMPERATURE = 10000.0
"""Temperature of sine encodings, arXiv 2005.12872, appendix A.4."""
LEVELS = 4
POINTS = 4
"""Number of sampling points per head and level in Deformable-DETR, arXiv 2010.04159."""
HYBRID_MATCHES = 6
"""Number of hybrid-branch queries per object, arXiv 2207.13080."""
