# SPDX-License-Identifier: Apache-2.0
"""Hooks that keep the padding out of any convolutional network, and a probe that tests whether they do so completely.

Each kind of module gets its own treatment. A convolution or pooling with a kernel above 1 gets zeros under the padding, which
then acts like the module's own zero padding. A norm computes its statistics from valid cells only. If a module takes a mean over
the map (squeeze-excite), the padding is filled with the mean of the valid cells, so that the padding does not change the mean.
Anything else that a network does with a map is found by a test, not by the module's name; see :func:`probe`.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det.common.structures import level_padding_mask, padding_mask_of
from cpvt_det.layers.norm import MaskedBatchNorm2d, MaskedGroupNorm

TOLERANCE = 1e-9
"""Largest difference at which two float64 maps count as equal, relative to their largest number."""
MOST_SPARE = 6
"""Largest number of rows that a network may add to its map, as a 7 x 7 stem does."""


@dataclass(frozen=True)
class Treatment:
    """The treatment of one module of a network.

    Attributes:
        module: full name of the module.
        kind: key of ``HOOKS``.
        grid: grid of the module's input map.
        out_grid: grid of the module's output map.
    """

    module: str
    kind: str
    grid: "Grid"
    out_grid: "Grid"


@dataclass(frozen=True)
class Grid:
    """The cells of a map.

    Attributes:
        stride: pixels per cell.
        spare: numbers of rows and of columns that the network itself adds to the map. Half of the rows are at the top, and half
            of the columns at the left.
    """

    stride: int
    spare: int = 0

    @classmethod
    def of(cls, canvas: Sequence[int], x: Tensor) -> "Grid | None":
        """The grid of a map (B, C, h, w) on a canvas whose sides differ; ``None`` for any other tensor."""
        sides = x.shape[2:]
        if x.ndim != 4 or sides[0] == sides[1]:
            return None
        stride, rest = divmod(canvas[0] - canvas[1], sides[0] - sides[1])
        spares = {side - whole // stride for side, whole in zip(sides, canvas, strict=True)} if stride > 0 else set()
        is_map = not rest and len(spares) == 1 and 0 <= min(spares) <= MOST_SPARE and not any(side % stride for side in canvas)
        return cls(stride, *spares) if is_map else None


class InexactError(ValueError):
    """Raised if a network's features of an image depend on the padding; the message says why."""


class ValidCells:
    """The valid (unpadded) cells at every stride, computed once per batch.

    Args:
        padding_mask: (B, H, W) bool, True = padded.
    """

    def __init__(self, padding_mask: Tensor):
        self._padding_mask = padding_mask
        self._made: dict[tuple[Grid, torch.dtype], Tensor] = {}

    def at(self, grid: Grid, dtype: torch.dtype) -> Tensor:
        """The mask (B, 1, h, w) of a grid in this dtype, 1 = valid."""
        if (grid, dtype) not in self._made:
            valid = ~level_padding_mask(self._padding_mask, grid.stride)
            before = grid.spare // 2
            valid = F.pad(valid, (before, grid.spare - before) * 2) if grid.spare else valid
            self._made[grid, dtype] = valid[:, None].to(dtype)
        return self._made[grid, dtype]


# Not an attribute of the network, because each copy of the network and each thread has its own batch.
_BATCH: ContextVar[ValidCells | None] = ContextVar("valid cells of the batch", default=None)


@contextlib.contextmanager
def of_batch(cells: ValidCells | None) -> Iterator[None]:
    """Within the block, let the hooks keep out the padding of this batch. ``None`` means that nothing is padded, and the hooks do
    nothing.
    """
    token = _BATCH.set(cells)
    try:
        yield
    finally:
        _BATCH.reset(token)


def current_batch() -> ValidCells | None:
    """The cells of the batch that :func:`of_batch` has set."""
    return _BATCH.get()


def treat(network: nn.Module, treatments: Sequence[Treatment]) -> None:
    """Put the hooks of the treatments on the network's modules; skip modules that the network does not have."""
    modules = dict(network.named_modules())
    for treatment in treatments:
        module = modules.get(treatment.module)
        if module is None or (treatment.kind == "counted" and not isinstance(module, COUNTING)):
            continue
        before, after = HOOKS[treatment.kind]
        module.register_forward_pre_hook(partial(_if_padded, before, grid=treatment.grid))
        if after is not None:
            module.register_forward_hook(partial(_if_padded, after, grid=treatment.grid, out_grid=treatment.out_grid))


def _if_padded(hook: Callable, module: nn.Module, *call: object, **grids: Grid) -> object:
    """Call a hook with the cells of the batch, unless nothing is padded."""
    cells = _BATCH.get()
    return None if cells is None else hook(cells, module, *call, **grids)


def _zero(cells: ValidCells, module: nn.Module, args: tuple, grid: Grid) -> tuple:
    """Zero the padding of (B, C, h, w), or of (B, h, w, C) if the module works channels-last."""
    zeroed = channels_second(module, args[0]) * cells.at(grid, args[0].dtype)
    return (zeroed.movedim(1, -1) if getattr(module, "channel_dim", 1) == -1 else zeroed, *args[1:])


def _lowest(cells: ValidCells, module: nn.Module, args: tuple, grid: Grid) -> tuple:
    """Fill the padding with -inf, which is never the maximum, like the pooling's own padding."""
    return (args[0].masked_fill(cells.at(grid, torch.bool).logical_not(), -torch.inf), *args[1:])


def _zero_after(cells: ValidCells, module: nn.Module, args: tuple, out: Tensor, grid: Grid, out_grid: Grid) -> Tensor:
    """Replace the infinities of windows without a valid cell by 0."""
    return out.masked_fill(cells.at(out_grid, torch.bool).logical_not(), 0)


def _mean_of_valid(cells: ValidCells, module: nn.Module, args: tuple, out: Tensor, grid: Grid, out_grid: Grid) -> Tensor:
    """Turn a mean that counts padded cells as zeros into the mean of the valid cells. This is for poolings that do not count
    their own padding.
    """
    share = type(module).forward(module, cells.at(grid, out.dtype))
    return out / torch.where(share > 0, share, 1)


def _mean(cells: ValidCells, module: nn.Module, args: tuple, grid: Grid) -> tuple:
    """Fill the padding with the mean of the valid cells, (B, C, 1, 1), so that the padding changes neither the mean nor the
    maximum of the map.
    """
    return (_filled(args[0], cells.at(grid, args[0].dtype)), *args[1:])


def _filled(x: Tensor, valid: Tensor) -> Tensor:
    zeroed = x * valid
    mean = zeroed.sum((2, 3), keepdim=True) / valid.sum((2, 3), keepdim=True).clamp(min=1)
    return torch.addcmul(zeroed, mean, 1 - valid)


def _counted(cells: ValidCells, module: nn.Module, args: tuple, grid: Grid) -> tuple | None:
    """Pass the valid cells to our norms as a second argument. Batch norms need the valid cells only in training, for their
    statistics.
    """
    if isinstance(module, nn.BatchNorm2d) and not module.training:
        return None
    return args[0], cells.at(grid, args[0].dtype)


HOOKS: dict[str, tuple[Callable, Callable | None]] = {
    "zero": (_zero, None),
    "lowest": (_lowest, _zero_after),
    "mean of valid": (_zero, _mean_of_valid),
    "mean": (_mean, None),
    "counted": (_counted, None),
}
"""Kind of treatment -> hook before the module, hook after it."""
COUNTING = (MaskedBatchNorm2d, MaskedGroupNorm)


def kind_of(module: nn.Module, is_padded: bool = False) -> str:
    """The treatment of a module by its type. Empty for a module that works on single cells, and for a module of unknown type.

    Args:
        module: any module.
        is_padded: whether the network itself has put zeros around the module's input. Max pooling sees these zeros.
    """
    if isinstance(module, nn.MaxPool2d):
        return "zero" if is_padded else "lowest"
    if isinstance(module, nn.AvgPool2d):
        return "zero" if module.count_include_pad else "mean of valid"
    if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
        return "zero" if max(module.kernel_size) > 1 else ""
    if isinstance(module, (nn.BatchNorm2d, nn.GroupNorm)):
        return "counted"
    return "zero" if type(module).__name__ in ("BlurPool2d", "GlobalResponseNorm") else ""


def channels_second(module: nn.Module, x: Tensor) -> Tensor:
    """A module's input or output as (B, C, h, w), moved there from (B, h, w, C) if the module works channels-last."""
    return x.movedim(-1, 1) if getattr(module, "channel_dim", 1) == -1 else x


class Watch:
    """An observer of one forward pass, which finds the treatment of each module whose type needs one.

    Args:
        network: network whose modules are observed until :meth:`treatments` is called.
        canvas: (height, width) of the images, which differ.

    Attributes:
        reach: largest stride of an observed map so far, in pixels.
        reason: the reason why a module cannot be treated; empty if all can be.
    """

    def __init__(self, network: nn.Module, canvas: Sequence[int]):
        self.reach, self.reason = 1, ""
        self._canvas, self._seen = canvas, {}
        modules = [(name, module) for name, module in network.named_modules() if kind_of(module)]
        self.handles = [module.register_forward_hook(partial(self._see, name)) for name, module in modules]

    def treatments(self) -> list[Treatment]:
        """Stop observing, and return the treatments in the order of the forward pass."""
        for handle in self.handles:
            handle.remove()
        return list(self._seen.values())

    def _see(self, name: str, module: nn.Module, args: tuple, out: Tensor) -> None:
        grids = [Grid.of(self._canvas, channels_second(module, x)) for x in (args[0], out)]
        if None in grids:
            if kind_of(module) != "counted":  # a norm on one number per channel is harmless
                sides = " x ".join(map(str, (args[0] if grids[0] is None else out).shape[2:]))
                self.reason = self.reason or f"{name} has a map of {sides} cells for {self._canvas[0]} x {self._canvas[1]} pixels"
            return
        self.reach = max(self.reach, *(grid.stride for grid in grids))
        made = Treatment(name, kind_of(module, is_padded=grids[0].spare > 0), *grids)
        if self._seen.setdefault(name, made) != made:
            self.reason = self.reason or f"{name} is used at several strides"


Forward = Callable[[Tensor], Sequence[Tensor]]


def probe(network: nn.Module, forward: Forward, treatments: Sequence[Treatment], divisor: int) -> list[Treatment]:
    """Test whether a network's features are independent of the padding, and find modules that average over the map.

    Two images, each in two copies, run in one padded batch. After every treated module, the padding of each copy gets different
    random numbers; a module whose output then differs between the copies has looked at the padding. If such a module contains no
    convolution or pooling, and its outputs agree once the padding is filled with the mean of the valid cells, then the module
    gets this treatment. At the end, the maps of each image must equal the maps that the network computes for this image alone.
    When it is computed alone, the first image has no padding at all. All computation is in float64. A table of module types would
    not be enough, because what a module itself computes between its submodules has no type.

    Args:
        network: network in float64 and in evaluation mode, with weights from :func:`unsettle`; it keeps the hooks.
        forward: images (B, 3, H, W) -> maps (B, C, h, w).
        treatments: treatments of its modules so far.
        divisor: number that must divide the height and width of every canvas.

    Returns:
        Further treatments that the network needs.

    Raises:
        InexactError: features of an image that depend on the padding around it.
    """
    generator = torch.Generator().manual_seed(0)
    treat(network, treatments)
    sizes = [(2 * divisor, divisor), (divisor + divisor // 3, divisor - divisor // 4)]
    images = [torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in sizes]
    canvas, twice = sizes[0], (0, 0, 1, 1)
    search = _Search(network, treatments, (3 * divisor, 2 * divisor), [sizes[index] for index in twice], generator)
    with torch.no_grad():
        together = search.run(forward, [images[index] for index in twice])
        treat(network, search.found)
        for index, (image, size) in enumerate(zip(images, sizes, strict=True)):
            alone = _run(forward, image, canvas)
            for map_, batch in zip(alone, together, strict=True):
                stride = Grid.of(canvas, map_).stride
                height, width = (-(-side // stride) for side in size)
                expected, found = map_[0, :, :height, :width], batch[2 * index : 2 * index + 2, :, :height, :width]
                if not (found - expected).abs().max() <= TOLERANCE * expected.abs().max():  # written so that NaNs fail too
                    where = f"; {search.suspect} uses all cells, including padded ones" if search.suspect else ""
                    raise InexactError(f"its map of stride {stride} changes with the padding{where}")
    return search.found


class _Search:
    """Runs a batch of two images, each in two copies with different padding, and watches what modules do with the padding."""

    def __init__(
        self,
        network: nn.Module,
        treatments: Sequence[Treatment],
        canvas: Sequence[int],
        sizes: Sequence[Sequence[int]],
        generator: torch.Generator,
    ):
        self.found: list[Treatment] = []
        self.suspect = ""
        self._simple: dict[str, Treatment] = {}
        self._network, self._canvas, self._sizes, self._generator = network, canvas, sizes, generator
        self._cells = ValidCells(padding_mask_of(sizes, canvas))
        self._treated = {treatment.module for treatment in treatments if treatment.kind != "counted"}

    def run(self, forward: Forward, images: Sequence[Tensor]) -> Sequence[Tensor]:
        """The maps of a batch of images (3, h, w)."""
        batch = torch.zeros(len(images), 3, *self._canvas, dtype=torch.float64)
        for place, image, (height, width) in zip(batch, images, self._sizes, strict=True):
            place[:, :height, :width] = image
        handles = [
            module.register_forward_hook(self._spoil if name in self._treated else partial(self._watch, name))
            for name, module in self._network.named_modules()
        ]
        with of_batch(self._cells):
            maps = forward(batch)
        for handle in handles:
            handle.remove()
        # A gate that is closed for both images goes unnoticed. Therefore other modules of a type that was found are treated too.
        names, kinds = {part.module for part in self.found}, {type(self._network.get_submodule(part.module)) for part in self.found}
        self.found += [
            part for name, part in self._simple.items() if name not in names and type(self._network.get_submodule(name)) in kinds
        ]
        return maps

    def _grid(self, x: object) -> Grid | None:
        is_of_batch = isinstance(x, Tensor) and len(x) == len(self._sizes)
        return Grid.of(self._canvas, x) if is_of_batch and x.ndim == 4 else None

    def _differs(self, x: Tensor, grid: Grid | None) -> bool:
        """Whether the copies of an image differ; in a map, only valid cells count."""
        valid = x if grid is None else x * self._cells.at(grid, x.dtype)
        return bool((valid[0::2] - valid[1::2]).abs().max() > TOLERANCE * valid.abs().max())

    def _first(self, x: Tensor, grid: Grid | None) -> Tensor:
        """The valid part of the first image, (1, C, h, w)."""
        height, width = (side // grid.stride for side in self._sizes[0]) if grid else (1, 1)
        return x[:1, :, :height, :width] if x.ndim == 4 else x[:1]

    def _spoil(self, module: nn.Module, args: tuple, out: Tensor) -> Tensor:
        """Put different numbers under the padding of each copy."""
        if (grid := self._grid(out)) is None:
            return out
        noise = torch.randn(out.shape, generator=self._generator, dtype=out.dtype) * out.std()
        return torch.where(self._cells.at(grid, torch.bool), out, noise)

    def _watch(self, name: str, module: nn.Module, args: tuple, out: object) -> Tensor | None:
        """Find a module that mixes padding into valid cells. It is one for which the copies agree in the input map but differ in
        the output.
        """
        grid, out_grid = self._grid(args[0] if args else None), self._grid(out)
        is_vector = isinstance(out, Tensor) and out.shape[2:].numel() == 1
        if self.suspect or grid is None or not (out_grid or is_vector):
            return None
        is_simple = not any(kind_of(part) not in ("", "counted") for part in module.modules())
        if is_simple:
            self._simple[name] = Treatment(name, "mean", grid, out_grid or grid)
        if self._differs(args[0], grid) or not self._differs(out, out_grid):
            return None
        if is_simple:
            run = partial(type(module).forward, module)
            out = run(_filled(args[0], self._cells.at(grid, out.dtype)), *args[1:])
            # The first image fills whole cells of every stride.
            alone, place = run(self._first(args[0], grid)), self._first(out, out_grid)
            if not self._differs(out, out_grid) and (place - alone).abs().max() <= TOLERANCE * alone.abs().max():
                self.found.append(self._simple[name])
                return self._spoil(module, args, out)
        self.suspect = f"{name} ({type(module).__name__})" if name else type(module).__name__
        return None


@contextlib.contextmanager
def unsettle(network: nn.Module) -> Iterator[None]:
    """Give a network weights that cannot hide a dependence on the padding. Constant parameters, such as the zeros of a last norm,
    get random values. Within the block, batch norms use the statistics of their inputs, so that no gate is saturated.
    """
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.numel() and (parameter == parameter.flatten()[0]).all():
                parameter += 0.2 + 0.3 * torch.rand(parameter.shape, generator=generator, dtype=parameter.dtype)
    norms = [module for module in network.modules() if isinstance(module, nn.BatchNorm2d)]
    for norm in norms:
        norm.train().momentum = 1.0
    try:
        yield
    finally:
        network.eval()


def _run(forward: Forward, image: Tensor, canvas: Sequence[int]) -> Sequence[Tensor]:
    """The maps of a single image on a canvas."""
    size = tuple(image.shape[1:])
    batch = torch.zeros(1, 3, *canvas, dtype=torch.float64)
    batch[0, :, : size[0], : size[1]] = image
    with of_batch(None if size == tuple(canvas) else ValidCells(padding_mask_of([size], canvas))):
        return forward(batch)
