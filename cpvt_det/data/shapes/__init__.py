# SPDX-License-Identifier: Apache-2.0
"""A data set of drawn shapes, to train without a download."""
