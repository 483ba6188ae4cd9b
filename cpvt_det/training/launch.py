# SPDX-License-Identifier: Apache-2.0
"""Run in one or several processes, started by ``torchrun`` or another launcher, or on this machine with ``--num-gpus N``."""

import contextlib
import logging
import os
import signal
import socket
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cpvt_det.common import distributed
from cpvt_det.common.errors import ConfigError, RunStoppedError, exit_code, first_line
from cpvt_det.training.launchers import is_of_torchrun, variables_of_group

OF_GLOO = ("gloo/transport", "pair closure")
"""Texts that identify the errors of gloo's collectives, which have no exception type of their own."""


def launch(main: Callable[..., Any], num_gpus: int | None, *args: Any) -> Any:
    """Call ``main(*args)`` in every process of the run; in it, :func:`process_group` connects the processes.

    Under ``torchrun``, or if another launcher started several processes and ``MASTER_ADDR`` and ``MASTER_PORT`` are set, this
    process is one of them, and ``num_gpus`` is ignored. Otherwise it starts ``num_gpus`` processes.

    Args:
        main: function that new processes can import by name.
        num_gpus: number of GPUs and processes; ``None`` for one GPU if torch finds any; 0 for the CPU.
        args: arguments of ``main``, which must be picklable.

    Returns:
        The return value of ``main`` in the first process.

    Raises:
        ConfigError: more GPUs requested than torch finds, or another launcher started several processes without setting
            ``MASTER_ADDR`` and ``MASTER_PORT``.
        RunStoppedError: a process that was killed; the others are stopped too.
    """
    require_gpus(num_gpus)
    variables = {} if is_of_torchrun() else variables_of_group(os.environ)
    os.environ.update(variables)
    if is_of_torchrun() or variables or num_gpus is None or num_gpus < 2:
        return main(*args)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would log its own traceback
    config = LaunchConfig(1, 1, num_gpus, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)  # no restart
    try:
        return elastic_launch(config, main)(*args)[0]
    except SignalException as error:  # the processes had time to save
        raise SystemExit(exit_code(error.sigval)) from None
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode >= 0:  # the process has already printed the error
            raise SystemExit(failure.exitcode) from None
        name = signal.Signals(-failure.exitcode).name
        raise RunStoppedError(
            f"process {rank} of the run (pid {failure.pid}) was ended by {name}; the others were stopped"
        ) from None


def require_gpus(num_gpus: int | None) -> None:
    """Refuse a request for more GPUs than torch finds.

    Raises:
        ConfigError: more GPUs requested than torch finds.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus is not None and num_gpus > available:
        raise ConfigError(f"--num-gpus {num_gpus}, but torch sees {available} CUDA GPUs; use --num-gpus {available}")


@contextlib.contextmanager
def process_group(seconds: float) -> Iterator[None]:
    """Within this block, join the process group that the environment variables describe; a process that runs alone joins none.

    Args:
        seconds: time that a collective waits for the other processes before it fails.

    Raises:
        ConfigError: a time below a second.
        RunStoppedError: processes that did not connect within this time, or that later were lost or did not answer.
    """
    if seconds < 1:
        raise ConfigError(f"SOLVER.COLLECTIVE_TIMEOUT must be at least 1 second, got {seconds:g}")
    if not (is_of_torchrun() or "RANK" in variables_of_group(os.environ)):
        yield
        return
    has_gpus, timeout = torch.cuda.is_available(), timedelta(seconds=seconds)
    place = f"process {os.environ['RANK']} of {os.environ['WORLD_SIZE']}"
    try:
        store, rank, size = next(dist.rendezvous("env://", timeout=timeout))
        if os.environ.get("GROUP_WORLD_SIZE") == "1":  # a single torchrun keeps its store over restarts, with dead addresses
            store = dist.PrefixStore(os.environ["TORCHELASTIC_RESTART_COUNT"], store)
        backend = "cpu:gloo,cuda:nccl" if has_gpus else "gloo"  # MODEL.DEVICE may be cpu
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)
    except RuntimeError as error:  # torch's own errors among them
        raise RunStoppedError(
            f"{place} has not met the others at {os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']} ({first_line(error)})"
        ) from error
    try:
        # Launchers other than torchrun may leave these variables out.
        hosts = distributed.gather_objects(socket.gethostname())
        here = [other for other, host in enumerate(hosts) if host == hosts[rank]]
        os.environ.setdefault("LOCAL_RANK", str(here.index(rank)))
        os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(here)))
        if has_gpus:
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        yield
        distributed.all_reduce_max(0)  # the first process may hold the store, so it must not end before the others
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(word in str(error) for word in OF_GLOO):
            raise
        raise RunStoppedError(
            f"{place} has lost another one, or waited for it for more than {seconds:g} s (SOLVER.COLLECTIVE_TIMEOUT): look at what "
            f"that one printed; --resume continues ({first_line(error)})"
        ) from error
    finally:
        dist.destroy_process_group()
