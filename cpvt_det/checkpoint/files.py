# SPDX-License-Identifier: Apache-2.0
"""Checkpoint files: they are read without running code and written completely or not at all, each with a checksum file."""

import argparse
import codecs
import hashlib
import pickle
import pickletools
import re
import zipfile
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from cpvt_det.common.errors import RunStoppedError, WeightsError, first_line
from cpvt_det.common.files import atomic_file

UNPACKED = 10  # largest ratio of unpacked size to file size; weights hardly compress
SLACK = 1 << 20  # bytes that are allowed in addition
PREFIXES = ("module.", "model.", "net.", "detector.")
"""Prefixes that wrappers put before all names of a model: those of torch's wrappers for several GPUs and for moving averages, and
names that are common in Lightning modules."""
INSIDE = re.compile(r"(^|(?<=\.))(_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.")
"""Parts that torch inserts anywhere in the names of compiled, sharded or checkpointed modules."""
TRANSFORMERS = re.compile(r"model\.(encoder|decoder)\.")
"""Start of names in transformers' weights, where ``model.`` is not a wrapper's prefix even if all names have it."""


def read_checkpoint(path: str | Path, only_look: bool = False) -> Any:
    """Read a file written by ``torch.save`` or safetensors, or a pickle of arrays, into CPU memory.

    No code from the file is run. Torch's restricted unpickler builds, besides tensors and plain containers, only
    ``argparse.Namespace``, numpy arrays and numpy numbers, which official DETR checkpoints contain. The unpickler of ``.pkl`` files
    builds only plain containers, numpy arrays and numpy numbers.

    Args:
        path: path of the file. Its suffix gives the format: ``.safetensors``, ``.pkl`` for a pickle of arrays (detectron2's model
            zoo), and any other for torch's format.
        only_look: whether to leave the tensors on disk and read only the rest; damaged tensors then go unnoticed.

    Returns:
        The saved object; for a checkpoint a dict.

    Raises:
        WeightsError: a file that is missing, is not a checkpoint, is damaged (even by one byte) or contains objects of other types.
    """
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
            return _read_pickle(path)
        with torch.serialization.safe_globals(_allowed_globals()):
            return torch.load(path, map_location="cpu", weights_only=True, mmap=only_look and zipfile.is_zipfile(path))
    except Exception as error:  # what zip, pickle and file systems raise has no common base
        raise WeightsError(f"{path}: {_why(error)}") from error


def checksum_of(path: Path) -> Path:
    """Path of the checksum file next to ``path``, in the format of ``sha256sum``."""
    return path.with_name(f"{path.name}.sha256")


def _require_whole(path: Path) -> None:
    """Compare a file with its checksum file or, if there is none, with the checksums inside torch's zip format.

    Raises:
        WeightsError: a checksum that differs.
    """
    beside = checksum_of(path)
    if beside.is_file():
        if beside.read_text(encoding="utf-8").split()[:1] != [sha256_of(path)]:
            raise WeightsError(f"damaged: its content does not match its checksum file {beside.name}; download or copy it again")
    elif zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged is not None:
            raise WeightsError(f"damaged: the checksum of its part {damaged} is wrong; download or copy it again")


def _require_proportion(path: Path) -> None:
    """Refuse a small zip file that unpacks to a very large one. Checkpoints do not do this, because torch does not compress its
    files.

    Raises:
        WeightsError: a file that unpacks to far more than its own size.
    """
    if not zipfile.is_zipfile(path):
        return
    with zipfile.ZipFile(path) as archive:
        unpacked, size = sum(part.file_size for part in archive.infolist()), path.stat().st_size
    if unpacked > UNPACKED * size + SLACK:
        raise WeightsError(f"refused, because its {size} bytes unpack to {unpacked} bytes; save it with torch.save, uncompressed")


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file, as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def state_dict_of(checkpoint: Any, where: str = "the checkpoint", prefixes: Sequence[str] = PREFIXES) -> dict[str, Tensor]:
    """The weights in a checkpoint: its moving average, ``model`` or ``state_dict``, or the checkpoint itself.

    Args:
        checkpoint: object that :func:`read_checkpoint` returned.
        where: name of the checkpoint in error messages.
        prefixes: prefixes that are removed if all names have them. Networks of other projects may need different prefixes.

    Returns:
        Names -> tensors, without the parts that wrappers add: ``module.`` of several GPUs, ``_orig_mod.`` of ``torch.compile``,
        ``model.`` of Lightning. Other parts of a Lightning module, such as a criterion, are left out.

    Raises:
        WeightsError: an object that is not a dict of tensors.
    """
    if not isinstance(checkpoint, dict):
        raise WeightsError(
            f"{where} contains a {type(checkpoint).__name__}; expected a dict of tensors by name, or a dict with one under 'model'"
        )
    found = next((checkpoint[key] for key in ("model", "state_dict") if isinstance(checkpoint.get(key), dict)), checkpoint)
    node = checkpoint.get("cpvt_det")
    if isinstance(node, dict) and isinstance(node.get("ema"), dict):  # SOLVER.EMA: these weights were evaluated
        found = node["ema"]
    strange = [key for key, value in found.items() if not isinstance(key, str) or not isinstance(value, Tensor)]
    if strange or not found:
        keys = ", ".join(map(str, list(strange)[:5])) or "empty"
        raise WeightsError(
            f"{where} contains no dict of tensors by name, neither under 'model' or 'state_dict' nor as a whole (its keys: {keys})"
        )
    return _unwrapped(found, tuple(prefixes), is_of_lightning="pytorch-lightning_version" in checkpoint)


def _unwrapped(state_dict: dict[str, Tensor], prefixes: tuple[str, ...], is_of_lightning: bool) -> dict[str, Tensor]:
    names = {key: INSIDE.sub("", key) for key in state_dict if key != "n_averaged"}  # a counter of torch's averages
    if is_of_lightning:
        names = {key: name for key, name in names.items() if name.startswith(prefixes)} or names
    while names and not any(TRANSFORMERS.match(name) for name in names.values()):
        prefix = next((one for one in prefixes if all(name.startswith(one) for name in names.values())), "")
        if not prefix:
            break
        names = {key: name.removeprefix(prefix) for key, name in names.items()}
    return {name: state_dict[key] for key, name in names.items()}


def not_finite(state_dict: dict[str, Tensor]) -> str:
    """The names of up to three tensors that contain a NaN or an infinity; empty if all are finite."""
    floats = {name: tensor for name, tensor in state_dict.items() if tensor.is_floating_point() and tensor.numel()}
    if not floats or all(torch.stack([tensor.sum().float() for tensor in floats.values()]).isfinite().tolist()):
        return ""  # a finite sum has finite terms only; if a sum overflows, the next line still finds the right answer
    return ", ".join([name for name, tensor in floats.items() if not tensor.isfinite().all()][:3])


def write_checkpoint(obj: Any, path: str | Path) -> None:
    """Save ``obj`` and its checksum. After any interruption, ``path`` has either its old content or all of the new content.

    Args:
        obj: object that ``torch.save`` accepts; for a path that ends in ``.safetensors``, a dict of tensors.
        path: path of the file, in an existing folder.

    Raises:
        RunStoppedError: a file that cannot be written, for example because the disk is full.
    """
    path = Path(path)
    try:
        with atomic_file(path) as file:
            if path.suffix == ".safetensors":
                file.write(safetensors.torch.save({name: tensor.contiguous() for name, tensor in obj.items()}))
            else:
                torch.save(obj, file)
            file.flush()
            checksum = sha256_of(Path(file.name))
            checksum_of(path).unlink(missing_ok=True)  # after any interruption, no file is left with a wrong checksum
        with atomic_file(checksum_of(path)) as file:
            file.write(f"{checksum}  {path.name}\n".encode())
    except (OSError, RuntimeError) as error:
        kept = "; the file that was there before is unchanged" if path.exists() else ""
        raise RunStoppedError(f"cannot write {path}: {_why_unwritten(error)}{kept}") from error


def write_line(text: str, path: Path) -> None:
    """Replace the content of a file with one line, completely or not at all.

    Raises:
        RunStoppedError: a file that cannot be written.
    """
    try:
        with atomic_file(path) as file:
            file.write(text.encode())
    except OSError as error:
        raise RunStoppedError(f"cannot write {path}: {_why_unwritten(error)}") from error


def _makers_of_arrays() -> dict[str, Any]:
    """The functions that pickles of numpy arrays and numbers call, by their names in numpy 1 and 2."""
    made = np.float64(0).__reduce__(), np.zeros(0).__reduce__(), np.zeros(0).__reduce_ex__(5)
    makers = [maker for maker, *_ in made]
    cores = [(core, maker) for core in ("numpy._core", "numpy.core") for maker in makers]
    named = {f"{core}.{maker.__module__.rpartition('.')[2]}.{maker.__name__}": maker for core, maker in cores}
    return {"numpy.ndarray": np.ndarray, "numpy.dtype": np.dtype, **named}


def _allowed_globals() -> list[Any]:
    """Types and functions that torch's restricted unpickler may use besides its own."""
    dtypes = {type(np.dtype(code)) for code in "?bhilqBHILQefd"}
    return [argparse.Namespace, *dtypes, *((maker, name) for name, maker in _makers_of_arrays().items())]


class _ArrayUnpickler(pickle.Unpickler):
    """An unpickler of plain containers and arrays; ``bytes`` and ``encode`` make the content of arrays before protocol 3."""

    allowed = {"collections.OrderedDict": OrderedDict, "_codecs.encode": codecs.encode, "__builtin__.bytes": bytes}
    allowed |= _makers_of_arrays()

    def find_class(self, module: str, name: str) -> Any:
        if f"{module}.{name}" not in self.allowed:
            raise pickle.UnpicklingError(f"GLOBAL {module}.{name}")  # as torch's unpickler names it
        return self.allowed[f"{module}.{name}"]


def _read_pickle(path: Path) -> Any:
    """Read a pickle of plain containers and arrays, as in detectron2's model zoo; arrays in dicts become tensors."""
    size = path.stat().st_size
    with path.open("rb") as file:
        for operation, argument, _ in pickletools.genops(file):  # Python reserves slots up to the largest index in the file
            if operation.name in ("PUT", "BINPUT", "LONG_BINPUT", "FRAME") and argument > size:
                raise WeightsError(f"refused, because it asks for more memory than a file of its size can need: {argument}")
        file.seek(0)
        return _with_tensors(_ArrayUnpickler(file, encoding="latin1").load())


def _with_tensors(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _with_tensors(item) for key, item in value.items()}
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.astype(value.dtype.newbyteorder("=")))
    return value


def _why_unwritten(error: BaseException) -> str:
    """The message of the file system, which torch hides behind its own error."""
    while not isinstance(error, OSError) and error.__context__ is not None:
        error = error.__context__
    return error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)


def _why(error: Exception) -> str:
    """A one-line explanation of an error of torch, safetensors or the file system."""
    if isinstance(error, WeightsError):
        return str(error)
    if isinstance(error, PermissionError):
        return "no permission to read the file"
    if refused := re.search(r"GLOBAL (\S+)", str(error)):
        return (
            f"refused, because it contains a Python object ({refused[1]}), and unpickling it would run code; "
            "if you trust its origin, save only the state dict with torch.save"
        )
    return f"damaged, incomplete or not a checkpoint ({first_line(error)[:120]}); download or copy it again, or give another file"
