# SPDX-License-Identifier: Apache-2.0
"""What every room uses, and nothing of a model: boxes, structures, classes, errors, files, memory, processes, registries."""
