# SPDX-License-Identifier: Apache-2.0
"""PEG, the conditional position encoding of CPVT, in DETR and Deformable-DETR.

The path of one image from file to AP: ``data/coco.py`` -> ``data/mapper.py`` -> ``structures.py`` ->
``models/detector.py`` -> ``losses/`` (training) or ``evaluation/`` (evaluation).

``from cpvt_det import Predictor`` imports the class that runs a trained detector on images.
"""

from typing import Any

__all__ = ["Predictor", "__version__"]
__version__ = "1.0.0rc1"


def __getattr__(name: str) -> Any:
    """Import ``Predictor`` at its first use, so that importing the package is quick."""
    if name == "Predictor":
        from cpvt_det.predict import Predictor

        return Predictor
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
