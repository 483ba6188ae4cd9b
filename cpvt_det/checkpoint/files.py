# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: read without running code, written all or nothing, with a checksum beside each."""

import argparse
import hashlib
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cpvt_det.checkpoint.pickles import read_pickle
from cpvt_det.errors import RunStoppedError, WeightsError, first_line
from cpvt_det.files import atomic_file

UNPACKED = 10  # times the file that all of its parts may be; weights hardly compress
SLACK = 1 << 20  # bytes


def read_checkpoint(path: str | Path, only_look: bool = False) -> Any:
    """Read a file that ``torch.save`` or safetensors wrote, or a pickle of arrays, onto the CPU.

    No code of the file's runs. Unpickling is torch's restricted one: beside tensors and plain containers it makes
    ``argparse.Namespace`` and numpy arrays and numbers, which official DETR checkpoints hold, and nothing else.

    Args:
        path: the suffix ``.safetensors`` means that format, ``.pkl`` a pickle of arrays (detectron2's model zoo), others
            torch's.
        only_look: at what is not a tensor; torch's tensors stay on the disk, and damage to them is not found.

    Returns:
        What was saved; a dict in any checkpoint.

    Raises:
        WeightsError: a file that is missing, no checkpoint, or damaged, be it by one byte; one that holds other objects.
    """
    if str(path).startswith(("http:/", "https:/")):  # one slash: pathlib folds two
        raise WeightsError(f"{path} is an address; download the file and give its path")
    path = Path(path).expanduser()
    if not path.is_file():
        raise WeightsError(f"no weights file {path}")
    try:
        _require_proportion(path)
        if not only_look:
            _require_whole(path)
        if path.suffix == ".safetensors":
            return safetensors.torch.load_file(path)
        if path.suffix == ".pkl":
            return read_pickle(path)
        with torch.serialization.safe_globals(_allowed_globals()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=only_look and zipfile.is_zipfile(path))
    except Exception as error:  # what zip, pickle and file systems raise has no common base
        raise WeightsError(f"{path}: {_why(error)}") from error


def checksum_of(path: Path) -> Path:
    """The file beside ``path`` that holds its checksum, as ``sha256sum`` writes and checks it."""
    return path.with_name(f"{path.name}.sha256")


def _require_whole(path: Path) -> None:
    """Compare with the checksum beside the file; without one, with those that torch's zip files have of their parts.

    Raises:
        WeightsError: they differ.
    """
    beside = checksum_of(path)
    if beside.is_file():
        if beside.read_text(encoding="utf-8").split()[:1] != [_sha256(path)]:
            raise WeightsError(f"damaged: it is not what its checksum {beside.name} was made of; get it again")
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise WeightsError(f"damaged: the checksum of its part {damaged} is wrong; get it again")


def _require_proportion(path: Path) -> None:
    """Refuse a zip file that is small and unpacks to all memory; torch's own is not compressed.

    Raises:
        WeightsError: it is one.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        unpacked, size = sum(part.file_size for part in archive.infolist()), path.stat().st_size
    if unpacked > UNPACKED * size + SLACK:
        raise WeightsError(f"refused, because its {size} bytes unpack to {unpacked}; save it with torch.save, uncompressed")


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


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
    if isinstance(node, dict) and isinstance(node.get("ema"), dict):  # SOLVER.EMA: the weights that were evaluated
        found = {key: value for key, value in node["ema"].items() if key != "n_averaged"}
    strange = [key for key, value in found.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if strange or not found:
        keys = ", ".join(map(str, list(strange)[:5])) or "empty"
        raise WeightsError(f"{where} holds no tensors by name, neither under 'model' nor 'state_dict' nor as a whole ({keys})")
    if all(key.startswith("module.") for key in found):
        return {key.removeprefix("module."): value for key, value in found.items()}
    return dict(found)


def not_finite(state_dict: dict[str, Tensor]) -> str:
    """The names of up to three tensors that hold a NaN or an infinity; empty where all are finite."""
    floats = {name: tensor for name, tensor in state_dict.items() if tensor.is_floating_point() and tensor.numel()}
    if not floats or all(torch.stack([tensor.sum().float() for tensor in floats.values()]).isfinite().tolist()):
        return ""  # a sum is finite where all its terms are; and if it were too large, the next line would tell
    return ", ".join([name for name, tensor in floats.items() if not tensor.isfinite().all()][:3])


def write_checkpoint(obj: Any, path: str | Path) -> None:
    """Save ``obj`` so that ``path`` holds the old content or all of the new, whatever happens on the way; and its checksum.

    Args:
        obj: what ``torch.save`` takes; for a path that ends in ``.safetensors``, a dict of tensors.
        path: in a folder that exists.

    Raises:
        RunStoppedError: it cannot be written, because the disk is full, say.
    """
    path = Path(path)
    try:
        with atomic_file(path) as file:
            if path.suffix == ".safetensors":
                file.write(safetensors.torch.save({name: tensor.contiguous() for name, tensor in obj.items()}))
            else:
                torch.save(obj, file)
            file.flush()
            checksum = _sha256(Path(file.name))
            checksum_of(path).unlink(missing_ok=True)  # whatever comes between, no file stands beside another's checksum
        with atomic_file(checksum_of(path)) as file:
            file.write(f"{checksum}  {path.name}\n".encode())
    except (OSError, RuntimeError) as error:
        kept = "; what was there before is whole" if path.exists() else ""
        raise RunStoppedError(f"cannot write {path}: {_why_unwritten(error)}{kept}") from error


def write_line(text: str, path: Path) -> None:
    """Put a line in place of a file, all of it or nothing.

    Raises:
        RunStoppedError: it cannot be written.
    """
    try:
        with atomic_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise RunStoppedError(f"cannot write {path}: {_why_unwritten(error)}") from error


def remove_checkpoint(path: Path) -> None:
    """Remove a file and its checksum."""
    for file in (checksum_of(path), path):
        file.unlink(missing_ok=True)


def _allowed_globals() -> list[Any]:
    """What the restricted unpickler may build beside torch's own; numpy's makers also under their name before numpy 2."""
    makers = {maker.__name__: maker for maker in (np.float64(0).__reduce__()[0], np.zeros(0).__reduce__()[0])}
    named = [(maker, f"numpy.{core}.multiarray.{name}") for core in ("_core", "core") for name, maker in makers.items()]
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefd"}
    return [argparse.Namespace, np.ndarray, np.dtype, *dtypes, *named]


def _why_unwritten(error: BaseException) -> str:
    """What the file system said: torch hides it behind an error of its own."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)


def _why(error: Exception) -> str:
    """One line for what torch, safetensors or the file system raised."""
    if isinstance(error, WeightsError):
        return str(error)
    if isinstance(error, PermissionError):
        return "no permission to read it"
    refused = re.search(r"GLOBAL (\S+)", str(error))
    if refused:
        return (
            f"refused, because it holds a Python object ({refused[1]}) and unpickling that would run code; "
            "where you trust its origin, save the state dict alone with torch.save"
        )
    return f"damaged, incomplete or no checkpoint ({first_line(error)[:120]}); get it again, or give another file"
