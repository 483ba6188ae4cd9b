# SPDX-License-Identifier: Apache-2.0
"""The detectors in detectron2: importing this folder registers them. No other folder imports detectron2."""

from cpvt_det.d2.backbone import Detectron2Backbone
from cpvt_det.d2.config import add_cpvt_det_config, setup_environment
from cpvt_det.d2.meta_arch import CPVTDeformableDetr, CPVTDetr
from cpvt_det.d2.peg_backbone import add_peg_config, build_peg_backbone
from cpvt_det.d2.trainer import Trainer

__all__ = [
    "CPVTDeformableDetr",
    "CPVTDetr",
    "Detectron2Backbone",
    "Trainer",
    "add_cpvt_det_config",
    "add_peg_config",
    "build_peg_backbone",
    "setup_environment",
]
