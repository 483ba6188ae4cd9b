# SPDX-License-Identifier: Apache-2.0
"""Environment variables that limit the threads of numerical libraries. This module imports none: they are read at import."""

THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


def thread_environment(threads: int) -> dict[str, str]:
    return dict.fromkeys(THREAD_VARIABLES, str(threads))
