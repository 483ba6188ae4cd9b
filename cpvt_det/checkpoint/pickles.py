# SPDX-License-Identifier: Apache-2.0
"""Pickles of arrays, as in detectron2's model zoo, read without running what they ask for.

A pickle names functions and calls them. Here the few names that arrays are written with stand for classes of this file, which only
keep what they are given; every other name is refused. Arrays are made of that afterwards, by us.
"""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cpvt_det.errors import WeightsError

PLAIN = (str, bytes, bool, int, float, type(None))
KINDS = "biuf"  # of numpy's dtypes: numbers, no objects


class _Dtype:
    """What ``numpy.dtype(code)`` with its state stands for."""

    def __init__(self, code: str, *_: Any):
        self.value = np.dtype(code)
        if self.value.kind not in KINDS:
            raise WeightsError(f"an array of {self.value} is no array of numbers")

    def __setstate__(self, state: tuple) -> None:
        self.value = self.value.newbyteorder(state[1])  # "<", ">" or "|"


class _Array:
    """What numpy makes empty and then fills with its state, or makes of a buffer at once."""

    def __init__(self, *_: Any):
        self.value = np.zeros(0)

    def __setstate__(self, state: tuple) -> None:
        _, shape, dtype, by_column, content = state
        self.value = _from_buffer(content, dtype, shape, "F" if by_column else "C").value


def _from_buffer(content: bytes, dtype: _Dtype, shape: tuple[int, ...], order: str) -> _Array:
    array = _Array()
    content = content.encode("latin1") if isinstance(content, str) else content  # of Python 2
    array.value = np.frombuffer(content, dtype.value).reshape(shape, order=order)
    return array


def _number(dtype: _Dtype, content: bytes) -> Any:
    return _from_buffer(content, dtype, (), "C").value.item()


def _bytes_of(text: str, encoding: str) -> bytes:
    return text.encode("latin1")


def _no_bytes() -> bytes:
    return b""


_MAKERS: dict[tuple[str, str], Callable] = {
    ("numpy", "ndarray"): _Array,
    ("numpy", "dtype"): _Dtype,
    ("collections", "OrderedDict"): dict,
    ("_codecs", "encode"): _bytes_of,
    ("__builtin__", "bytes"): _no_bytes,  # before protocol 3
}
for _core in ("numpy.core", "numpy._core"):
    _MAKERS[f"{_core}.multiarray", "_reconstruct"] = _Array
    _MAKERS[f"{_core}.multiarray", "scalar"] = _number
    _MAKERS[f"{_core}.numeric", "_frombuffer"] = _from_buffer


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Callable:
        if (module, name) not in _MAKERS:
            raise WeightsError(
                f"refused, because it holds a Python object ({module}.{name}) and unpickling that would run code; "
                "where you trust its origin, save its arrays with torch.save"
            )
        return _MAKERS[module, name]


def read_pickle(path: Path) -> Any:
    """Read a pickle of containers, text, numbers and numpy arrays.

    Returns:
        The same in plain containers, with arrays as tensors.

    Raises:
        WeightsError: anything else in it.
        Exception: a damaged file, by whatever it makes of the unpickler.
    """
    with path.open("rb") as file:
        return _plain(_Unpickler(file, encoding="latin1").load(), {})


def _plain(value: Any, done: dict[int, Any]) -> Any:
    """``value`` in plain containers; ``done`` has what became of those before, by id: a pickle may hold one many times over."""
    if isinstance(value, PLAIN):
        return value
    if id(value) not in done:
        done[id(value)] = _converted(value, done)
    return done[id(value)]


def _converted(value: Any, done: dict[int, Any]) -> Any:
    if isinstance(value, _Array):
        return torch.from_numpy(value.value.astype(value.value.dtype.newbyteorder("=")))  # a copy, which may be written to
    if isinstance(value, dict):
        return {_plain(key, done): _plain(item, done) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, done) for item in value]
    raise WeightsError(f"it holds a {type(value).__name__}; expected containers, numbers, text and arrays")
