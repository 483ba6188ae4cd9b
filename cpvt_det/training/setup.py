# SPDX-License-Identifier: Apache-2.0
"""Preparations before the first iteration of a run: folder, log, seed."""

import contextlib
import logging
import os
import platform
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

import torch
import torchvision
from fvcore.common.config import CfgNode
from torch import nn

import cpvt_det
from cpvt_det.builders import build_device
from cpvt_det.checkpoint.files import write_line
from cpvt_det.checkpoint.resume import named_run
from cpvt_det.common import distributed
from cpvt_det.common.errors import ConfigError, output_errors
from cpvt_det.common.files import atomic_file, fcntl

logger = logging.getLogger("cpvt_det")
LOCK = ".lock"
"""File in ``OUTPUT_DIR`` that a run locks while it uses the folder."""
AGENTS = ".agents"
"""File in ``OUTPUT_DIR`` with the id of the last run started there, and the identities of the torchrun processes that started
it."""
RELEASE = 30.0
"""Seconds that a run of several processes waits for the folder, because a process that was replaced may still be saving, on
another machine for example."""
METRICS_LOGGER = "cpvt_det.metrics"
"""Logger whose lines go only to the log file; on the screen, the progress bar shows the same numbers."""


@contextlib.contextmanager
def only_run_in(cfg: CfgNode) -> Iterator[None]:
    """Reserve ``OUTPUT_DIR`` for this run within the block.

    The lock is on the file ``LOCK`` in that folder and belongs to this process. Forked data workers do not inherit it, and it is
    released when the process ends for any reason.

    Raises:
        ConfigError: a folder that another run is using, or that cannot be created or written to.
    """
    if distributed.rank() != 0 or fcntl is None:
        yield
        return
    output = Path(cfg.OUTPUT_DIR).expanduser()
    with output_errors(output):
        output.mkdir(parents=True, exist_ok=True)
        file = (output / LOCK).open("a+", encoding="utf-8")
    with file:
        end = time.monotonic() + (RELEASE if distributed.is_initialized() else 0)
        while not _lock(file):
            if time.monotonic() >= end:
                file.seek(0)
                raise ConfigError(
                    f"another run, process {file.read().strip()}, is using OUTPUT_DIR {output}; stop it, or set another OUTPUT_DIR"
                )
            time.sleep(0.5)
        file.truncate(0)
        file.write(f"{os.getpid()}")
        file.flush()
        yield


def is_in_use(output: Path) -> bool:
    """Whether another process has currently reserved this ``OUTPUT_DIR``; ``False`` on systems without file locks.

    Do not call this within :func:`only_run_in`, because closing the file would release this process's own lock.

    Raises:
        ConfigError: a folder that cannot be written to.
    """
    if fcntl is None or not (output / LOCK).is_file():
        return False
    with output_errors(output), (output / LOCK).open("a+", encoding="utf-8") as file:
        return not _lock(file)


def _lock(file: TextIO) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def setup_run(cfg: CfgNode) -> Path:
    """Apply ``SOLVER.THREADS``, create the run's folder with ``log.txt``, and start the log.

    Returns:
        Path of ``OUTPUT_DIR``.

    Raises:
        ConfigError: a number of threads below 0; a folder that cannot be created or written to.
    """
    set_threads(cfg)
    output = Path(cfg.OUTPUT_DIR).expanduser()
    logger.propagate = False
    if distributed.rank() == 0:
        stop_log()
        with output_errors(output):
            output.mkdir(parents=True, exist_ok=True)
            file = logging.FileHandler(output / "log.txt", encoding="utf-8", errors="backslashreplace")
        file.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
        screen = logging.StreamHandler(sys.stderr)
        screen.setFormatter(logging.Formatter("%(message)s"))
        screen.addFilter(lambda record: record.name != METRICS_LOGGER)
        logger.addHandler(file)
        logger.addHandler(screen)
        logger.setLevel(logging.INFO)
        logger.info(describe_environment())
    else:
        logger.addHandler(logging.NullHandler())
    return output


def set_threads(cfg: CfgNode) -> None:
    """Apply ``SOLVER.THREADS`` to this process, on a CPU.

    Raises:
        ConfigError: a number below 0.
    """
    if cfg.SOLVER.THREADS < 0:
        raise ConfigError(f"SOLVER.THREADS must be at least 0 (0 for as many as torch takes), got {cfg.SOLVER.THREADS}")
    if cfg.SOLVER.THREADS and build_device(cfg).type == "cpu":
        torch.set_num_threads(cfg.SOLVER.THREADS)


def write_config(cfg: CfgNode, replace: bool = True) -> None:
    """Write ``config.yaml``. Call this only after all checks of the config, so that a refused config does not replace an earlier
    run's file.

    Args:
        cfg: config of the run.
        replace: whether to replace an existing file; an evaluation must not replace the config of the training.

    Raises:
        ConfigError: a folder that cannot be written to.
    """
    path = Path(cfg.OUTPUT_DIR).expanduser() / "config.yaml"
    if distributed.rank() != 0 or (path.exists() and not replace):
        return
    with output_errors(path.parent), atomic_file(path) as file:
        file.write(cfg.dump().encode())


def describe_environment() -> str:
    """The versions to include in a bug report."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {torch.get_num_threads()} threads"
    return (
        f"cpvt_det {cpvt_det.__version__}, torch {torch.__version__}, torchvision {torchvision.__version__}, "
        f"Python {platform.python_version()}, {device}, {distributed.world_size()} process(es)"
    )


def describe_model(detector: nn.Module) -> str:
    """The class of a detector and the number of its parameters."""
    total = sum(parameter.numel() for parameter in detector.parameters())
    trained = sum(parameter.numel() for parameter in detector.parameters() if parameter.requires_grad)
    return f"{type(detector).__name__}, {total / 1e6:.2f} M parameters, {trained / 1e6:.2f} M of them trained"


def choose_seed(cfg: CfgNode) -> int:
    """``SEED`` or, if that is negative, a random seed. All processes of the run get the same seed.

    Raises:
        ConfigError: a seed beyond 63 bits.
    """
    if cfg.SEED >= 2**63:
        raise ConfigError(f"SEED must be below 2 ** 63, got {cfg.SEED}")
    return distributed.broadcast_object(cfg.SEED if cfg.SEED >= 0 else int.from_bytes(os.urandom(4), "little"))


def choose_run_id(output: Path) -> str:
    """A random id for each run, the same in all its processes.

    Processes that torchrun starts to replace dead ones belong to the same run and get its id. They are recognised because at least
    one of them was started by a torchrun process that had also started the run recorded in ``output``. So some of a run's torchrun
    processes can be replaced, for example after the loss of a machine, but not all of them.
    """
    found, agents = uuid.uuid4().hex, distributed.gather_objects(_agent())
    if distributed.rank() == 0 and (output / AGENTS).is_file():
        run_id, *before = (output / AGENTS).read_text(encoding="utf-8", errors="replace").splitlines()
        if named_run(output) == run_id and set(before) & set(agents) - {""}:
            found = run_id
    return distributed.broadcast_object(found)


def record_agents(output: Path, run_id: str) -> None:
    """Record which torchrun processes started this run, for :func:`choose_run_id`."""
    agents = distributed.gather_objects(_agent())
    if distributed.rank() == 0:
        write_line("\n".join([run_id, *agents]), output / AGENTS)


def _agent() -> str:
    """The identity of the torchrun process that started this one, including its machine; empty without torchrun."""
    # .../RUN_RANDOM/attempt_N/RANK/error.json: each torchrun makes the first of these folders, once
    attempt = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents
    return f"{socket.gethostname()}:{attempt[2]}" if len(attempt) > 3 else ""


def stop_log() -> None:
    """Close the log of the previous run in this process, if there was one."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
