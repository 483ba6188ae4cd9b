# SPDX-License-Identifier: Apache-2.0
"""PEG for models of other projects: ``add_peg``, ``remove_peg``, ``fold_peg`` and ``peg_report``.

``attach.py`` contains the functions that a user calls, ``families.py`` contains the table of known models, and ``hooks.py``
contains the code that runs in a forward pass. The models' libraries are not imported here, because a model is recognised by the
name of its class.
"""

from cpvt_det.plug.attach import add_peg, fold_peg, peg_report, remove_peg
from cpvt_det.plug.hooks import PlugError

__all__ = ["PlugError", "add_peg", "fold_peg", "peg_report", "remove_peg"]
