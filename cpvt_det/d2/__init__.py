# SPDX-License-Identifier: Apache-2.0
# ruff: noqa: E402
"""The detectors in detectron2: importing this folder registers them. No other folder imports detectron2."""


def setup_environment() -> None:
    """Add our keys to detectron2's ``get_cfg()``; with ``DETECTRON2_ENV_MODULE=cpvt_det.d2`` detectron2 calls this on import.

    Keys that detectron2 already has keep its defaults, so that its own models do not change; our YAML sets our values for them
    (``configs/_detectron2.yaml``).

    It must be defined before the imports below: if this package is imported before detectron2, they import detectron2, which calls
    this function immediately.
    """
    from detectron2.config.defaults import _C

    from cpvt_det.d2.config import add_keys

    add_keys(_C, with_known=False)


from detectron2.data import DatasetCatalog

from cpvt_det.d2.backbones import Detectron2Backbone, VisionPyramid
from cpvt_det.d2.config import add_cpvt_det_config, add_peg_config
from cpvt_det.d2.data import register_datasets
from cpvt_det.d2.meta_arch import CPVTDeformableDetr, CPVTDetr
from cpvt_det.data.catalog import builtin_datasets

register_datasets(files for files in builtin_datasets() if files.name not in DatasetCatalog.list())

__all__ = [
    "CPVTDeformableDetr",
    "CPVTDetr",
    "Detectron2Backbone",
    "VisionPyramid",
    "add_cpvt_det_config",
    "add_peg_config",
    "setup_environment",
]
