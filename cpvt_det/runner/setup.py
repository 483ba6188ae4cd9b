# SPDX-License-Identifier: Apache-2.0
"""Preparations before the first iteration of a run: folder, log, seed."""

import contextlib
import logging
import os
import platform
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import torch
import torchvision
from fvcore.common.config import CfgNode
from torch import nn

import cpvt_det
from cpvt_det import distributed
from cpvt_det.errors import ConfigError
from cpvt_det.files import atomic_file

try:
    import fcntl
except ImportError:  # on Windows, where nothing is locked
    fcntl = None

logger = logging.getLogger("cpvt_det")
JOB_ID = "CPVT_DET_JOB_ID"
"""Environment variable, set by ``launch``."""
METRICS_LOGGER = "cpvt_det.metrics"
"""Logger whose lines go to the file only; on the screen the progress bar shows the same numbers."""


@contextlib.contextmanager
def only_run_in(cfg: CfgNode) -> Iterator[None]:
    """Reserve ``OUTPUT_DIR`` for this run within the block.

    The lock is on the file ``.lock`` in it and belongs to this process: forked data workers do not inherit it, and it is released
    when the process ends for any reason.

    Raises:
        ConfigError: a folder that another run is using, or that cannot be created or written to.
    """
    if distributed.rank() != 0 or fcntl is None:
        yield
        return
    output = Path(cfg.OUTPUT_DIR).expanduser()
    try:
        output.mkdir(parents=True, exist_ok=True)
        file = (output / ".lock").open("a+", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write to OUTPUT_DIR {output}: {error.strerror}") from error
    with file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            raise ConfigError(
                f"another run, process {file.read().strip()}, is using OUTPUT_DIR {output}; stop it, or set another OUTPUT_DIR"
            ) from error
        file.truncate(0)
        file.write(f"{os.getpid()}")
        file.flush()
        yield


def setup_run(cfg: CfgNode) -> Path:
    """Create the run's folder with ``log.txt``, and start the log.

    Returns:
        Path of ``OUTPUT_DIR``.

    Raises:
        ConfigError: a folder that cannot be created or written to.
    """
    output = Path(cfg.OUTPUT_DIR).expanduser()
    if distributed.rank() == 0:
        try:
            output.mkdir(parents=True, exist_ok=True)
            _start_log(output / "log.txt")
        except OSError as error:
            raise ConfigError(f"cannot write to OUTPUT_DIR {output}: {error.strerror}") from error
        logger.info(describe_environment())
    else:
        logger.addHandler(logging.NullHandler())
        logger.propagate = False
    return output


def write_config(cfg: CfgNode, replace: bool = True) -> None:
    """Write ``config.yaml``, when nothing can refuse the config any more: that of a run before stays until then.

    Args:
        cfg: config of the run.
        replace: False: leave a file that is there, because an evaluation must not replace the config of the training.

    Raises:
        ConfigError: a folder that cannot be written to.
    """
    path = Path(cfg.OUTPUT_DIR).expanduser() / "config.yaml"
    if distributed.rank() != 0 or (path.exists() and not replace):
        return
    try:
        with atomic_file(path) as file:
            file.write(cfg.dump().encode())
    except OSError as error:
        raise ConfigError(f"cannot write to OUTPUT_DIR {path.parent}: {error.strerror}") from error


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
    """``SEED``, or if it is negative, a random seed, the same in all processes of the run.

    Raises:
        ConfigError: a seed beyond 63 bits.
    """
    if cfg.SEED >= 2**63:
        raise ConfigError(f"SEED must be below 2 ** 63, got {cfg.SEED}")
    seed = cfg.SEED if cfg.SEED >= 0 else int.from_bytes(os.urandom(4), "little")
    return distributed.gather_objects(seed)[0]


def choose_run_id() -> str:
    """A random id for each run, the same in all its processes, including those that torchrun starts to replace dead ones."""
    return distributed.gather_objects(os.environ.get(JOB_ID) or uuid.uuid4().hex)[0]


def _start_log(path: Path) -> None:
    stop_log()
    logger.setLevel(logging.INFO)
    logger.propagate = False
    file = logging.FileHandler(path, encoding="utf-8")
    file.setFormatter(logging.Formatter("[%(asctime)s] %(levelname)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    screen = logging.StreamHandler(sys.stderr)
    screen.setFormatter(logging.Formatter("%(message)s"))
    screen.addFilter(lambda record: record.name != METRICS_LOGGER)
    logger.addHandler(file)
    logger.addHandler(screen)


def stop_log() -> None:
    """Close the log of the previous run in this process, if there was one."""
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
