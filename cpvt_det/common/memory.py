# SPDX-License-Identifier: Apache-2.0
"""How this process uses the machine: current and peak memory, available memory and cores, and Python's garbage collector."""

import contextlib
import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

try:
    import resource
except ImportError:  # on Windows
    resource = None


SPIN_COUNT = "10000"
GROUPS, STATUS = Path("/sys/fs/cgroup"), Path("/proc/self/status")


def usable_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def limit_spinning() -> None:
    """Let GNU OpenMP's threads, which torch has on Linux, sleep after a short wait for each other, unless the user has set
    ``OMP_WAIT_POLICY`` or ``GOMP_SPINCOUNT``; call it before importing torch.

    By default, waiting threads spin, for about 30 times as long. If another program keeps a core busy, the system then interrupts a
    thread in the middle of its work, because the thread has used up its time slice by spinning. Threads that never spin take
    1.7 times as long on free cores (``benchmarks/quickstart_time.py --beside``).
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)


def trim_heap() -> None:
    """Return the freed memory that glibc still holds to the system. Otherwise, later allocations would reuse this memory and
    could not be measured.
    """
    with contextlib.suppress(OSError, AttributeError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def reset_peak() -> None:
    """Reset the peak on Linux; on other systems, the peak covers the whole process, including its imports."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def peak() -> int:
    """Peak memory in bytes since :func:`reset_peak`; 0 where the system does not report it."""
    unit = 1 if sys.platform == "darwin" else 1024
    own = 1024 * _read_numbers(STATUS).get("VmHWM:", 0)
    return own or (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit if resource else 0)


def resident() -> int:
    """Current memory in bytes; where the system does not report it, the peak."""
    return 1024 * _read_numbers(STATUS).get("VmRSS:", 0) or peak()


def available() -> int | None:
    """Bytes that this process can still allocate: memory that is free or can be freed, plus free swap, within the limits of the
    process's control groups. ``None`` where the system does not report them.
    """
    found = _read_numbers(Path("/proc/meminfo"))
    if "MemAvailable:" not in found:
        return None
    free = 1024 * (found["MemAvailable:"] + found.get("SwapFree:", 0))
    groups: list[Path] = []
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text(encoding="ascii").splitlines()
        own = GROUPS / next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
        groups = [own, *own.parents]
    return max(0, min([free, *(room for room in map(room_in, groups) if room is not None)]))


def room_in(group: Path) -> int | None:
    """Bytes left below the limit of a version 2 control group, counting file caches as free; ``None`` if it has no limit."""
    with contextlib.suppress(OSError, ValueError):
        limit, used = (int((group / f"memory.{name}").read_text(encoding="ascii")) for name in ("max", "current"))
        return limit - used + _read_numbers(group / "memory.stat").get("inactive_file", 0)
    return None


def _read_numbers(path: Path) -> dict[str, int]:
    """Name -> number, from a file whose lines begin with a name and a number; empty if the file does not exist."""
    with contextlib.suppress(OSError):
        rows = (line.split() for line in path.read_text(encoding="ascii").splitlines())
        return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}
    return {}


@contextlib.contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection. It takes a fifth to a third of the time in code that creates millions of dicts without cycles."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextlib.contextmanager
def quick_imports() -> Iterator[None]:
    """Pause garbage collection while a program imports large packages, then permanently exempt the imported objects from it.

    For torch and torchvision this saves a third of the import time. Objects that exist at the end of the block are never collected,
    so this is for commands, not for library functions.
    """
    before = len(sys.modules)
    with no_garbage_collection():
        yield
        if len(sys.modules) > before:
            gc.freeze()
