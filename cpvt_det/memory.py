# SPDX-License-Identifier: Apache-2.0
"""Current and peak memory of this process."""

import contextlib
import ctypes
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # on Windows
    resource = None


def trim_heap() -> None:
    """Return freed memory that glibc keeps to the system; otherwise later allocations reuse it and cannot be measured."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Start a new count of the peak, on Linux; elsewhere the peak remains that of the whole process, with its imports."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> int:
    """Peak memory in bytes since :func:`reset_peak`; 0 where the system does not report it."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM:") or (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit if resource else 0)


def resident() -> int:
    """Current memory in bytes; the peak where the system reports nothing else."""
    return _status("VmRSS:") or peak()


def _status(key: str) -> int | None:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024
    return None
