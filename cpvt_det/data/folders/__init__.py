# SPDX-License-Identifier: Apache-2.0
"""From a folder of images and annotations, in any known layout, to data sets that a config can name."""
