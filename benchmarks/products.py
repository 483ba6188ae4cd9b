# SPDX-License-Identifier: Apache-2.0
"""The products and convolutions of a call, with their shapes, and every way to do each of them alone."""

import contextlib
import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

PRODUCTS = (torch.matmul, torch.bmm, torch.mm, torch.Tensor.matmul, torch.Tensor.__matmul__)
UNSEEN = ("winograd",)
"""Our ways of computing, by their names in ``CPVT_DET_WITHOUT``, that torch does not see or sees in parts."""
LIKE_WINOGRADS = {"stride": (1, 1), "padding": (1, 1), "groups": 1}
Ways = dict[str, Callable[[], Any]]


@dataclass(frozen=True)
class Kind:
    """An operation and everything of it that takes time.

    Args:
        name: ``convolution``, ``linear``, ``product`` or ``attention``.
        shapes: shapes of its tensors.
        stride, padding, dilation, groups: of a convolution.
        masked: whether an attention has a mask.
    """

    name: str
    shapes: tuple[tuple[int, ...], ...]
    stride: tuple[int, ...] = (1, 1)
    padding: tuple[int, ...] = (0, 0)
    dilation: tuple[int, ...] = (1, 1)
    groups: int = 1
    masked: bool = False

    def __str__(self) -> str:
        words = [self.name, " by ".join("x".join(map(str, shape)) for shape in self.shapes)]
        words += [f"stride {self.stride[0]}"] * (self.stride != (1, 1)) + [f"groups {self.groups}"] * (self.groups != 1)
        return ", ".join([*words, *["masked"] * self.masked])


def kind_of(function: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Kind | None:
    """The kind of a call of torch; ``None`` for one that is neither a product nor a convolution."""
    shapes = tuple(tuple(x.shape) for x in arguments[:3] if isinstance(x, Tensor))
    if function is F.conv2d:
        return _convolution(shapes[:2], *(_pair(x) for x in _with_defaults(arguments[3:], named)))
    if function is F.linear:
        rows = torch.Size(shapes[0][:-1]).numel()
        return Kind("linear", ((rows, shapes[0][-1]), shapes[1]))
    if function is F.scaled_dot_product_attention:
        return Kind("attention", shapes, masked=named.get("attn_mask") is not None)
    if function in PRODUCTS:
        return Kind("product", shapes[:2])
    return None


def _convolution(shapes: Any, stride: Any, padding: Any, dilation: Any, groups: Any) -> Kind:
    """A 1x1 convolution of stride 1 is a linear layer of all cells; the dilation of any 1x1 kernel means nothing."""
    (batch, channels, height, width), weight = shapes
    if weight[2:] == (1, 1):
        dilation = (1, 1)
        if stride == (1, 1) and padding == (0, 0) and groups[0] == 1:
            return Kind("linear", ((batch * height * width, channels), weight[:2]))
    return Kind("convolution", shapes, stride, padding, dilation, groups[0])


def _with_defaults(given: tuple[Any, ...], named: dict[str, Any]) -> Iterator[Any]:
    for place, (name, default) in enumerate((("stride", 1), ("padding", 0), ("dilation", 1), ("groups", 1))):
        yield given[place] if place < len(given) else named.get(name, default)


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else tuple(value)


def watched(call: Callable[[], Any]) -> Counter[Kind]:
    """The kinds of products and convolutions in a call, and how often each occurs."""
    found: Counter[Kind] = Counter()

    class Watch(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            kind = kind_of(function, args, kwargs or {})
            if kind is not None:
                found[kind] += 1
            return function(*args, **(kwargs or {}))

    with Watch(), _whole_and_by_torch():
        call()
    return found


def optional(name: str) -> ModuleType | None:
    """A module of ``cpvt_det.fast`` or ``cpvt_det.ops``, in checkouts that have it."""
    for room in ("fast", "ops"):
        with contextlib.suppress(ImportError):
            return importlib.import_module(f"cpvt_det.{room}.{name}")
    return None


@contextlib.contextmanager
def _whole_and_by_torch() -> Iterator[None]:
    """In this block every convolution is torch's, so that it can be seen, and in one piece."""
    routes = optional("routes")
    if routes is None:
        yield
        return
    takes = routes.takes
    routes.takes = lambda route, x: route not in UNSEEN and takes(route, x)
    try:
        yield
    finally:
        routes.takes = takes


def ways_of(kind: Kind) -> Ways:
    """Functions that do the work of a kind on drawn numbers, by name; the outputs are the same numbers."""
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in kind.shapes]
    if kind.name == "convolution":
        return _ways_of_convolution(kind, *tensors)
    if kind.name == "linear":
        return _ways_of_linear(*tensors)
    if kind.name == "attention":
        q, k, v = tensors
        mask = torch.ones(len(q), 1, 1, k.shape[-2], dtype=torch.bool) if kind.masked else None
        fused = partial(F.scaled_dot_product_attention, q, k, v, attn_mask=mask)
        return {"fused": fused, "step by step": lambda: (q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5).softmax(-1) @ v}
    return {"matmul": partial(torch.matmul, *tensors)}


def _ways_of_linear(x: Tensor, weight: Tensor) -> Ways:
    """``F.linear``, and 1x1 convolutions; torch gives the dilated one to oneDNN on one thread too (``fast/layers.py``)."""
    last = x[None, :, None].permute(0, 3, 1, 2)  # (rows, C) -> (1, C, rows, 1), channels last
    kernel = weight[:, :, None, None]
    inputs = {"channels last, dilated": (last, 2), "channels last": (last, 1), "contiguous": (last.contiguous(), 1)}
    found: Ways = {"F.linear": partial(F.linear, x, weight)}
    for name, (rows, dilation) in inputs.items():
        found[f"1x1 convolution, {name}"] = partial(_rows_of, rows, kernel, dilation)
    return found


def _rows_of(rows: Tensor, kernel: Tensor, dilation: int) -> Tensor:
    return F.conv2d(rows, kernel, dilation=dilation)[0, :, :, 0].T  # (1, C, rows, 1) -> (rows, C')


def _ways_of_convolution(kind: Kind, x: Tensor, weight: Tensor) -> Ways:
    settings = {"stride": kind.stride, "padding": kind.padding, "groups": kind.groups}
    is_single = weight.shape[2:] == (1, 1)
    last, weight_last = (y.contiguous(memory_format=torch.channels_last) for y in (x, weight))
    found: Ways = {
        "contiguous": partial(F.conv2d, x, weight, dilation=kind.dilation, **settings),
        "channels last": partial(F.conv2d, last, weight_last, dilation=kind.dilation, **settings),
    }
    if is_single:
        found["channels last, dilated"] = partial(F.conv2d, last, weight_last, dilation=2, **settings)
    ours = optional("winograd") or optional("convolution")  # older checkouts have a module of its own
    if hasattr(ours, "convolve_3x3") and (weight.shape[2:], settings, kind.dilation) == ((3, 3), LIKE_WINOGRADS, (1, 1)):
        with contextlib.suppress(ImportError, AttributeError):  # its kernels need numba
            ours.convolve_3x3(last[:1], weight_last)
            found["winograd"] = partial(ours.convolve_3x3, last, weight_last)
    return found
