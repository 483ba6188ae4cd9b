# SPDX-License-Identifier: Apache-2.0
"""The errors of bad input: what a user can mend, told in one line. The command line exits with code 2 on them.

Two others end a run whose input was right: :class:`RunStoppedError` with code 1, :class:`InterruptedRun` with that of its signal.
Tensors of a wrong shape or dtype, handed to a layer by hand, meet plain ``ValueError`` and ``TypeError``.
"""

import contextlib
import difflib
import signal
from collections.abc import Iterable, Iterator


class BadInputError(ValueError):
    """Something outside the program is wrong; the message says what, and the way out."""


class ConfigError(BadInputError):
    """A config key or value that cannot be used."""


class DataError(BadInputError):
    """A data file that cannot be used; the message names the file and, where it has one, the image or annotation."""


class DataFaultsError(DataError):
    """Several faults of data, of which each has a line."""


class WeightsError(BadInputError):
    """Weights that cannot be read or do not fit."""


class MapSizeError(ValueError):
    """A map that is larger than an encoding can tell the places of."""


class RunStoppedError(RuntimeError):
    """A run that cannot go on though its input was right; the message says why, and what is left of it."""


class DeadWorkerError(RunStoppedError):
    """A data worker died: what the run has reached is whole."""


class InterruptedRun(KeyboardInterrupt):
    """A run that a signal ended, after it saved.

    Args:
        signum: the signal.
        message: what was saved, and how to go on.
    """

    def __init__(self, signum: int, message: str):
        super().__init__(f"interrupted by {signal.Signals(signum).name}: {message}")
        self.exit_code = exit_code(signum)


class UnknownNameError(ConfigError, KeyError):
    """A name that nothing is registered under; the message lists what is known.

    Args:
        kind: what the name should name, as in "position encoding".
        name: the name that was asked for.
        known: the names there are.
        otherwise: way out where the name is not just misspelt.
    """

    def __init__(self, kind: str, name: object, known: Iterable[str], otherwise: str = ""):
        known = sorted(known)
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        way_out = f"; {otherwise}" if otherwise else ""
        super().__init__(f"unknown {kind} {name!r}{hint}; known: {', '.join(known)}{way_out}")

    __str__ = ValueError.__str__  # KeyError would print the repr


def exit_code(signum: int) -> int:
    """What a shell reports of a process that a signal ended: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signum


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its type where it has none; for one that a data worker sent, of its own text."""
    text = str(error).strip() or type(error).__name__
    if text.startswith("Caught ") and "Original Traceback" in text:
        return text.splitlines()[-1].partition(": ")[2]
    return text.splitlines()[0]


@contextlib.contextmanager
def config_errors(where: str) -> Iterator[None]:
    """What a constructor refuses is a fault of the config that chose its arguments."""
    try:
        yield
    except BadInputError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{where}: {first_line(error)}") from error
