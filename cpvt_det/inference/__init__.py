# SPDX-License-Identifier: Apache-2.0
"""From samples to answers: predictions of whole images and of tiles, decoded, in pixels of the original images."""

from cpvt_det.inference.answers import ClassScores, PostProcessor, classify, detect, evaluation_mode

__all__ = ["ClassScores", "PostProcessor", "classify", "detect", "evaluation_mode"]
