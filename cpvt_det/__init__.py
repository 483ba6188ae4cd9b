# SPDX-License-Identifier: Apache-2.0
"""PEG, the conditional position encoding of CPVT, in DETR and Deformable-DETR.

One image can be followed from file to AP: ``data/coco.py`` -> ``data/mapper.py`` -> ``structures.py`` ->
``models/detr.py`` -> ``losses/`` (training) or ``postprocess.py`` -> ``evaluation/`` (evaluation).
"""

__version__ = "0.1.0"
