# SPDX-License-Identifier: Apache-2.0
"""The hooks of a model with PEG: callables that can be pickled, deep-copied and compiled with it.

The hooks are not closures and do not refer to a PEG. They read ``layer.peg``, so a copy of a model uses its own PEG.
"""

import threading
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Size
from cpvt_det.position.peg import encode_levels

GridAndMask = tuple[list[Size], Tensor | None]
"""Grid and mask of one forward pass: (H, W) of each level, and (B, N) bool, True = padded, or ``None`` without a mask."""


class PlugError(BadInputError):
    """A model to which no PEG can be added, or a PEG whose grid or mask cannot be right."""


class ForwardContext:
    """Grid and mask of a forward pass. The hooks of a model share them, because one module receives them and other modules need
    them.

    A layer that is recomputed in the backward pass (gradient checkpointing) reads them after the forward pass has ended. It gets
    the grid and mask of the last forward pass. So if two forward passes precede the backward pass, the layers of the earlier one
    get the grid and mask of the later one.
    """

    def __init__(self) -> None:
        self.current: GridAndMask | None = None
        self.thread = 0
        self.open = False

    def record(self, current: GridAndMask) -> None:
        """Record grid and mask at the start of a forward pass."""
        self.current, self.thread, self.open = current, _thread(), True

    def read(self) -> GridAndMask:
        """Grid and mask of the current forward pass, or of the recomputed one.

        Raises:
            PlugError: two threads that use one model at the same time, or a layer that runs without the module that receives the
                grid.
        """
        if self.open and self.thread == _thread():
            return self.current
        if self.current is not None and torch._C._current_graph_task_id() != -1:  # in the backward pass
            return self.current
        if self.open:
            raise PlugError(
                "two threads are running the same model with PEG at the same time; give each thread a copy of the model"
            )
        raise PlugError("the layer was called alone, so its PEG has no grid; call the whole model or the module with its encoder")

    def close(self, *_: Any) -> None:
        """Mark the end of the forward pass, also after an error, as a hook of the owner. A layer that is later called alone then
        does not use an old grid."""
        self.open = False

    def __getstate__(self) -> dict[str, Any]:
        return {"current": None, "thread": 0, "open": False}  # a copy records its own grid and mask


def _thread() -> int:
    """The thread's id; 0 in a compiled graph, which cannot read the id. It does not need the id, because it runs grid and layers as
    one piece."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class RecordGrid:
    """A hook that records grid and mask, before or after the module that receives them.

    Args:
        family: family of the model, a :class:`cpvt_det.plug.families.Family`.
        context: context to record them in.
    """

    def __init__(self, family: Any, context: ForwardContext):
        self.family, self.context = family, context

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any = None) -> None:
        if getattr(module, "_is_replica", False):
            raise PlugError("with DataParallel, all replicas would share one grid; use DistributedDataParallel")
        self.context.record(self.family.grid_and_mask(module, args, kwargs, output))


class ApplyPEG:
    """A hook that runs after a layer and applies PEG to the tokens in its output.

    Args:
        family: family of the model, a :class:`cpvt_det.plug.families.Family`.
        layout: ``BNC``, ``NBC``, ``BHWC`` or ``BCHW``.
        prefix: number of class and register tokens before the tokens of the grid or, with windows, before the tokens of each
            window.
        windows: number of windows per side, each of which is an element of the layer's batch.
        context: grid and mask that another module received; ``None`` to read them from the layer's own call.
    """

    def __init__(self, family: Any, layout: str, prefix: int, windows: int, context: ForwardContext | None):
        self.family, self.layout, self.prefix, self.windows, self.context = family, layout, prefix, windows, context
        self.mask_is_checked = False

    def __call__(self, layer: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> Any:
        if isinstance(layer.peg, nn.ModuleDict):  # named maps
            encoded = {name: self._encode(peg, output[name], layer, args, kwargs) for name, peg in layer.peg.items()}
            return {**output, **encoded}
        if self.family.output is None:
            return self._encode(layer.peg, output, layer, args, kwargs)
        i = self.family.output
        return (*output[:i], self._encode(layer.peg, output[i], layer, args, kwargs), *output[i + 1 :])

    def _encode(self, peg: nn.Module, x: Tensor, layer: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        shapes, padded = self.context.read() if self.context else self.family.grid_and_mask(layer, args, kwargs, x)
        tokens = _to_tokens(x, self.layout)
        head, tokens = tokens[:, : self.prefix], tokens[:, self.prefix :]
        if self.windows > 1:
            tokens = tokens.reshape(-1, self.windows**2 * tokens.shape[1], tokens.shape[2])  # (B, N, C), window by window
        padded = self._checked(tokens, shapes, padded)
        if self.windows > 1:
            height, width = shapes[0][0] // self.windows, shapes[0][1] // self.windows
            if self.family.swaps_windows:
                height, width = width, height
            by_window = (self.windows, self.windows, height, width)
            tokens = tokens.unflatten(1, by_window).transpose(2, 3).flatten(1, 4)  # row by row
        encoded = apply_levels(peg, tokens, padded, shapes)
        if self.windows > 1:
            by_row = (self.windows, height, self.windows, width)
            encoded = encoded.unflatten(1, by_row).transpose(2, 3).reshape(-1, height * width, encoded.shape[2])
        if self.prefix:
            encoded = torch.cat((head, encoded), dim=1)
        encoded = _from_tokens(encoded, self.layout, shapes)
        if encoded.dtype == x.dtype and encoded.stride() == x.stride():
            return encoded
        # Under autocast the PEG's float32 scale makes the output float32; other strides may change the last bit of later products.
        return torch.empty_like(x).copy_(encoded)

    def _checked(self, tokens: Tensor, shapes: Sequence[Size], padded: Tensor | None) -> Tensor:
        """Check that grid and mask fit the tokens, and return the mask (B, N)."""
        count = sum(height * width for height, width in shapes)
        if count != tokens.shape[1]:
            grids = ", ".join(f"{height} x {width}" for height, width in shapes)
            prefix = f", after {self.prefix} class and register tokens," if self.prefix else ""
            raise PlugError(
                f"{self.family.name}: a grid of {grids} has {count} tokens, but the layer{prefix} returned {tokens.shape[1]}; "
                "tokens that were dropped, merged or appended have no place on a grid"
            )
        if padded is None:
            return tokens.new_zeros(tokens.shape[:2], dtype=torch.bool)
        if padded.shape != tokens.shape[:2]:
            raise PlugError(f"{self.family.name}: a mask of shape {tuple(padded.shape)} does not fit tokens {tuple(tokens.shape)}")
        # Not while compiling, and on a GPU only once, because the check must wait for data.
        if (not self.mask_is_checked or padded.device.type == "cpu") and not torch.compiler.is_compiling():
            self.mask_is_checked = True
            if padded[:, 0].any():
                raise PlugError(
                    f"{self.family.name}: in the mask, the top left token of an image is padded; {self.family.mask_meaning}. "
                    "Images are in the top left corner, so this mask is probably inverted"
                )
        return padded


def apply_levels(peg: nn.Module, tokens: Tensor, padded: Tensor, shapes: Sequence[Size]) -> Tensor:
    """Apply a PEG to a single map, or a list of PEGs to the levels, with one PEG per level or one for all.

    Raises:
        PlugError: a list whose length is neither 1 nor the number of levels.
    """
    if not isinstance(peg, nn.ModuleList):
        return peg(tokens, padded, shapes[0])
    if len(peg) not in (1, len(shapes)):
        sizes = ", ".join(f"{height} x {width}" for height, width in shapes)
        raise PlugError(f"the model has {len(peg)} PEGs, but {len(shapes)} levels of {sizes}")
    return encode_levels(peg, tokens, padded, shapes)


def _to_tokens(x: Tensor, layout: str) -> Tensor:
    """Tokens of a layout -> (B, N, C)."""
    if layout == "NBC":
        return x.transpose(0, 1)
    if layout == "BHWC":
        return x.flatten(1, 2)
    return x.flatten(2).transpose(1, 2) if layout == "BCHW" else x


def _from_tokens(tokens: Tensor, layout: str, shapes: Sequence[Size]) -> Tensor:
    """(B, N, C) -> tokens of a layout."""
    if layout == "NBC":
        return tokens.transpose(0, 1)
    if layout == "BHWC":
        return tokens.unflatten(1, shapes[0])
    return tokens.transpose(1, 2).unflatten(2, shapes[0]) if layout == "BCHW" else tokens


class ZeroArgument:
    """A hook before a module that replaces an additive encoding, a tensor or a list of tensors, with zeros."""

    def __init__(self, name: str, index: int):
        self.name, self.index = name, index

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self.name in kwargs:
            return args, {**kwargs, self.name: _zeros(kwargs[self.name])}
        if len(args) > self.index:
            return (*args[: self.index], _zeros(args[self.index]), *args[self.index + 1 :]), kwargs
        raise PlugError(
            f"{type(module).__name__} was called without {self.name!r}, the encoding that position='replace' removes; "
            "this version of the model is not supported"
        )


def zero_output(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    """A hook after a position encoding that replaces its output with zeros."""
    return _zeros(output)


def _zeros(value: Any) -> Any:
    if value is None:
        return None
    return torch.zeros_like(value) if isinstance(value, Tensor) else [torch.zeros_like(one) for one in value]


class AttributeOverride:
    """A different value for a module's attribute; ``remove()`` restores the old value. A tensor that replaces a parameter becomes a
    buffer."""

    def __init__(self, module: nn.Module, name: str, value: Any):
        self.module, self.name = module, name
        self.had, self.kept = hasattr(module, name), getattr(module, name, None)
        self.order = list(module._parameters)
        if isinstance(value, Tensor):
            delattr(module, name)
            module.register_buffer(name, value, persistent=False)
        else:
            setattr(module, name, value)

    def remove(self) -> None:
        """Restore the old value. A parameter gets its old place among the module's parameters, and the device and dtype of the
        others."""
        module, kept = self.module, self.kept
        if isinstance(kept, nn.Parameter):
            if self.name in module._buffers:
                delattr(module, self.name)
            kept.data = kept.data.to(next(module.parameters()))
        if not self.had:
            delattr(module, self.name)
            return
        setattr(module, self.name, kept)
        for name in self.order:
            module._parameters[name] = module._parameters.pop(name)
