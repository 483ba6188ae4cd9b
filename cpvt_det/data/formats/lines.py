# SPDX-License-Identifier: Apache-2.0
"""Text files of labels, lists and names, line by line."""

from pathlib import Path

from cpvt_det.errors import DataError, first_line


def numbered_lines(path: Path) -> list[tuple[int, str]]:
    """The number, from 1, and the text of each line that is not blank, without the blanks around it.

    Raises:
        DataError: a file that cannot be read, or that is not UTF-8.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: {first_line(error)}; save it as UTF-8") from error
    return [(number, line.strip()) for number, line in enumerate(lines, start=1) if line.strip()]


def read_lines(path: Path) -> list[str]:
    """The text of each line that is not blank, as :func:`numbered_lines`."""
    return [line for _, line in numbered_lines(path)]
