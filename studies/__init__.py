# SPDX-License-Identifier: Apache-2.0
"""Research with the package, beside it: plans and records of studies, the articles' ablations and pictures.

``python -m studies --help``, in a checkout; none of it is installed with the package.
"""
