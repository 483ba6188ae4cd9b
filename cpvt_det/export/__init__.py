# SPDX-License-Identifier: Apache-2.0
"""Export a trained detector to a file that runs without this package, and compare its outputs with the detector's."""
