# SPDX-License-Identifier: Apache-2.0
"""Context manager that disables Python's garbage collector."""

import gc
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
