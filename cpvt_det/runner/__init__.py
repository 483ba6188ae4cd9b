# SPDX-License-Identifier: Apache-2.0
"""The built-in runner: training and evaluation without detectron2."""
