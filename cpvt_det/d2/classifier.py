# SPDX-License-Identifier: Apache-2.0
"""Classifiers as detectron2's meta architectures: list of dicts in, scores out. Our runner trains them, as detectors."""

from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor

from cpvt_det import builders
from cpvt_det.checkpoint.load import load_backbone_weights
from cpvt_det.d2.backbone import build_detector_backbone
from cpvt_det.inference import classify


class ClassifierProtocol:
    """detectron2's interface for a classifier of the core; it comes before the classifier in the list of base classes."""

    @classmethod
    def from_config(cls, cfg: CfgNode) -> dict[str, Any]:
        """A config with ``MODEL.NUM_CLASSES`` -> the constructor's arguments.

        Without ``MODEL.WEIGHTS`` the backbone gets the weights ``MODEL.BACKBONE.WEIGHTS``.
        """
        _, arguments = builders.detector_arguments(cfg, build_detector_backbone(cfg))
        backbone = cfg.MODEL.BACKBONE
        if backbone.WEIGHTS and not cfg.MODEL.WEIGHTS:
            load_backbone_weights(arguments["backbone"], backbone.WEIGHTS, backbone.NAME)
        return arguments

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return self.pixel_mean.device

    def forward(self, inputs: list[dict] | Tensor, *arguments: Any) -> Any:
        """detectron2's forward for a list of dicts, the core's for a tensor of images.

        Args:
            inputs: dicts, in evaluation, with ``image`` (3, h, w) in [0, 255]; or normalised images (B, 3, H, W).
            arguments: what follows in :meth:`cpvt_det.models.Classifier.forward`; only with a tensor of images.

        Returns:
            For dicts, ``[{"scores": (K,)}]``; for a tensor, :class:`cpvt_det.models.classifier.ClassLogits`.

        Raises:
            TypeError: dicts in training.
        """
        if isinstance(inputs, Tensor):
            return super().forward(inputs, *arguments)
        if self.training:
            raise TypeError("detectron2's own training loop cannot train a classifier; cpvt-det train can, with its trainer too")
        return [{"scores": scores} for scores in classify(self, inputs)]
