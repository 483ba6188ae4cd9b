# SPDX-License-Identifier: Apache-2.0
"""Kernels, and the choice between them: deformable attention, convolutions, matrix products, dropout, non-maximum suppression.

Importing this package keeps torch working after the fork of a process that has already used it, as in ``gunicorn --preload``,
Celery or multiprocessing. A child has none of its parent's threads, and GCC's OpenMP would wait for these threads forever. So the
threads are ended before the fork. Parent and child then start new threads for their next computation.
"""

import ctypes
import os

import torch

from cpvt_det.ops.deformable_attention import ms_deform_attn

__all__ = ["ms_deform_attn"]

SOFT = 1
"""OpenMP's code for ending its threads while keeping its settings."""


def end_threads_at_forks() -> None:
    """From now on, before each fork, end the compute threads of the thread that forks."""
    if hasattr(os, "register_at_fork"):
        hooks = _Hooks()
        os.register_at_fork(before=hooks.before, after_in_parent=hooks.after_in_parent, after_in_child=hooks.after_in_child)


class _Hooks:
    def __init__(self) -> None:
        try:
            self._end_threads = ctypes.CDLL(torch._C.__file__).omp_pause_resource_all
        except (OSError, AttributeError):  # an older OpenMP, or none
            self._end_threads = lambda kind: -1
        self._have_ended = False

    def before(self) -> None:
        self._have_ended = self._end_threads(SOFT) == 0

    def after_in_parent(self) -> None:
        self._have_ended = False  # a fork in C, as in uWSGI, does not call `before`

    def after_in_child(self) -> None:
        if not self._have_ended:
            torch.set_num_threads(1)  # a team of one waits for no other thread
        self._have_ended = False


end_threads_at_forks()
