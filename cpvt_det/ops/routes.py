# SPDX-License-Identifier: Apache-2.0
"""The choice of a kernel for each operation on a CPU, by the processor's instruction sets and never by its manufacturer.

If the environment contains ``CPVT_DET_WITHOUT=winograd,rows``, for example, these two routes are switched off, and torch's own
code is used instead. ``CPVT_DET_WITHOUT=all`` switches off all routes.
"""

import functools
import importlib
import os
from types import ModuleType

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode

from cpvt_det.common.errors import ConfigError

IN_HALVES = "AVX512 in halves"
ROUTES = {
    "linear": ("AVX512",),
    "pointwise": ("AVX2", "AVX512"),
    "rows": ("AVX2", IN_HALVES),
    "winograd": ("AVX2", IN_HALVES),
    "dropout": ("",),
    "deformable": ("",),
    "canvases": ("",),
    "packing": ("",),
    "openmp": ("",),
}
"""Route -> the instruction sets on which it is used, as prefixes of the names that :func:`instructions` returns.

- ``linear`` (``fast/layers.py``): linear layers by oneDNN;
- ``pointwise`` (``fast/convolution.py``): 1x1 convolutions by oneDNN;
- ``rows`` (``fast/convolution.py``): gradients of weights as products of rows;
- ``winograd`` (``fast/convolution.py``): 3x3 convolutions with fewer multiplications;
- ``dropout`` (``fast/layers.py``): dropout by a kernel of our own;
- ``deformable`` (``ops/deformable_attention.py``): deformable attention by numba's kernel;
- ``canvases`` (``fast/resnet.py``): a separate canvas for each image of a padded batch;
- ``packing`` (``fast/layers.py``): encoders leave padded tokens out;
- ``openmp`` (``ops/numba_threads.py``): numba's kernels run in torch's own threads if these are GCC's OpenMP, else in a pool.
"""
OWN = ("dropout", "deformable", "canvases", "packing", "openmp")
"""Routes that do not use oneDNN."""
OF_WIDE_UNITS = ("avx512fp16", "avx512vp2intersect", "avxvnni")
"""Instruction sets, under LLVM's names. A processor with AVX-512's bf16 products and full-width units has at least one of them."""
SWITCH, ALL = "CPVT_DET_WITHOUT", "all"
KNOWN = ("cpvt_det", "torch", "torchvision")
"""Packages whose modules may be given faster classes; the modules of all other packages are left alone."""


@functools.cache
def is_on(route: str) -> bool:
    """Whether a route is used on this processor and is not switched off.

    Raises:
        ConfigError: the variable contains a name that is not in :data:`ROUTES`.
    """
    has_library = route in OWN or torch.backends.mkldnn.is_available()
    return not {route, ALL} & set(left_out()) and has_library and instructions().startswith(ROUTES[route])


def left_out() -> list[str]:
    """The routes that are switched off, by name, or :data:`ALL`.

    Raises:
        ConfigError: the variable contains a name that is not in :data:`ROUTES`.
    """
    names = [name.strip() for name in os.environ.get(SWITCH, "").split(",") if name.strip()]
    for name in names:
        if name not in (*ROUTES, ALL):
            raise ConfigError(f"{SWITCH} names the unknown route {name!r}; known: {', '.join((*ROUTES, ALL))}")
    return names


def instructions() -> str:
    """torch's name for the instruction set it uses, or :data:`IN_HALVES` if AVX-512 runs in two steps on 256-bit units.

    Such a processor is recognised by its instruction sets: it has AVX-512's bf16 products, and none of :data:`OF_WIDE_UNITS`. Two
    kinds are misjudged: Intel's Cooper Lake (2020), whose units have the full width, and AMD's Zen 5 for laptops, whose units
    have only half of it.
    """
    own = torch.backends.cpu.get_cpu_capability()
    flags = _flags() if own.startswith("AVX512") else {}
    return IN_HALVES if flags.get("avx512bf16") and not any(map(flags.get, OF_WIDE_UNITS)) else own


@functools.cache
def _flags() -> dict[str, bool]:
    """The processor's instruction sets, under LLVM's names; empty if llvmlite, which comes with numba, cannot be imported."""
    try:
        from llvmlite.binding import get_host_cpu_features
    except (ImportError, OSError):
        return {}
    return dict(get_host_cpu_features())


@functools.cache
def find_kernels(module: str) -> ModuleType | None:
    """A module of numba's kernels, imported when first needed. ``None`` if numba cannot be imported; deformable attention, which
    loses more without it, warns of it.
    """
    try:
        return importlib.import_module(module)
    except (ImportError, OSError):
        return None


def is_plain(x: Tensor) -> bool:
    """Whether a tensor is a plain CPU tensor of torch that is not being traced, compiled or transformed by ``torch.func``, and no
    dispatch mode is active that counts or fakes operations.
    """
    if torch.compiler.is_compiling() or x.device.type != "cpu" or type(x) not in (Tensor, nn.Parameter):
        return False
    is_watched = torch.jit.is_tracing() or _get_current_dispatch_mode() is not None
    return not is_watched and torch._C._functorch.peek_interpreter_stack() is None


def is_watched(module: nn.Module) -> bool:
    """Whether a module has hooks on its calls or its gradients."""
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks)


def is_known(module: nn.Module) -> bool:
    """Whether a module's class is ours, torch's or torchvision's."""
    return type(module).__module__.partition(".")[0] in KNOWN


def takes(route: str, x: Tensor) -> bool:
    """Whether a route for float32 may be used for ``x``: it must be plain and not empty, and autocast must be off.

    ``torch.backends.mkldnn.enabled = False`` switches off all routes that are checked here.
    """
    if not is_plain(x) or x.dtype != torch.float32 or x.numel() == 0:
        return False
    return torch.backends.mkldnn.enabled and not torch.is_autocast_enabled("cpu") and is_on(route)
