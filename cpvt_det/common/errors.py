# SPDX-License-Identifier: Apache-2.0
"""Errors that the user can fix, reported in one line. The command line exits with code 2 on them.

Two other errors end a run whose input was correct. :class:`RunStoppedError` exits with code 1, and :class:`InterruptedRun` exits
with the code of its signal. Layers that are called with tensors of a wrong shape or dtype raise a plain ``ValueError`` or
``TypeError``.
"""

import contextlib
import difflib
import signal
from collections.abc import Iterable, Iterator


class BadInputError(ValueError):
    """Wrong input from outside the program; the message says what is wrong and how to fix it."""


class ConfigError(BadInputError):
    """A config key or value that cannot be used."""


class DataError(BadInputError):
    """A data file that cannot be used; the message names the file and, if possible, the image or annotation."""


class UnreachableError(DataError):
    """A file that cannot be read now but may be later, because its mount, its server or the network is down."""


class MissingFileError(UnreachableError):
    """A file that does not exist."""


class DataFaultsError(DataError):
    """Several faults in the data, one per line."""


class WeightsError(BadInputError):
    """Weights that cannot be read or do not fit."""


class MapSizeError(BadInputError):
    """A feature map that is larger than a position encoding supports, or a canvas that is larger than the canvas for which an
    exported program was made.
    """


class RunStoppedError(RuntimeError):
    """A run that cannot continue although its input was correct; the message contains the reason and what was saved."""


class DeadWorkerError(RunStoppedError):
    """A data worker that died, or data workers that no longer respond; the state of the run is intact."""


class InterruptedRun(KeyboardInterrupt):
    """A run that saved a checkpoint and ended because of a signal.

    Args:
        signum: number of the signal.
        message: what was saved, and how to continue.
    """

    def __init__(self, signum: int, message: str):
        super().__init__(f"interrupted by {signal.Signals(signum).name}: {message}")
        self.exit_code = exit_code(signum)


class UnknownNameError(ConfigError, KeyError):
    """A name that is not registered; the message lists the known names.

    Args:
        kind: what the name should refer to, such as "position encoding".
        name: the unknown name.
        known: the known names.
        otherwise: advice in case the name is not just misspelt.
    """

    def __init__(self, kind: str, name: object, known: Iterable[str], otherwise: str = ""):
        known = sorted(known)
        close = difflib.get_close_matches(str(name), known, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        way_out = f"; {otherwise}" if otherwise else ""
        super().__init__(f"unknown {kind} {name!r}{hint}; known: {', '.join(known) or 'none'}{way_out}")

    __str__ = ValueError.__str__  # KeyError would print the repr


def exit_code(signum: int) -> int:
    """The exit code that a shell reports for a process ended by a signal: 130 for SIGINT, 143 for SIGTERM."""
    return 128 + signum


def counted(number: float, noun: str) -> str:
    """A rounded number and its noun, in the plural where needed: ``1 image``, ``3 images`` or, for ``box``, ``0 boxes``."""
    plural = noun + ("es" if noun.endswith("x") else "s")
    return f"{number:.0f} {noun if round(number) == 1 else plural}"


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or the error's type if it has no text. For an error from a data worker, the original
    error's text is used.
    """
    text = str(error).strip() or type(error).__name__
    if text.startswith("Caught ") and "Original Traceback" in text:
        return text.splitlines()[-1].partition(": ")[2]
    return text.splitlines()[0]


@contextlib.contextmanager
def output_errors(output: object) -> Iterator[None]:
    """Turn operating-system errors in the block into config errors, because the folder ``output`` was set in the config."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"cannot write to OUTPUT_DIR {output}: {error.strerror}; set another OUTPUT_DIR") from error


@contextlib.contextmanager
def config_errors(where: str) -> Iterator[None]:
    """Turn errors of constructors in the block into config errors, because their arguments were set in the config."""
    try:
        yield
    except BadInputError:
        raise
    except (ValueError, TypeError, RuntimeError) as error:
        raise ConfigError(f"{where}: {first_line(error)}") from error
