# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: read without running code, written all or nothing."""

import argparse
import contextlib
import os
import re
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cpvt_det.errors import WeightsError, first_line


def read_checkpoint(path: str | Path) -> Any:
    """Read a file that ``torch.save`` or safetensors wrote, onto the CPU.

    Unpickling is torch's restricted one: beside tensors and plain containers it makes ``argparse.Namespace`` and numpy arrays
    and numbers, which official DETR checkpoints hold, and nothing else.

    Args:
        path: the suffix ``.safetensors`` means that format, any other torch's.

    Returns:
        What was saved; a dict in any checkpoint.

    Raises:
        WeightsError: a file that is missing, damaged or no checkpoint, one that holds other objects, a ``.pkl``.
    """
    if str(path).startswith(("http:/", "https:/")):  # one slash: pathlib folds two
        raise WeightsError(f"{path} is an address; download the file and give its path")
    path = Path(path).expanduser()
    if not path.is_file():
        raise WeightsError(f"no weights file {path}")
    if path.suffix == ".pkl":
        raise WeightsError(f"{path}: a .pkl is not read, because unpickling runs code; torch.save its tensors as a .pth")
    try:
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        with torch.serialization.safe_globals(_allowed_globals()):
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # what zip, pickle and file systems raise has no common base
        raise WeightsError(f"{path}: {_why(error)}") from error


def state_dict_of(checkpoint: Any, where: str = "the checkpoint") -> dict[str, Tensor]:
    """The weights in a checkpoint: its moving average, its ``model``, its ``state_dict``, or all of it.

    Args:
        checkpoint: what :func:`read_checkpoint` returns.
        where: what messages call it.

    Returns:
        Names -> tensors, without the ``module.`` that wrapping for several GPUs puts before all of them.

    Raises:
        WeightsError: no dict, or none of tensors.
    """
    if not isinstance(checkpoint, dict):
        raise WeightsError(
            f"{where} holds a {type(checkpoint).__name__}; expected tensors by name, or a dict with them under 'model'"
        )
    found = next((checkpoint[key] for key in ("model", "state_dict") if isinstance(checkpoint.get(key), dict)), checkpoint)
    node = checkpoint.get("cpvt_det")
    if isinstance(node, dict) and node.get("ema"):  # a run of ours with SOLVER.EMA: the weights that were evaluated
        found = {key: value for key, value in node["ema"].items() if key != "n_averaged"}
    strange = [key for key, value in found.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if strange or not found:
        keys = ", ".join(map(str, list(strange)[:5])) or "empty"
        raise WeightsError(f"{where} holds no tensors by name, neither under 'model' nor 'state_dict' nor as a whole ({keys})")
    if all(key.startswith("module.") for key in found):
        return {key.removeprefix("module."): value for key, value in found.items()}
    return dict(found)


def write_atomically(obj: Any, path: str | Path) -> None:
    """Save ``obj`` so that ``path`` holds the old content or all of the new, whatever happens on the way.

    Args:
        obj: what ``torch.save`` takes; for a path that ends in ``.safetensors``, a dict of tensors.
        path: in a folder that exists.

    Raises:
        OSError: a folder that is missing or full.
    """
    with atomic_file(path) as file:
        if Path(path).suffix == ".safetensors":
            file.write(safetensors.torch.save({name: tensor.contiguous() for name, tensor in obj.items()}))
        else:
            torch.save(obj, file)


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """A file to write to, which takes its name only after the block, complete and on the disk.

    If the block raises, what it wrote is removed and ``path`` stays as it was.
    """
    path = Path(path)
    # In the same folder: a rename is atomic within one file system only.
    temporary = path.with_name(f".{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    if os.name == "posix":  # the new name is on the disk only when the folder is
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _allowed_globals() -> list[Any]:
    """What the restricted unpickler may build beside torch's own; numpy's makers also under their name before numpy 2."""
    makers = {maker.__name__: maker for maker in (np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0])}
    named = [(maker, f"numpy.{core}.multiarray.{name}") for core in ("_core", "core") for name, maker in makers.items()]
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefd"}
    return [argparse.Namespace, np.ndarray, np.dtype, *dtypes, *named]


def _why(error: Exception) -> str:
    """One line for what torch, safetensors or the file system raised."""
    if isinstance(error, PermissionError):
        return "no permission to read it"
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return (
            f"refused, because it holds a Python object ({refused[1]}) and unpickling that would run code; "
            "where you trust its origin, save the state dict alone with torch.save"
        )
    return f"damaged, incomplete or no checkpoint ({first_line(error)[:120]}); get it again, or give another file"
