# SPDX-License-Identifier: Apache-2.0
"""Compile and run numba's kernels.

Kernels release the interpreter lock and run in torch's own threads or, if torch's threads cannot be used, in a pool of Python
threads. numba's own threading layers either do not survive a fork or must not be called from two threads at once.
"""

import contextlib
import ctypes
import functools
import logging
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numba
import torch

from cpvt_det.common.errors import first_line
from cpvt_det.ops.routes import is_on

logger = logging.getLogger("cpvt_det")
_PROCESS = os.getpid()
SMALL_WORK = 1 << 18  # number of multiplications below which handing work to a thread costs more than it saves


class Kernel:
    """A function that is compiled at its first call. The result is cached on disk if the cache can be written and read."""

    def __init__(self, function: Callable):
        self.function = function
        try:
            self.compiled = self._compile(cache=True)
        except RuntimeError:  # there is no writable folder
            self.compiled = self._compile(cache=False)

    def __call__(self, *args):
        try:
            return self.compiled(*args)
        except (OSError, EOFError, pickle.UnpicklingError) as error:  # errors of the cache files; the compiled code raises nothing
            logger.warning("A kernel is compiled again, because its cache cannot be read: %s", first_line(error))
            self.compiled = self._compile(cache=False)
            return self.compiled(*args)

    def _compile(self, cache: bool) -> Callable:
        return numba.njit(cache=cache, nogil=True, error_model="numpy")(self.function)


inlined = numba.njit(nogil=True, error_model="numpy", forceinline=True)
"""Decorator for a function that is inlined into the kernels that call it."""


def cut(length: int, work: int) -> list[tuple[int, int]]:
    """Cut ``range(length)`` into one piece per thread that torch may use, or into fewer if there is little work."""
    pieces = min(torch.get_num_threads(), length, max(1, work // SMALL_WORK))
    if pieces == 1:
        return [(0, length)]
    return [(length * i // pieces, length * (i + 1) // pieces) for i in range(pieces)]


def run(kernel: Callable, arrays: tuple, pieces: list[tuple[int, int]]) -> list:
    """Call the kernel on every piece, each in its own thread.

    Returns:
        The result of each call.
    """
    if len(pieces) == 1:
        return [kernel(*arrays, *pieces[0])]
    return _map_in_threads(os.getpid())(lambda piece: kernel(*arrays, *piece), pieces)


class TorchThreads:
    """The threads of torch's own OpenMP library. They are used through the functions to which GCC compiles ``omp parallel``.

    After each parallel section of torch, these threads spin on their cores for milliseconds while they wait for the next one. Any
    additional threads would get only half a core each.

    Args:
        library: path of a library that is linked with that OpenMP library.

    Raises:
        OSError, AttributeError: the library does not exist, or OpenMP's functions are missing from it.
    """

    _WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

    def __init__(self, library: str):
        self._parallel = ctypes.CDLL(library).GOMP_parallel
        self._parallel.argtypes, self._parallel.restype = (self._WORK, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint), None

    def map(self, function: Callable, items: list) -> list:
        """``[function(item) for item in items]``; each thread takes the next free item until there is none left.

        Raises:
            Exception: the exception that ``function`` raised, after all threads have ended.
        """
        waiting = iter(range(len(items)))  # taking the next item is atomic, one step of the interpreter
        results, errors = [None] * len(items), []

        def work(_: int | None) -> None:
            try:
                for index in waiting:
                    results[index] = function(items[index])
            except BaseException as error:  # it would not reach the caller
                errors.append(error)

        self._parallel(self._WORK(work), None, 0, 0)  # 0: the whole team, which would otherwise be rebuilt for the next part
        work(None)  # remaining items, if a signal kept a thread from its work
        if errors:
            raise errors[0]
        return results


@functools.cache
def _map_in_threads(process: int) -> Callable[[Callable, list], list]:
    """A parallel ``map`` for this process. It depends on the process because threads do not survive a fork, and in a child OpenMP
    would wait for them forever.
    """
    if process == _PROCESS and is_on("openmp"):
        with contextlib.suppress(OSError, AttributeError):  # torch has other threads here
            return TorchThreads(torch._C.__file__).map
    pool = ThreadPoolExecutor(max_workers=os.cpu_count(), thread_name_prefix="cpvt_det")

    def map_in_pool(function: Callable, items: list) -> list:
        others = [pool.submit(function, item) for item in items[1:]]
        return [function(items[0]), *(other.result() for other in others)]

    return map_in_pool
