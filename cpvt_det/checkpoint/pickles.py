# SPDX-License-Identifier: Apache-2.0
"""Pickles of arrays, as in detectron2's model zoo, read without running code from the file.

Unpickling calls functions that the pickle names. Here, the few names that arrays need are mapped to functions of this module that
do nothing but store their arguments. Every other name is refused. This module creates the arrays afterwards, and their size is
limited by the size of the file. All operations are checked before unpickling, because some of them can make Python allocate any
amount of memory.
"""

import pickle
import pickletools
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from cpvt_det.common.errors import WeightsError

PLAIN = (str, bytes, bool, int, float, type(None))
KINDS = "biuf"  # kinds of numpy dtypes: numbers, no objects
ASKING = dict.fromkeys(("PUT", "BINPUT", "LONG_BINPUT"), "objects") | {"FRAME": "bytes"}
SLACK = 1 << 20  # bytes
TOO_LITTLE = "more memory than a file of its size can need"


class _Dtype:
    """Stand-in for ``numpy.dtype(code)`` with its state."""

    def __init__(self, code: str, *_: Any):
        self.value = np.dtype(code)
        if self.value.kind not in KINDS:
            raise WeightsError(f"an array of dtype {self.value} is not numeric; only arrays of numbers are read")

    def __setstate__(self, state: tuple) -> None:
        self.value = self.value.newbyteorder(state[1])  # "<", ">" or "|"


class _Array:
    """Stand-in for an array. A pickle either creates it empty and then gives it a state, or creates it from a buffer."""

    def __init__(self, *_: Any):
        self.parts: tuple = (b"", _Dtype("f8"), (0,), "C")

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, by_column, content = state
        self.parts = content, dtype, shape, "F" if by_column else "C"

    def values(self) -> np.ndarray:
        """A view of the content."""
        content, dtype, shape, order = self.parts
        content = content.encode("latin1") if isinstance(content, str) else content  # written by Python 2
        return np.frombuffer(content, dtype.value).reshape(shape, order=order)


def _from_buffer(content: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
    array = _Array()
    array.parts = content, dtype, shape, order
    return array


def _number(dtype: _Dtype, content: bytes) -> Any:
    return _from_buffer(content, dtype, (), "C").values().item()


class _Maker:
    """A callable that calls a function. Unlike a function, it has no attributes that a pickle's BUILD could set."""

    __slots__ = ("_make",)

    def __init__(self, make: Callable):
        object.__setattr__(self, "_make", make)

    def __call__(self, *arguments: Any) -> Any:
        return self._make(*arguments)

    def __setattr__(self, name: str, value: Any) -> None:
        raise WeightsError(f"refused, because it sets the attribute {name!r} of a function")


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: BinaryIO, size: int):
        super().__init__(file, encoding="latin1")
        self._room = size
        self._encoded: dict[int, tuple[str, bytes]] = {}
        self._makers: dict[tuple[str, str], Callable] = {
            ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Dtype,
            ("collections", "OrderedDict"): self._dict_of,
            ("_codecs", "encode"): self._bytes_of,
            ("__builtin__", "bytes"): lambda: b"",  # before protocol 3
        }
        for core in ("numpy.core", "numpy._core"):
            self._makers[f"{core}.multiarray", "_reconstruct"] = _Array
            self._makers[f"{core}.multiarray", "scalar"] = _number
            self._makers[f"{core}.numeric", "_frombuffer"] = _from_buffer

    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) not in self._makers:
            raise WeightsError(
                f"refused, because it contains a Python object ({module}.{name}), and unpickling it would run code; "
                "if you trust its origin, save its arrays with torch.save"
            )
        return _Maker(self._makers[module, name])

    def _dict_of(self, *pairs: Any) -> dict:
        made = dict(*pairs)
        self._room -= len(made)
        if self._room < 0:
            raise WeightsError(f"refused, because it uses {TOO_LITTLE}")
        return made

    def _bytes_of(self, text: str, encoding: str) -> bytes:
        """The bytes of a text. For the same text, the same object is returned, because a pickle may ask for it any number of
        times."""
        if id(text) not in self._encoded:
            self._encoded[id(text)] = text, text.encode("latin1")
        return self._encoded[id(text)][1]


def read_pickle(path: Path) -> Any:
    """Read a pickle of containers, text, numbers and numpy arrays.

    Returns:
        The same content in plain containers, with arrays as tensors.

    Raises:
        WeightsError: any other object in the file.
        Exception: a damaged file; the type depends on where the unpickler fails.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        for operation, argument, _ in pickletools.genops(file):  # Python reserves slots up to the largest index in the file
            if operation.name in ASKING and argument > size:
                raise WeightsError(f"refused, because it asks for {TOO_LITTLE}: {argument} {ASKING[operation.name]}")
        file.seek(0)
        return _Plain(size).of(_Unpickler(file, size).load())


class _Plain:
    """A converter of unpickled objects to plain containers and tensors.

    Args:
        size: size of the file in bytes, which limits the size of all tensors together.
    """

    def __init__(self, size: int):
        self._left = 2 * size + SLACK
        self._done: dict[int, Any] = {}  # results by id of the object, because a pickle may contain one object many times

    def of(self, value: Any) -> Any:
        if isinstance(value, PLAIN):
            return value
        if id(value) not in self._done:
            self._done[id(value)] = self._converted(value)
        return self._done[id(value)]

    def _converted(self, value: Any) -> Any:
        if isinstance(value, _Array):
            array = value.values()
            self._left -= array.nbytes
            if self._left < 0:
                raise WeightsError(f"refused, because it uses {TOO_LITTLE}")
            return torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))  # a copy, because the array is read-only
        if isinstance(value, dict):
            return {self.of(key): self.of(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.of(item) for item in value]
        raise WeightsError(f"it contains a {type(value).__name__}; expected only containers, numbers, text and arrays")
