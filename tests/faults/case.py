# SPDX-License-Identifier: Apache-2.0
"""A row of a table of faults."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from click.testing import CliRunner

from cpvt_det.cli import main


class Ending(NamedTuple):
    """How a command ended: its exit code, and all that it printed."""

    code: int
    text: str


@dataclass(frozen=True)
class Case:
    """One fault.

    Attributes:
        what: the input, in words; the name of the test.
        run: given an empty folder, makes the fault and meets it as a user would.
        says: a part of what is printed, to the letter. "..." stands for anything, "" for nothing to look for.
        code: the exit code.
    """

    what: str
    run: Callable[[Path], Ending]
    says: str
    code: int = 2


def call(*words: object) -> Ending:
    """``cpvt-det WORDS``, in this process."""
    result = CliRunner().invoke(main, [str(word) for word in words])
    return Ending(result.exit_code, result.output)
