# SPDX-License-Identifier: Apache-2.0
"""Backbones: feature maps of an image, by stride."""
