# SPDX-License-Identifier: Apache-2.0
"""``docs/reliability.md`` from the modules beside this file."""

import importlib
import inspect
import pkgutil
from pathlib import Path
from types import ModuleType

from tabulate import tabulate

import faults
from faults.mutate import all_rows, killed_rows

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
HEAD = """\
# Failure handling: what goes wrong, its exit code and message

Every row is a test: `tests/whole/test_faults.py` makes the fault, runs the command and looks for exit code and message; "..."
replaces what differs between machines. Rows of images, boxes and figures also compare what is then read or written with what was
drawn. Exit code 0 is a run that works, 2 is bad input that the user can fix, reported without a traceback. A row that begins with
the name of a function is a call in Python, with its exception in place of an exit code.

Every row that refuses or repairs something names the guard that does it. `PYTHONPATH=tests python -m faults.mutate --write` takes
each guard out of a copy of the package, and the row has to fail there: {killed} of {guarded} did
([how each ended](../tests/faults/mutants.json); [survivors.md](../tests/faults/survivors.md) has the rest, with reasons).

This file is written by `PYTHONPATH=tests python -m faults.report` from the tables in `tests/faults/`.
"""


def areas() -> list[ModuleType]:
    """The modules of this package that have ``CASES``, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(faults.__path__))
    modules = [importlib.import_module(f"faults.{name}") for name in names]
    return [module for module in modules if hasattr(module, "CASES")]


def section(area: ModuleType) -> str:
    """An area's docstring under its title, and its table."""
    title, _, text = inspect.getdoc(area).partition("\n")
    parts = [f"## {title.rstrip('.')}", text.strip()]
    rows = [(_cell(case.what), case.code, _cell(case.says)) for case in area.CASES]
    if rows:
        parts.append(tabulate(rows, ("input", "exit code", "message"), tablefmt="pipe", disable_numparse=True))
    return "\n\n".join(part for part in parts if part)


def report() -> str:
    """The whole document."""
    rows = all_rows()
    head = HEAD.format(guarded=sum(bool(case.cuts) for case in rows.values()), killed=len(killed_rows(rows)))
    return "\n\n".join([head.strip(), *map(section, areas())]) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


if __name__ == "__main__":
    DOCUMENT.write_text(report(), encoding="utf-8")
