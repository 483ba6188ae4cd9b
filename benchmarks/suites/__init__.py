# SPDX-License-Identifier: Apache-2.0
"""One file for each suite: ``TITLE``, ``PLANS`` (``quick`` and ``full``) and ``cases(options) -> list[Case]``."""

import importlib
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from benchmarks.harness import Case
from cpvt_det.common.errors import UnknownNameError

SIZES = ("quick", "default", "all")


@dataclass(frozen=True)
class Options:
    """The options of a run, from which a suite makes its cases.

    Args:
        device: ``cpu`` or ``cuda``.
        threads: threads per contender.
        size: ``quick`` (under a minute), ``default`` or ``all``.
        peers: name -> folder of a checkout, or ``None`` for a library.
        busy: True: the run was allowed beside other work.
        load_average: load average of a minute before the run; ``None`` if it is not known.
    """

    device: str = "cpu"
    threads: int = 1
    size: str = "default"
    peers: dict[str, Path | None] = field(default_factory=dict)
    busy: bool = False
    load_average: float | None = None


def known_suites() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(__path__))


def find_suite(name: str) -> ModuleType:
    """Raises: UnknownNameError: a name without a file in this folder."""
    if name not in known_suites():
        raise UnknownNameError("suite", name, known_suites())
    return importlib.import_module(f"{__name__}.{name}")


def find_case(cases: Iterable[Case], name: str) -> Case:
    """Raises: UnknownNameError: a name that no case of this size has."""
    found = {case.name: case for case in cases}
    if name not in found:
        raise UnknownNameError("case", name, found)
    return found[name]
