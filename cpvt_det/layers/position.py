# SPDX-License-Identifier: Apache-2.0
"""The old name of ``cpvt_det.position``, until version 1.0."""

from cpvt_det.position.learned import LearnedEncoding  # noqa: F401
from cpvt_det.position.peg import PEGEncoding  # noqa: F401
from cpvt_det.position.registry import *  # noqa: F403
from cpvt_det.position.sine import SineEncoding, sines  # noqa: F401
