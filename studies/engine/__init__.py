# SPDX-License-Identifier: Apache-2.0
"""Train the runs of one plan, and compare them: ``python -m studies run PLAN`` and ``report PLAN``."""
