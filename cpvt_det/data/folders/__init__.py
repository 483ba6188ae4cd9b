# SPDX-License-Identifier: Apache-2.0
"""A folder of images and annotations, in any known layout -> data sets that a config can name."""
