# SPDX-License-Identifier: Apache-2.0
"""Entry point for ``python -m cpvt_det`` and ``torchrun -m cpvt_det``."""

from cpvt_det.cli import main

main()
