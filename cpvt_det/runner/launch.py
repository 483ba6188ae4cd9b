# SPDX-License-Identifier: Apache-2.0
"""One process or several, started by ``torchrun`` or another launcher, or on this machine by ``--num-gpus N``."""

import logging
import os
import signal
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from cpvt_det import distributed
from cpvt_det.errors import ConfigError, RunStoppedError, exit_code, first_line
from cpvt_det.runner.launchers import is_of_torchrun, variables_of_group
from cpvt_det.runner.peers import Peers
from cpvt_det.runner.rounds import JOIN, Member, Round, join

AT_WORK = timedelta(days=1)
"""How long a collective waits for a process that works and gives signs of life; :class:`Peers` looks after the others."""


def launch(main: Callable[..., Any], num_gpus: int | None, *args: Any) -> Any:
    """Call ``main(*args)`` in every process of the run.

    Under ``torchrun``, or where another launcher started several and ``MASTER_ADDR`` and ``MASTER_PORT`` are set, this process is
    one of them, and ``num_gpus`` is ignored. Otherwise it starts ``num_gpus`` processes.

    Args:
        main: function that new processes can import by name.
        num_gpus: number of GPUs and processes; ``None`` for one GPU if torch finds any; 0 for the CPU.
        args: arguments of ``main``, which can be pickled.

    Returns:
        The return value of ``main`` in the first process.

    Raises:
        ConfigError: more GPUs than torch finds; a process that another launcher started as one of several without saying where the
            others are.
        RunStoppedError: a process that was killed; the others are stopped too.
    """
    require_gpus(num_gpus)
    variables = {} if is_of_torchrun() else variables_of_group(os.environ)
    os.environ.update(variables)
    if is_of_torchrun() or variables:
        return _run_in_group(main, args)
    if num_gpus is None or num_gpus < 2:
        return main(*args)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # it would log its own traceback
    config = LaunchConfig(1, 1, num_gpus, rdzv_backend="c10d", rdzv_endpoint="localhost:0", max_restarts=0)  # no restart
    try:
        return elastic_launch(config, _run_in_group)(main, args)[0]
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
    """Refuse more GPUs than there are.

    Raises:
        ConfigError: more GPUs than torch finds.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus is not None and num_gpus > available:
        raise ConfigError(f"--num-gpus {num_gpus}, but torch sees {available} CUDA GPUs; use --num-gpus {available}")


def _run_in_group(main: Callable[..., Any], args: tuple) -> Any:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    found = _join(rank, world_size, where)
    _know_this_machine(found.members, rank)
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"  # MODEL.DEVICE may be cpu
    with Peers(found, rank, where) as peers:
        dist.init_process_group(backend, store=found.store, rank=rank, world_size=world_size, timeout=AT_WORK)
        try:
            result = main(*args)
            peers.finish()
            distributed.all_reduce_max(0)  # the first process may hold the store, and must not be the first to end
            return result
        finally:
            dist.destroy_process_group()


def _join(rank: int, world_size: int, where: str) -> Round:
    try:
        store = next(dist.rendezvous("env://", timeout=timedelta(seconds=JOIN)))[0]
        return join(store, rank, world_size)
    except dist.DistError as error:
        raise RunStoppedError(
            f"process {rank} of {world_size} does not reach the store of the run at {where} ({first_line(error)}); if torchrun has "
            "replaced a machine, start all with TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"
        ) from error


def _know_this_machine(members: list[Member], rank: int) -> None:
    """Set what launchers other than torchrun may leave out."""
    here = [other for other, member in enumerate(members) if member.host == members[rank].host]
    os.environ.setdefault("LOCAL_RANK", str(here.index(rank)))
    os.environ.setdefault("LOCAL_WORLD_SIZE", str(len(here)))
