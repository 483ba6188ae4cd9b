# SPDX-License-Identifier: Apache-2.0
"""Code that all packages share: boxes, structures, classes, errors, files, memory, registries."""
