# SPDX-License-Identifier: Apache-2.0
"""What this process holds in memory, and what it held at most."""

import contextlib
import ctypes
import sys
from pathlib import Path

try:
    import resource
except ImportError:  # on Windows
    resource = None


def trim_heap() -> None:
    """Return freed memory to the system, where glibc kept it: it would hide what comes next."""
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Linux then counts the peak from here; elsewhere it stays the process's own, import and all."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> int:
    """Bytes, the most since :func:`reset_peak`; 0 where the system does not tell."""
    unit = 1 if sys.platform == "darwin" else 1024
    return _status("VmHWM:") or (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit if resource else 0)


def resident() -> int:
    """Bytes now; the peak where the system tells no more."""
    return _status("VmRSS:") or peak()


def _status(key: str) -> int | None:
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith(key)).split()[1]) * 1024
    return None
