# SPDX-License-Identifier: Apache-2.0
"""One process or several, started by ``torchrun``, or on this machine by ``--num-gpus N``."""

import logging
import os
import signal
import uuid
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from cpvt_det.errors import ConfigError, RunStoppedError, exit_code
from cpvt_det.runner.setup import JOB_ID


def launch(main: Callable[..., Any], num_gpus: int | None, *args: Any) -> Any:
    """Call ``main(*args)`` in every process of the run.

    Under ``torchrun`` this process is one of them, and ``num_gpus`` is ignored. Otherwise it starts ``num_gpus`` processes.

    Args:
        main: function that new processes can import by name.
        num_gpus: number of GPUs and processes; ``None`` for one GPU if torch finds any; 0 for the CPU.
        args: arguments of ``main``, which can be pickled.

    Returns:
        The return value of ``main`` in the first process.

    Raises:
        ConfigError: more GPUs than torch finds.
        RunStoppedError: a process that was killed; the others are stopped too.
    """
    available = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if num_gpus is not None and num_gpus > available:
        raise ConfigError(f"--num-gpus {num_gpus}, but torch sees {available} CUDA GPUs; use --num-gpus {available}")
    if "TORCHELASTIC_RUN_ID" in os.environ:
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


def _run_in_group(main: Callable[..., Any], args: tuple) -> Any:
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    # Restarted processes share the store with the dead ones, and would try to connect to the addresses of those.
    store, rank, world_size = next(dist.rendezvous("env://"))
    os.environ[JOB_ID] = store.compare_set(JOB_ID, "", uuid.uuid4().hex).decode()  # the first process chooses it for all
    store = dist.PrefixStore(f"attempt_{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"  # MODEL.DEVICE may be cpu
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size)
    try:
        return main(*args)
    finally:
        dist.destroy_process_group()
