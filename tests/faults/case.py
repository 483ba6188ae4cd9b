# SPDX-License-Identifier: Apache-2.0
"""A row of a table of faults."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner

from cpvt_det.cli import main


class Ending(NamedTuple):
    """How a command ended: its exit code, and all that it printed; or for a call in Python, the name of its error and its text."""

    code: int | str
    text: str


@dataclass(frozen=True)
class Cut:
    """A guard of the package, and how it is taken out.

    Attributes:
        file: path of the file below ``cpvt_det/``.
        old: text that stands there exactly once.
        new: text in its place, without the guard.
    """

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        what: the input, in words; the name of the test.
        run: given an empty folder, makes the fault and meets it as a user would; it looks at what was done, too.
        says: a part of what is printed, to the letter. "..." stands for anything, "" for nothing to look for.
        code: the exit code; for a call in Python, the name of its error, or "none".
        guard: what refuses or repairs the fault. Without all of these together the row fails: ``faults/mutate.py`` tries it. For an
            input that nothing in particular has to guard, the reason.
        survives: the reason why the row passes without its guard all the same; empty where it fails.
    """

    what: str
    run: Callable[[Path], Ending]
    says: str
    code: int | str = 2
    guard: Cut | tuple[Cut, ...] | str = ""
    survives: str = ""

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """All that is taken out together; empty for a row without a guard."""
        return (self.guard,) if isinstance(self.guard, Cut) else () if isinstance(self.guard, str) else self.guard

    def contradiction(self, ending: Ending) -> str:
        """Where an ending differs from the row; empty where it does not."""
        if ending.code != self.code:
            return f"ended with {ending.code}, not {self.code}: {ending.text}"
        parts = map(re.escape, self.says.split("..."))
        return "" if re.search(".*".join(parts), ending.text, re.DOTALL) else f"does not say {self.says!r}: {ending.text}"


def call(*words: object) -> Ending:
    """``cpvt-det WORDS``, in this process."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    return Ending(result.exit_code, result.output)
