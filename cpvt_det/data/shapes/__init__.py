# SPDX-License-Identifier: Apache-2.0
"""A data set of shapes, drawn: to train on without a download."""
