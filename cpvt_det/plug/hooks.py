# SPDX-License-Identifier: Apache-2.0
"""What a plugged model runs: callables that pickle, deep-copy and compile with it.

None of them is a closure, and none holds a PEG: they read ``layer.peg``, so a copy of a model uses its own.
"""

import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from cpvt_det.errors import BadInputError
from cpvt_det.position.peg import encode_levels
from cpvt_det.structures import Size

if TYPE_CHECKING:
    from cpvt_det.plug.families import Family

GridAndMask = tuple[list[Size], Tensor | None]
"""Of one forward pass: (H, W) of each level, and (B, N) bool, True = padded, or ``None`` where the family has no mask."""


class PlugError(BadInputError):
    """A model that cannot be plugged, or a plugged model whose grid or mask cannot be right."""


class ForwardContext:
    """What one place of the model has seen and another one needs: shared by the callables of one plug.

    A layer that is recomputed in the backward pass (gradient checkpointing) reads it after the forward pass has ended: that of
    the last forward pass, so two of them before one backward pass cannot be told apart.
    """

    def __init__(self) -> None:
        self.current: GridAndMask | None = None
        self.thread = 0
        self.open = False

    def record(self, current: GridAndMask) -> None:
        """What a forward pass sees at its beginning."""
        self.current, self.thread, self.open = current, _thread(), True

    def read(self) -> GridAndMask:
        """What the forward pass under way, or under recomputation, has told."""
        if self.open and self.thread == _thread():
            return self.current
        if self.current is not None and torch._C._current_graph_task_id() != -1:  # in the backward pass
            return self.current
        if self.open:
            raise PlugError("two threads run one plugged model at once, on one grid; give each thread a copy of the model")
        raise PlugError("the layer ran alone, so that nothing told its PEG the grid; call the model, or what holds its encoder")

    def close(self) -> None:
        """The forward pass is over, well or not."""
        self.open = False

    def __getstate__(self) -> dict[str, Any]:
        return {"current": None, "thread": 0, "open": False}  # a copy sees for itself


def _thread() -> int:
    """A compiled graph sees grid and layer in one piece, and cannot ask."""
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class RecordGrid:
    """A hook before or after the module that knows grid and mask."""

    def __init__(self, family: "Family", context: ForwardContext):
        self.family, self.context = family, context

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any = None) -> None:
        if getattr(module, "_is_replica", False):
            raise PlugError("DataParallel runs its replicas on one grid; use DistributedDataParallel")
        self.context.record(self.family.grid_and_mask(module, args, kwargs, output))


class ClearContext:
    """A hook after the owner: a layer called alone must not meet the grid of an image that has gone."""

    def __init__(self, context: ForwardContext):
        self.context = context

    def __call__(self, module: nn.Module, args: tuple, output: Any) -> None:
        self.context.close()


class ApplyPEG:
    """The hook after a layer: PEG on the tokens of its output.

    Args:
        family: knows which output holds tokens, and where it says so itself, grid and mask.
        layout: ``BNC``, ``NBC``, ``BHWC`` or ``BCHW``.
        prefix: tokens before those of the grid: class and register tokens.
        context: what another place saw; ``None``: the layer's own call tells.
    """

    def __init__(self, family: "Family", layout: str, prefix: int, context: ForwardContext | None):
        self.family, self.layout, self.prefix, self.context = family, layout, prefix, context
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
        padded = self._checked(tokens, shapes, padded)
        encoded = apply_levels(peg, tokens, padded, shapes)
        if self.prefix:
            encoded = torch.cat((head, encoded), dim=1)
        encoded = _from_tokens(encoded, self.layout, shapes)
        if encoded.dtype == x.dtype and encoded.stride() == x.stride():
            return encoded
        # Under autocast the PEG's float32 scale widens; and on other strides the next products may differ in the last bit.
        return torch.empty_like(x).copy_(encoded)

    def _checked(self, tokens: Tensor, shapes: Sequence[Size], padded: Tensor | None) -> Tensor:
        """The mask (B, N), after grid and mask have been held against the tokens."""
        count = sum(height * width for height, width in shapes)
        if count != tokens.shape[1]:
            grids = ", ".join(f"{height} x {width}" for height, width in shapes)
            prefix = f", after {self.prefix} class and register tokens," if self.prefix else ""
            raise PlugError(
                f"{self.family.name}: a grid of {grids} has {count} tokens, but the layer{prefix} gave {tokens.shape[1]}; "
                "tokens that were dropped, merged or appended have no place on a grid"
            )
        if padded is None:
            return tokens.new_zeros(tokens.shape[:2], dtype=torch.bool)
        if padded.shape != tokens.shape[:2]:
            raise PlugError(f"{self.family.name}: a mask {tuple(padded.shape)} for tokens {tuple(tokens.shape)}")
        # Not while tracing, and on a GPU once: the answer depends on data, which it waits for.
        if (not self.mask_is_checked or padded.device.type == "cpu") and not torch.compiler.is_compiling():
            self.mask_is_checked = True
            if padded[:, 0].any():
                raise PlugError(
                    f"{self.family.name}: the mask calls the top left token of an image padded; {self.family.mask_meaning}. "
                    "Images lie in the top left corner, so this mask has the other meaning"
                )
        return padded


def apply_levels(peg: nn.Module, tokens: Tensor, padded: Tensor, shapes: Sequence[Size]) -> Tensor:
    """A PEG on the one map there is, or from a list on each level's own: the list holds one a level, or one for all."""
    if not isinstance(peg, nn.ModuleList):
        return peg(tokens, padded, shapes[0])
    if len(peg) not in (1, len(shapes)):
        raise PlugError(f"{len(peg)} PEGs for {len(shapes)} levels of {', '.join(f'{h} x {w}' for h, w in shapes)}")
    return encode_levels(peg, tokens, padded, shapes)


def _to_tokens(x: Tensor, layout: str) -> Tensor:
    """To (B, N, C) from the layout."""
    if layout == "NBC":
        return x.transpose(0, 1)
    if layout == "BHWC":
        return x.flatten(1, 2)
    return x.flatten(2).transpose(1, 2) if layout == "BCHW" else x


def _from_tokens(tokens: Tensor, layout: str, shapes: Sequence[Size]) -> Tensor:
    """From (B, N, C) to the layout."""
    if layout == "NBC":
        return tokens.transpose(0, 1)
    if layout == "BHWC":
        return tokens.unflatten(1, shapes[0])
    return tokens.transpose(1, 2).unflatten(2, shapes[0]) if layout == "BCHW" else tokens


class ZeroArgument:
    """A hook before a module: an additive encoding, a tensor or a list of them, arrives as zeros."""

    def __init__(self, name: str, index: int):
        self.name, self.index = name, index

    def __call__(self, module: nn.Module, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if self.name in kwargs:
            return args, {**kwargs, self.name: _zeros(kwargs[self.name])}
        if len(args) > self.index:
            return (*args[: self.index], _zeros(args[self.index]), *args[self.index + 1 :]), kwargs
        raise PlugError(
            f"{type(module).__name__} was called without {self.name!r}, the encoding that position='replace' takes away; "
            "this version of it is not known"
        )


class ZeroOutput:
    """A hook after a position encoding: zeros of the same shape."""

    def __call__(self, module: nn.Module, args: tuple, output: Tensor) -> Tensor:
        return _zeros(output)


def _zeros(value: Any) -> Any:
    if value is None:
        return None
    return torch.zeros_like(value) if isinstance(value, Tensor) else [torch.zeros_like(one) for one in value]


class AttributeOverride:
    """An attribute of a module that has another value until ``remove()``; a tensor takes a parameter's place as a buffer."""

    def __init__(self, module: nn.Module, name: str, value: Any):
        self.module, self.name = module, name
        self.had, self.kept = hasattr(module, name), getattr(module, name, None)
        self.order, self.dtype = list(module._parameters), _parameter_of(module).dtype
        if isinstance(value, Tensor):
            delattr(module, name)
            module.register_buffer(name, value, persistent=False)
        else:
            setattr(module, name, value)

    def remove(self) -> None:
        """Put the old value back, at the old place among the parameters, on the device of the others."""
        module, kept = self.module, self.kept
        if isinstance(kept, nn.Parameter):
            if self.name in module._buffers:
                delattr(module, self.name)
            other = _parameter_of(module)
            kept.data = kept.data.to(other.device, other.dtype if other.dtype != self.dtype else kept.dtype)
        if not self.had:
            delattr(module, self.name)
            return
        setattr(module, self.name, kept)
        for name in self.order:
            module._parameters[name] = module._parameters.pop(name)


def _parameter_of(module: nn.Module) -> nn.Parameter:
    """One to tell device and dtype by."""
    return next(module.parameters())
