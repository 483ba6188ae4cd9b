# SPDX-License-Identifier: Apache-2.0
"""Add a PEG to another project's model, take it away, fold it, and tell where it is."""

import inspect
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import torch
from tabulate import tabulate
from torch import Tensor, nn

from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.errors import UnknownNameError, WeightsError
from cpvt_det.plug.families import Family, checked_grid, find_owner
from cpvt_det.plug.hooks import ApplyPEG, AttributeOverride, ClearContext, ForwardContext, PlugError, RecordGrid
from cpvt_det.position.peg import PEGDetection
from cpvt_det.structures import Size

WRAPPERS = {
    "OptimizedModule": "is compiled, and compiled code would ignore the PEG; add it first, then torch.compile",
    "ScriptModule": "is TorchScript, which takes no new layers; add the PEG to the Python model",
    **dict.fromkeys(
        ("DistributedDataParallel", "DataParallel", "FullyShardedDataParallel", "FSDPModule", "DeepSpeedEngine"),
        "is wrapped for several processes, and the wrapper would not bring the PEG's gradients into step; plug the bare model, "
        "then wrap it and build the optimizer",
    ),
}


@dataclass
class Plug:
    """What ``add_peg`` did to the owner of the layers, where it stays as ``_peg_plug``: what to undo, and the layers with a PEG."""

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
    """Put PEGs after layers of a known model, in place; before ``torch.compile``, DDP and the optimizer.

    Args:
        model: of a family in docs/plug.md, or what holds one.
        after: the layers, by their index or name; for a backbone with named maps, the maps.
        position: ``replace`` takes the encoding away that the model has there.
        weights: a folder of ``save_pretrained``, a file, or a state dict, to take the PEGs' weights from.
        grid: (H, W), for ``nn.TransformerEncoder`` alone, which does not know it; ``encoder.peg_grid`` changes it.
        share_levels: one PEG for all levels of a multi-level encoder, instead of one for each.
        peg_options: of :class:`~cpvt_det.position.peg.PEGDetection`; ``zero_init=True`` unless given, so that no output changes.

    Returns:
        The model.

    Raises:
        PlugError: an unknown, compiled, wrapped or already plugged model; a layer beyond its depth; an encoding it does not have.
        UnknownNameError: an option that PEG does not have.
        WeightsError: weights that do not fit the PEGs one to one. The model is then as it was.
    """
    if not isinstance(model, nn.Module):
        raise PlugError(f"add_peg takes a torch.nn.Module, got a {type(model).__name__}")
    _refuse_wrapped(model)
    if _plugs(model):
        raise PlugError("the model already has a PEG; remove_peg first, or name all layers in one call: after=[0, 2]")
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
    """Take all PEGs away, in place: keys, hooks and encodings are as before ``add_peg``.

    Raises:
        PlugError: a model without a PEG, compiled or wrapped.
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
        ValueError: as :meth:`~cpvt_det.position.peg.PEGDetection.fold`.
    """
    pegs = [peg for _, peg in _named_pegs(model)]
    for peg in pegs:
        peg.check_foldable()  # all, before the first changes
    for peg in pegs:
        peg.fold()
    _forget_compiled()
    return model


def peg_report(model: nn.Module) -> str:
    """A table with a row a PEG: where it is, its parameters, its norm, and how large its scale is on average.

    Raises:
        PlugError: a model without a PEG.
    """
    rows = [
        (
            name,
            sum(parameter.numel() for parameter in peg.parameters()),
            type(peg.norm).__name__,
            "none" if peg.scale is None else f"{peg.scale.detach().abs().mean():.3g}",
        )
        for name, peg in _named_pegs(model)
    ]
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
    """What :func:`add_peg` does once it knows the owner of the layers and its family; arguments as there."""
    options = _checked_options(peg_options)
    layers = family.layers(owner)
    names = _chosen(layers, after, family)
    if position not in ("keep", "replace"):
        raise PlugError(f"position must be 'keep' or 'replace', got {position!r}")
    if grid is not None:
        grid = checked_grid(grid)
    if (grid is None) == family.needs_grid:
        raise PlugError(f"{family.name} {'needs' if family.needs_grid else 'knows its own grid and takes no'} grid=(H, W)")
    if share_levels and family.levels(owner) is None:
        raise PlugError(f"{family.name} has one level: share_levels means nothing there")
    pegs = {
        name: _make_peg(layers[name], family.channels(owner, name, layers[name]), family.levels(owner), share_levels, options)
        for name in names
    }
    undo = family.replace(owner) if position == "replace" else []
    if position == "replace" and not undo:
        raise PlugError(f"{family.name}: position='replace' has nothing to replace, the model has no encoding of its own there")
    undo += family.prepare(owner)
    if grid is not None:
        undo.append(AttributeOverride(owner, "peg_grid", grid))
    if layers[names[0]] is owner:  # the maps of a backbone
        owner.peg = nn.ModuleDict(pegs).train(owner.training)
    else:
        for name, peg in pegs.items():
            layers[name].peg = peg
    plug = owner._peg_plug = Plug(undo, list({id(layers[name]): layers[name] for name in names}.values()))
    context = None
    if family.grid_source is not None:
        context, (path, when) = ForwardContext(), family.grid_source
        watched = owner.get_submodule(path)
        register = watched.register_forward_pre_hook if when == "before" else watched.register_forward_hook
        undo.append(register(RecordGrid(family, context), with_kwargs=True))
        undo.append(owner.register_forward_hook(ClearContext(context), always_call=True))
    for layer in plug.layers:
        apply = ApplyPEG(family, family.layout_of(owner), family.prefix(owner), context)
        undo.append(layer.register_forward_hook(apply, with_kwargs=True))
    _forget_compiled()


def _chosen(layers: Mapping[str, nn.Module], after: int | str | Sequence[int | str], family: Family) -> list[str]:
    """The names of the layers that ``after`` means."""
    wanted = [after] if isinstance(after, (str, Integral)) or not isinstance(after, Iterable) else list(after)
    known = list(layers)
    names = []
    for one in wanted:
        if isinstance(one, Integral) and not isinstance(one, bool) and 0 <= one < len(known):
            names.append(known[one])
        elif isinstance(one, str) and one in layers:
            names.append(one)
        else:
            raise PlugError(f"{family.name}: no layer {one!r}; there are 0 to {len(known) - 1}: {', '.join(known)}")
    if not names or len(set(names)) != len(names):
        raise PlugError(f"after must name different layers, at least one; got {after!r}")
    taken = [name for name in names if hasattr(layers[name], "peg")]
    if taken:
        raise PlugError(f"{family.name}: the layer {taken[0]} has an attribute 'peg' of its own")
    return names


def _checked_options(peg_options: Mapping[str, Any]) -> dict[str, Any]:
    known = set(inspect.signature(PEGDetection).parameters) - {"channels"}
    for option in peg_options:
        if option not in known:
            raise UnknownNameError("option of PEG", option, known)
    return {"zero_init": True, **peg_options}


def _make_peg(layer: nn.Module, channels: int, levels: int | None, share_levels: bool, options: Mapping[str, Any]) -> nn.Module:
    """A PEG, or a list of one a level, where and in which dtype the layer is."""
    if levels is None:
        peg = PEGDetection(channels, **options)
    else:
        peg = nn.ModuleList(PEGDetection(channels, **options) for _ in range(1 if share_levels else levels))
    like = next(parameter for parameter in layer.parameters() if parameter.is_floating_point())
    return peg.to(like.device, like.dtype).train(layer.training)


def _plugs(model: nn.Module) -> list[tuple[nn.Module, Plug]]:
    return [(module, module._peg_plug) for module in model.modules() if "_peg_plug" in vars(module)]


def _required_plugs(model: nn.Module) -> list[tuple[nn.Module, Plug]]:
    plugs = _plugs(model)
    if not plugs:
        raise PlugError(f"{type(model).__name__} has no PEG that add_peg put there")
    return plugs


def _named_pegs(model: nn.Module) -> list[tuple[str, PEGDetection]]:
    """Name in the model -> PEG, of those that ``add_peg`` put there."""
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
    """Code that ``torch.compile`` made of this model under another name does not look at hooks again."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


def _load(model: nn.Module, weights: str | Path | Mapping[str, Any]) -> None:
    """The PEGs' weights, all of them and no others."""
    origin = "the given weights" if isinstance(weights, Mapping) else str(weights)
    found = {key: value for key, value in _read(weights).items() if ".peg." in f".{key}"}
    state = model.state_dict()
    wanted = [key for name, _ in _named_pegs(model) for key in state if key.startswith(name + ".")]
    missing, other = sorted(set(wanted) - set(found)), sorted(set(found) - set(wanted))
    wrong = [key for key in wanted if key in found and found[key].shape != state[key].shape]
    if missing or other or wrong:
        lists = {"lacks": missing, "also has": other, "has in another shape": wrong}
        told = "; ".join(f"{verb} {', '.join(keys[:4])}{' ...' if len(keys) > 4 else ''}" for verb, keys in lists.items() if keys)
        raise WeightsError(f"{origin} {told}: give add_peg the layers and options that the weights were made with")
    model.load_state_dict({key: found[key] for key in wanted}, strict=False)


def _read(weights: str | Path | Mapping[str, Any]) -> dict[str, Tensor]:
    if isinstance(weights, Mapping):
        return state_dict_of(dict(weights), "the given weights")
    if not isinstance(weights, (str, Path)):
        raise WeightsError(f"weights must be a folder, a file or a state dict, got a {type(weights).__name__}")
    path = Path(weights).expanduser()
    if not path.is_dir():
        return state_dict_of(read_checkpoint(path), str(path))
    files = sorted(path.glob("*.safetensors")) or sorted(path.glob("*.bin"))
    if not files:
        raise WeightsError(f"the folder {path} has no .safetensors and no .bin file")
    return {key: tensor for file in files for key, tensor in state_dict_of(read_checkpoint(file), str(file)).items()}
