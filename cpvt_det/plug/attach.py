# SPDX-License-Identifier: Apache-2.0
"""Add a PEG to another project's model, remove it, fold it, and report where it is."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import nn

from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.common.errors import WeightsError
from cpvt_det.common.structures import Size
from cpvt_det.plug.families import Family, attribute_of, checked_grid, find_owner
from cpvt_det.plug.hooks import ApplyPEG, AttributeOverride, ForwardContext, PlugError, RecordGrid
from cpvt_det.position.peg import PEGDetection

WRAPPERS = {
    "OptimizedModule": "is compiled, and compiled code would ignore the PEG; add it before torch.compile",
    "ScriptModule": "is TorchScript, to which no layers can be added; add the PEG to the Python model",
    **dict.fromkeys(
        ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"),
        "is wrapped for several processes, and the wrapper would not synchronise the PEG's gradients; add the PEG to the model "
        "inside, then wrap it and build the optimizer",
    ),
}
PREFIXES = ("module.",)
"""Prefixes to remove from the names of weights; not ``model.``, which transformers' own networks have."""


@dataclass
class Plug:
    """A record of what ``add_peg`` has done: the changes to undo, and the layers that have a PEG. It is stored as ``_peg_plug`` in
    the module that owns the layers."""

    undo: list[Any]
    layers: list[nn.Module]


def add_peg(
    model: nn.Module,
    after: int | str | Sequence[int | str] = 0,
    position: Literal["keep", "replace"] = "keep",
    weights: str | Path | Mapping[str, Any] | None = None,
    grid: Size | None = None,
    share_levels: bool = False,
    **peg_options: Any,
) -> nn.Module:
    """Put PEGs after layers of a known model, in place. Call this before ``torch.compile``, DDP and the optimizer.

    Args:
        model: a model of a family in docs/plug.md, or a module that contains one.
        after: index or name of the layers; for a backbone with named maps, names of the maps.
        position: ``keep``, or ``replace`` to remove the encoding that the model has at this place.
        weights: source of the PEGs' weights: a folder of ``save_pretrained``, a file, or a state dict.
        grid: (H, W) of the tokens, only for ``nn.TransformerEncoder``, which does not know its grid. To change the grid later, set
            ``encoder.peg_grid``.
        share_levels: whether one PEG serves all levels of a multi-level encoder, instead of one per level.
        peg_options: options of :class:`~cpvt_det.position.peg.PEGDetection`; the default is ``zero_init=True``, so that no output
            changes.

    Returns:
        The model.

    Raises:
        PlugError: an unknown, compiled or wrapped model, or one that already has a PEG; a missing layer; no encoding to replace.
        TypeError: an option that PEG does not have.
        WeightsError: weights that do not fit the PEGs one to one. The model is then unchanged.
    """
    _refuse_wrapped(model)
    if _plugs(model):
        raise PlugError("the model already has a PEG; call remove_peg first, or name all layers in one call: after=[0, 2]")
    _, owner, family = find_owner(model)
    attach(owner, family, after, position, grid, share_levels, **peg_options)
    if weights is not None:
        try:
            _load(model, weights)
        except Exception:
            remove_peg(model)
            raise
    return model


def remove_peg(model: nn.Module) -> nn.Module:
    """Remove all PEGs, in place; afterwards keys, hooks and encodings are as before ``add_peg``.

    Raises:
        PlugError: a model that has no PEG, is compiled or is wrapped.
    """
    _refuse_wrapped(model)
    for owner, plug in _required_plugs(model):
        for done in reversed(plug.undo):
            done.remove()
        for layer in plug.layers:
            del layer.peg
        del owner._peg_plug
    _forget_compiled()
    return model


def fold_peg(model: nn.Module) -> nn.Module:
    """Merge the norm of every PEG into its convolution, in place, for inference.

    Raises:
        PlugError: a model without a PEG.
        ValueError: as in :meth:`~cpvt_det.position.peg.PEGDetection.fold`.
    """
    pegs = [peg for _, peg in _named_pegs(model)]
    for peg in pegs:
        peg.check_foldable()  # check all PEGs before changing the first
    for peg in pegs:
        peg.fold()
    _forget_compiled()
    return model


def peg_report(model: nn.Module) -> str:
    """A table with one row per PEG: its place, number of parameters, norm, and mean absolute scale.

    Raises:
        PlugError: a model without a PEG.
    """
    rows = []
    for name, peg in _named_pegs(model):
        scale = "none" if peg.scale is None else f"{peg.scale.detach().abs().mean():.3g}"
        rows.append((name, sum(parameter.numel() for parameter in peg.parameters()), type(peg.norm).__name__, scale))
    return tabulate(rows, headers=["where", "parameters", "norm", "mean |scale|"], disable_numparse=True)


def attach(
    owner: nn.Module,
    family: Family,
    after: int | str | Sequence[int | str] = 0,
    position: str = "keep",
    grid: Size | None = None,
    share_levels: bool = False,
    **peg_options: Any,
) -> None:
    """Put PEGs into the owner of the layers, which belongs to a known family; the other arguments are those of :func:`add_peg`."""
    layers = _chosen(family.layers(owner), after, family)
    if position not in ("keep", "replace"):
        raise PlugError(f"position must be 'keep' or 'replace', got {position!r}")
    if grid is not None:
        grid = checked_grid(grid)
    if (grid is None) == family.needs_grid:
        advice = "needs grid=(H, W)" if family.needs_grid else "has its own grid; remove grid=(H, W)"
        raise PlugError(f"{family.name} {advice}")
    pegs = _make_pegs(owner, layers, family, share_levels, peg_options)
    undo = family.replace(owner) if position == "replace" else []
    if position == "replace" and not undo:
        raise PlugError(f"{family.name}: there is nothing to replace: the model has no encoding of its own; use position='keep'")
    if grid is not None:  # of an nn.TransformerEncoder, whose nested tensors pack the valid tokens, without a grid
        undo += [AttributeOverride(owner, "use_nested_tensor", False), AttributeOverride(owner, "peg_grid", grid)]
    if owner in layers.values():  # the maps of a backbone
        owner.peg = nn.ModuleDict(pegs).train(owner.training)
    else:
        for name, peg in pegs.items():
            layers[name].peg = peg
    plug = owner._peg_plug = Plug(undo, list(dict.fromkeys(layers.values())))
    context = None
    if family.grid_source is not None:
        context, (path, when) = ForwardContext(), family.grid_source
        watched = owner.get_submodule(path)
        register = watched.register_forward_pre_hook if when == "before" else watched.register_forward_hook
        undo.append(register(RecordGrid(family, context), with_kwargs=True))
        undo.append(owner.register_forward_hook(context.close, always_call=True))
    for layer in plug.layers:
        prefix, windows = attribute_of(owner, family.prefix), attribute_of(owner, family.windows)
        apply = ApplyPEG(family, family.layout_of(owner), prefix, windows, context)
        # First, so that hooks that record a layer's output, as transformers' do after a first call, see the PEG's output.
        undo.append(layer.register_forward_hook(apply, prepend=True, with_kwargs=True))
    _forget_compiled()


def _chosen(layers: Mapping[str, nn.Module], after: int | str | Sequence[int | str], family: Family) -> dict[str, nn.Module]:
    """The layers in ``after``, by name."""
    wanted = [after] if isinstance(after, (str, Integral)) or not isinstance(after, Iterable) else list(after)
    known = list(layers)
    names = []
    for one in wanted:
        if isinstance(one, Integral) and not isinstance(one, bool) and 0 <= one < len(known):
            names.append(known[one])
        elif isinstance(one, str) and one in layers:
            names.append(one)
        else:
            raise PlugError(f"{family.name} has no layer {one!r}; known: 0 to {len(known) - 1}, or {', '.join(known)}")
    if not names or len(set(names)) != len(names):
        raise PlugError(f"after must name at least one layer, and each only once; got {after!r}")
    taken = [name for name in names if hasattr(layers[name], "peg")]
    if taken:
        raise PlugError(f"{family.name}: the layer {taken[0]} already has an attribute 'peg', which is not from add_peg")
    return {name: layers[name] for name in names}


def _make_pegs(
    owner: nn.Module, layers: Mapping[str, nn.Module], family: Family, share_levels: bool, peg_options: Mapping[str, Any]
) -> dict[str, nn.Module]:
    """For each layer a PEG, or a list of one per level, on the device and in the dtype of the layer."""
    options = {"zero_init": True, **peg_options}
    levels, pegs = family.levels(owner), {}
    for name, layer in layers.items():
        channels = family.channels(owner, name, layer)
        if levels is None:
            peg = PEGDetection(channels, **options)
        else:
            peg = nn.ModuleList(PEGDetection(channels, **options) for _ in range(1 if share_levels else levels))
        like = next(parameter for parameter in layer.parameters() if parameter.is_floating_point())
        pegs[name] = peg.to(like.device, like.dtype).train(layer.training)
    return pegs


def _plugs(model: nn.Module) -> list[tuple[nn.Module, Plug]]:
    return [(module, module._peg_plug) for module in model.modules() if "_peg_plug" in vars(module)]


def _required_plugs(model: nn.Module) -> list[tuple[nn.Module, Plug]]:
    if not (plugs := _plugs(model)):
        raise PlugError(f"{type(model).__name__} has no PEG that add_peg put there")
    return plugs


def _named_pegs(model: nn.Module) -> list[tuple[str, PEGDetection]]:
    """Pairs (name in the model, PEG) of the PEGs that ``add_peg`` added."""
    ours = {peg for _, plug in _required_plugs(model) for layer in plug.layers for peg in layer.peg.modules()}
    return [(name, peg) for name, peg in model.named_modules() if peg in ours and isinstance(peg, PEGDetection)]


def _refuse_wrapped(model: nn.Module) -> None:
    for name, module in model.named_modules():
        kinds = [base.__name__ for base in type(module).__mro__ if base.__name__ in WRAPPERS]
        if getattr(module, "_compiled_call_impl", None) is not None:  # model.compile()
            kinds.append("OptimizedModule")
        if kinds:
            raise PlugError(f"{name or 'the model'} ({type(module).__name__}) {WRAPPERS[kinds[0]]}")


def _forget_compiled() -> None:
    """Drop compiled code, because code that ``torch.compile`` made from this model does not check for new hooks."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _load(model: nn.Module, weights: str | Path | Mapping[str, Any]) -> None:
    """Load weights that must fit the PEGs one to one."""
    if isinstance(weights, Mapping):
        origin = "the given weights"
        contents = {origin: dict(weights)}
    else:
        origin, path = str(weights), Path(weights).expanduser()
        files = [path] if not path.is_dir() else sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
        if not files:
            raise WeightsError(f"the folder {path} contains no .safetensors and no .bin file")
        contents = {str(file): read_checkpoint(file) for file in files}
    found = {}
    for name, content in contents.items():
        tensors = state_dict_of(content, name, PREFIXES)
        found |= {key: value for key, value in tensors.items() if ".peg." in f".{key}"}
    state = model.state_dict()
    wanted = [key for name, _ in _named_pegs(model) for key in state if key.startswith(name + ".")]
    missing, other = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    wrong = [key for key in wanted if key in found and found[key].shape != state[key].shape]
    if missing or other or wrong:
        lists = {"lacks": missing, "also has": other, "has with a different shape": wrong}
        faults = "; ".join(f"{verb} {', '.join(keys[:4])}{' ...' if len(keys) > 4 else ''}" for verb, keys in lists.items() if keys)
        raise WeightsError(f"{origin} {faults}: call add_peg with the layers and options that the weights were trained with")
    model.load_state_dict({key: found[key] for key in wanted}, strict=False)
