# SPDX-License-Identifier: Apache-2.0
"""How numba's kernels are compiled and run here.

Kernels release the interpreter lock and run on a small pool of Python threads: numba's own threading layers do not survive a
fork, or may not be called from two threads at once.
"""

import functools
import logging
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import torch

from cpvt_det.errors import first_line

logger = logging.getLogger("cpvt_det")
SMALL_WORK = 1 << 18  # multiplications, below which handing work to a thread costs more than it saves


class Kernel:
    """A function compiled at its first call. The result is kept on disk, where that can be done and read back."""

    def __init__(self, function: Callable):
        self.function = function
        try:
            self.compiled = self._compile(cache=True)
        except RuntimeError:  # there is no folder that could be written to
            self.compiled = self._compile(cache=False)

    def __call__(self, *args):
        try:
            return self.compiled(*args)
        except (OSError, EOFError, pickle.UnpicklingError) as error:  # of the files; the compiled code raises nothing
            logger.warning("A kernel is compiled anew, its cache cannot be used: %s", first_line(error))
            self.compiled = self._compile(cache=False)
            return self.compiled(*args)

    def _compile(self, cache: bool) -> Callable:
        return numba.njit(cache=cache, nogil=True, error_model="numpy")(self.function)


def cut(length: int, work: int) -> list[tuple[int, int]]:
    """Cut ``range(length)`` into a piece for each thread that torch may use, or leave it whole where the work is small."""
    pieces = min(torch.get_num_threads(), length, max(1, work // SMALL_WORK))
    if pieces == 1:
        return [(0, length)]
    return [(length * i // pieces, length * (i + 1) // pieces) for i in range(pieces)]


def run(kernel: Callable, arrays: tuple, pieces: list[tuple[int, int]]) -> list:
    """Call the kernel on every piece, the first of them on this thread."""
    if len(pieces) == 1:
        return [kernel(*arrays, *pieces[0])]
    others = [_pool().submit(kernel, *arrays, *piece) for piece in pieces[1:]]
    return [kernel(*arrays, *pieces[0]), *(other.result() for other in others)]


@functools.cache
def _pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="cpvt_det")


if hasattr(os, "register_at_fork"):  # not on Windows, which does not fork
    os.register_at_fork(after_in_child=_pool.cache_clear)  # threads do not live on in a child
