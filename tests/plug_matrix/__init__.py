# SPDX-License-Identifier: Apache-2.0
"""``add_peg`` tried on a tiny random model of every family, as a table of families and checks; from a checkout::

    PYTHONPATH=tests python -m plug_matrix

What it needs of other projects it replaces where it runs, in ``sys.modules`` and in ``torchvision.__version__``: not for a library.
"""
