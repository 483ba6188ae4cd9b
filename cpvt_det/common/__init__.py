# SPDX-License-Identifier: Apache-2.0
"""Code that all packages share and that does not depend on any model: boxes, structures, classes, errors, files, memory,
registries."""
