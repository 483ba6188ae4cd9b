# SPDX-License-Identifier: Apache-2.0
"""The user's own modules, which register parts: imported by ``--import MODULE``, in every process of a run.

This is a flag of the command line and never a config key: a YAML file names parts, it does not run code.
"""

import importlib
import os
import sys
from collections.abc import Iterable

from cpvt_det.errors import BadInputError, first_line

INHERITED = "CPVT_DET_IMPORT"
"""Environment variable with the modules, for processes that a command starts."""


def import_modules(names: Iterable[str]) -> None:
    """Import modules from Python's path or the current folder, here and in the processes that are started later.

    Args:
        names: module names, as in ``my_parts`` or ``my_package.parts``.

    Raises:
        BadInputError: a module that cannot be imported.
    """
    names = list(names)
    if names and "" not in sys.path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    for name in names:
        try:
            importlib.import_module(name)
        except Exception as error:  # a user's module may raise anything
            raise BadInputError(f"--import {name}: {type(error).__name__}: {first_line(error)}") from error
    known = os.environ.get(INHERITED, "").split()
    os.environ[INHERITED] = " ".join(dict.fromkeys([*known, *names]))


def import_words() -> str:
    """The ``--import`` of this command, with a space before it, for commands that are to follow it; empty without modules."""
    return "".join(f" --import {name}" for name in os.environ.get(INHERITED, "").split())


def import_inherited() -> None:
    """Import, in a process that a command started, the modules of its ``--import``."""
    import_modules(os.environ.get(INHERITED, "").split())
