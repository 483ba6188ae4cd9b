# SPDX-License-Identifier: Apache-2.0
"""The old name of ``cpvt_det.builders``, until version 1.0."""

from cpvt_det.builders import *  # noqa: F403
from cpvt_det.builders import __all__  # noqa: F401
from cpvt_det.builders import build_schedule as build_length  # noqa: F401
from cpvt_det.checkpoint.initial import load_initial_weights  # noqa: F401
from cpvt_det.checkpoint.trained import Trained, load_trained  # noqa: F401
