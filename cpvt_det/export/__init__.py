# SPDX-License-Identifier: Apache-2.0
"""Export a trained detector as torch operators or as ONNX, to run without this package, and compare the two."""
