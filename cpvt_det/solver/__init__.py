# SPDX-License-Identifier: Apache-2.0
"""The parts of training that both runners share: parameter groups, schedule, step, moving average."""
