# SPDX-License-Identifier: Apache-2.0
"""A trained detector -> a program of torch's operators, or an ONNX file, that runs without this package and is compared with it."""
