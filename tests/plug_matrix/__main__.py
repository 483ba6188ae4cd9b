# SPDX-License-Identifier: Apache-2.0
"""``PYTHONPATH=tests python -m plug_matrix``."""

from plug_matrix.table import main

main()
