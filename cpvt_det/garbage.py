# SPDX-License-Identifier: Apache-2.0
"""Context manager that disables Python's garbage collector."""

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """For code that creates millions of dicts, none in a cycle: searching them for cycles takes a fifth to a third of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def quick_imports() -> Iterator[None]:
    """For a program's imports of large packages, which stay: nothing is looked through for cycles while they come, and they never.

    With torch and torchvision that is a third of the time. What the process holds at the end is never collected, so this is for
    commands, not for functions that others call.
    """
    before = len(sys.modules)
    with no_garbage_collection():
        yield
        if len(sys.modules) > before:
            gc.freeze()
