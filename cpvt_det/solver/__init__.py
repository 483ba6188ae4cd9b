# SPDX-License-Identifier: Apache-2.0
"""What both runners train with: parameter groups, schedule, step, moving average."""
