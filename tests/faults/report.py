# SPDX-License-Identifier: Apache-2.0
"""``docs/reliability.md`` from the modules beside this file."""

import importlib
import inspect
import pkgutil
import re
from pathlib import Path
from types import ModuleType

import faults
from faults.case import Case
from faults.mutate import all_rows, killed_rows

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "reliability.md"
HEAD = """\
# Failure handling: what goes wrong, its exit code and message

Every row is a test in `tests/whole/test_faults.py`: it creates the fault, runs the command, and compares exit code and message.
Exit code 2 means bad input that the user can fix, reported without a traceback; 0 means that the run works. An error's name
instead of a code marks a call in Python. Only the beginning of a message is shown; "..." stands for what varies.

Where code refuses or repairs the fault, the row names it as a guard. `PYTHONPATH=tests python -m faults.mutate --write` removes
each guard from a copy of the package, where the row must then fail: {killed} of {guarded} did ([how each
ended](../tests/faults/mutants.json); [survivors.md](../tests/faults/survivors.md) has the rest). `PYTHONPATH=tests python -m
faults.report` writes this page from `tests/faults/`.
"""
WORDS = {0: 6}
"""Exit code -> how many words of a message are shown; for the others, 8."""


def areas() -> list[ModuleType]:
    """The modules of this package that have ``CASES``, by name."""
    names = sorted(module.name for module in pkgutil.iter_modules(faults.__path__))
    modules = [importlib.import_module(f"faults.{name}") for name in names]
    return [module for module in modules if hasattr(module, "CASES")]


def section(area: ModuleType) -> str:
    """An area's docstring under its title, and its rows by exit code; those with the same message share a line."""
    title, _, text = inspect.getdoc(area).partition("\n")
    parts = [f"## {title.rstrip('.')}", text.strip()]
    for code in dict.fromkeys(case.code for case in area.CASES):
        by_message: dict[str, list[str]] = {}
        for case in area.CASES:
            if case.code == code:
                by_message.setdefault(_message(case) or f" ({case.what})", []).append(_escaped(case.what))
        lines = [f"- {'; '.join(inputs)}{message if message.startswith(':') else ''}" for message, inputs in by_message.items()]
        parts += [f"{'Exit code ' if isinstance(code, int) else ''}{code}:", "\n".join(lines)]
    return "\n\n".join(part for part in parts if part)


def report() -> str:
    """The whole document."""
    rows = all_rows()
    head = HEAD.format(guarded=sum(bool(case.cuts) for case in rows.values()), killed=len(killed_rows(rows)))
    return "\n\n".join([head.strip(), *map(section, areas())]) + "\n"


def _message(case: Case) -> str:
    """The beginning of a row's message, as code: to where it varies, if that is not at once, and so many words."""
    first = case.says.partition("...")[0]
    text = first if len(first.split()) > 2 else case.says
    words = text.replace("`", "'").split()
    shown = words[: WORDS.get(case.code, 8)]
    return f": `{' '.join(shown)}{' ...' * (len(shown) < len(words))}`" if shown else ""


def _escaped(text: str) -> str:
    return re.sub(r"(?<!\w)_|_(?!\w)|[*<`]", r"\\\g<0>", text.replace("\n", " "))


if __name__ == "__main__":
    DOCUMENT.write_text(report(), encoding="utf-8")
