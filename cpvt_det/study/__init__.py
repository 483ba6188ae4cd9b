# SPDX-License-Identifier: Apache-2.0
"""Train the runs of one plan and compare them: ``cpvt-det study``."""
