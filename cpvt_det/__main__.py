# SPDX-License-Identifier: Apache-2.0
"""``python -m cpvt_det``, for ``torchrun -m cpvt_det``."""

from cpvt_det.cli import main

main()
