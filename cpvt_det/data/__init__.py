# SPDX-License-Identifier: Apache-2.0
"""Data sets: files -> samples."""
