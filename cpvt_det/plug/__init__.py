# SPDX-License-Identifier: Apache-2.0
"""PEG for models that are not ours: ``add_peg``, ``remove_peg``, ``fold_peg`` and ``peg_report``.

``attach.py`` is what a user calls, ``families.py`` the table of the models it knows, ``hooks.py`` what then runs in a forward
pass. No family's library is imported here: a model is known by the name of its class.
"""

from cpvt_det.plug.attach import add_peg, fold_peg, peg_report, remove_peg
from cpvt_det.plug.hooks import PlugError

__all__ = ["PlugError", "add_peg", "fold_peg", "peg_report", "remove_peg"]
