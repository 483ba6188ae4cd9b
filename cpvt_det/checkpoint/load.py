# SPDX-License-Identifier: Apache-2.0
"""Load weights into a model: tensors that fit by name and shape, and class rows by class name; report the rest."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.checkpoint.weights import CLASS_HEAD, DENOISING_LABELS, PROPOSALS_HEAD, Weights, read_weights
from cpvt_det.common.errors import WeightsError
from cpvt_det.common.structures import Thresholds
from cpvt_det.models.box_queries import MixedQueries

BODY = "backbone.body."
POSITION = re.compile(r"^(backbone\.)?position\.")


@dataclass
class WeightsReport:
    """Result of loading weights into a model.

    Attributes:
        loaded: names in the model that were loaded.
        remade: name -> reason, for names that model and weights share but whose tensors kept the model's initial values.
        missing: names in the model only; these also kept the initial values.
        unexpected: names in the weights only, without those that are needed only in training: label vectors for denoising.
        rows_by_name: class name -> row of the weights that was loaded; ``None`` for a class that kept its initial row.
            Empty if the class names agree.
        near_names: class name that was not found -> class name of the weights that differs only in case, spaces or a plural.
        source: source of the weights' original names, a key of ``CONVERSIONS``; ``None`` for our names.
        thresholds: score thresholds stored with the weights, for their own classes; ``None`` if there are none.
    """

    loaded: list[str] = field(default_factory=list)
    remade: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    rows_by_name: dict[str, int | None] = field(default_factory=dict)
    near_names: dict[str, str] = field(default_factory=dict)
    source: str | None = None
    thresholds: Thresholds | None = None

    @property
    def is_partial(self) -> bool:
        """Whether a tensor or class of the model, or a tensor of the weights, was not loaded."""
        return bool(self.remade or self.missing or self.unexpected or None in self.rows_by_name.values())

    def __str__(self) -> str:
        """One line with the number of tensors of each kind, and some of their names."""
        parts = [f"{len(self.loaded)} tensors loaded" + (f", converted from {self.source}" if self.source else "")]
        for names, what in ((self.remade, "re-initialised"), (self.missing, "missing"), (self.unexpected, "unexpected")):
            grouped = [name for name, _ in _grouped((name, "") for name in names)]
            some = ", ".join(grouped[:3]) + (", ..." if len(grouped) > 3 else "")
            parts += [f"{len(names)} {what} ({some})"] if names else []
        if self.rows_by_name:
            found = sum(row is not None for row in self.rows_by_name.values())
            parts.append(f"{found} of {len(self.rows_by_name)} classes found by name")
        return "; ".join(parts)

    def table(self) -> str:
        """A table of tensors that were not loaded and why, or "every tensor loaded". Names that differ only in layer number are one
        row."""
        rows = [("re-initialised", name, reason) for name, reason in _grouped(self.remade.items())]
        rows += [("missing", name, "only in the model") for name, _ in _grouped((name, "") for name in self.missing)]
        rows += [("unexpected", name, "only in the weights") for name, _ in _grouped((name, "") for name in self.unexpected)]
        fresh = [name for name, row in self.rows_by_name.items() if row is None]
        near = {name: f", but {known} is (the same class?)" for name, known in self.near_names.items()}
        rows += [("re-initialised", f"class {name}", f"not among the weights' classes{near.get(name, '')}") for name in fresh[:10]]
        rows += [("re-initialised", f"{len(fresh) - 10} more classes", "")] if len(fresh) > 10 else []
        return tabulate(rows, ("", "name", "why")) if rows else "every tensor loaded"


def load_weights(
    model: nn.Module, weights: str | Path | Mapping[str, Any] | Weights, class_names: Sequence[str] | None = None
) -> WeightsReport:
    """Load the weights that fit a model by name and shape, in the model's own dtypes.

    Args:
        model: model that is changed in place.
        weights: as in :func:`cpvt_det.checkpoint.read_weights`, or its result.
        class_names: names of the model's labels 0..K-1. If the weights' classes are known and differ from these, rows of the class
            heads are selected by class name, and so are the class vectors for denoising. The last row, "no object", remains the
            last one.

    Returns:
        A report of the names that were loaded and the names that kept their initial values.

    Raises:
        WeightsError: weights that cannot be read, or that have no tensor for the model; the model is then unchanged.
        ValueError: a class name that occurs twice.
    """
    read = weights if isinstance(weights, Weights) else read_weights(weights)
    own = model.state_dict()
    read = replace(read, state_dict=_first_by_rank(_beside_pegs(read.state_dict, own), model))
    rows = _rows_by_name(read, class_names)
    shared = {name: tensor for name, tensor in read.state_dict.items() if name in own}
    meaning = _meaning_of_proposals(model, read)
    fitted = {name: _fit(name, tensor, own[name], read, rows, meaning) for name, tensor in shared.items()}
    chosen = {name: value for name, value in fitted.items() if isinstance(value, Tensor)}
    if not any(CLASS_HEAD.search(name) for name in chosen):
        rows = dict.fromkeys(rows)
    report = WeightsReport(
        loaded=list(chosen),
        remade={name: value for name, value in fitted.items() if isinstance(value, str)},
        missing=_without_counters([name for name in own if name not in shared]),
        unexpected=_without_counters([name for name in read.state_dict if name not in own and not DENOISING_LABELS.search(name)]),
        rows_by_name=rows,
        near_names=nearly_named([name for name, row in rows.items() if row is None], read.classes.names if rows else ()),
        source=read.source,
        thresholds=read.thresholds,
    )
    if not report.loaded:
        theirs, ours = next(((name, name) for name in shared), (next(iter(read.state_dict), ""), next(iter(own), "")))
        example = f"{_described(read.state_dict, theirs)} in the weights, {_described(own, ours)} in the model"
        raise WeightsError(
            f"{read.origin} has no tensor that fits the model ({example}); set the MODEL keys to the values that it was trained "
            "with, or give weights of this detector"
        )
    model.load_state_dict(chosen, strict=False)
    return report


def _described(state_dict: Mapping[str, Tensor], name: str) -> str:
    return f"{name} of shape {tuple(state_dict[name].shape)}" if name else "nothing"


def _beside_pegs(state_dict: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Rename the tensors of an encoding if the model combines that encoding with a PEG, such as ``table`` in ``table+peg``."""
    beside = {name: POSITION.sub(r"\1position.additive.", name) for name in state_dict}
    return {beside[name] if name not in own and beside[name] in own else name: tensor for name, tensor in state_dict.items()}


def _first_by_rank(state_dict: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Cut query vectors to the model's number of queries if the i-th query starts at the i-th best proposal. There are more, for
    example, if the weights have a hybrid branch and the model has none."""
    name = "queries.query_embed.weight"
    vectors = model.state_dict().get(name) if isinstance(getattr(model, "queries", None), MixedQueries) else None
    given = state_dict.get(name)
    if vectors is None or given is None or given.shape[1:] != vectors.shape[1:] or not 1 < len(vectors) < len(given):
        return state_dict
    return {**state_dict, name: given[: len(vectors)]}


def load_backbone_weights(backbone: nn.Module, weights: str, name: str) -> None:
    """Load pretrained weights into a backbone.

    Args:
        backbone: backbone that is changed in place.
        weights: argument of the backbone's ``load_pretrained``, such as a file or, for a ResNet, a name of torchvision weights. If
            the file contains one of our classifiers or detectors, its backbone is used.
        name: name of the backbone in error messages, such as ``resnet50``.

    Raises:
        UnknownNameError: neither a known name nor a file.
        WeightsError: a backbone without pretrained weights, a failed download, or weights of a different network.
    """
    if not hasattr(backbone, "load_pretrained"):
        raise WeightsError(f"backbone {name} cannot load pretrained weights, got {weights!r}: leave MODEL.BACKBONE.WEIGHTS empty")
    backbone.load_pretrained(weights, _read_network)


def _read_network(path: str) -> dict[str, Tensor]:
    """The tensors of a file; if it contains a model of ours that wraps a library's network, that network's tensors under the
    library's names."""
    state_dict = state_dict_of(read_checkpoint(path), path)
    return {name.removeprefix(BODY): tensor for name, tensor in state_dict.items() if name.startswith(BODY)} or state_dict


def nearly_named(names: Sequence[str], known: Sequence[str]) -> dict[str, str]:
    """For each name, a known name that differs only in case, spaces, hyphens or a plural ending; a suggestion, never a match."""
    pairs = {name: [other for other in known if _alike(other) & _alike(name)] for name in names}
    return {name: others[0] for name, others in pairs.items() if others}


def _alike(name: str) -> set[str]:
    plain = " ".join(re.split(r"[\s_-]+", name.strip().casefold()))
    return {plain, plain.removesuffix("s"), plain.removesuffix("es")}


def _rows_by_name(read: Weights, class_names: Sequence[str] | None) -> dict[str, int | None]:
    """Map each class name to its row in the checkpoint's heads; empty if the class names agree or the checkpoint's are unknown."""
    if class_names is None or read.classes is None or tuple(class_names) == read.classes.names:
        return {}
    if len(set(class_names)) != len(class_names):
        raise ValueError(f"class names must differ, got {', '.join(class_names)}")
    row_of = {name: row for row, name in enumerate(read.classes.names)}
    return {name: row_of.get(name) for name in class_names}


def _meaning_of_proposals(model: nn.Module, read: Weights) -> str:
    """The meaning of the rows in the proposals' class heads: ``classes``, ``objects``, or ``both`` if model and weights differ. If
    the weights do not show it, the model's meaning is assumed."""
    here = bool(getattr(getattr(model, "queries", None), "class_proposals", False))
    there = here if read.class_proposals is None else read.class_proposals
    return ("classes" if here else "objects") if here == there else "both"


def _fit(
    name: str, tensor: Tensor, own: Tensor, read: Weights, rows_by_name: Mapping[str, int | None], meaning: str
) -> Tensor | str:
    """The new value of the model's tensor ``own``, or the reason why it must keep its value.

    If weights and model have different classes, the shapes (K', ...) of the weights' heads and (K'', ...) of the model's heads
    differ. The result is then a copy of ``own`` into which the rows that were found are copied.
    """
    of_proposals = PROPOSALS_HEAD.search(name)
    if of_proposals and meaning == "both":
        return "the rows are classes in only one of weights and model; in the other, row 0 means an object"
    if of_proposals and meaning == "objects" and tensor.shape[1:] == own.shape[1:] and (rows_by_name or len(tensor) != len(own)):
        return torch.cat((tensor[:1].to(own), own[1:]))
    has_classes = CLASS_HEAD.search(name) or DENOISING_LABELS.search(name) or of_proposals
    if rows_by_name and has_classes:
        value = _pick_rows(tensor, own, read, rows_by_name)
    else:
        value = tensor if tensor.shape == own.shape else None
    return f"{tuple(tensor.shape)} in the weights, {tuple(own.shape)} in the model" if value is None else value


def _pick_rows(tensor: Tensor, own: Tensor, read: Weights, rows_by_name: Mapping[str, int | None]) -> Tensor | None:
    """Pick rows by class name; ``None`` if one head is for softmax and the other for sigmoid, because only softmax logits are
    relative to "no object"."""
    background = len(own) - len(rows_by_name)
    pairs = [(here, there) for here, there in enumerate(rows_by_name.values()) if there is not None]
    if not pairs or background != len(tensor) - len(read.classes) or tensor.shape[1:] != own.shape[1:]:
        return None
    if background:
        pairs.append((len(own) - 1, len(tensor) - 1))
    here, there = zip(*pairs, strict=True)
    picked = own.clone()
    picked[list(here)] = tensor[list(there)].to(own)
    return picked


def _without_counters(names: list[str]) -> list[str]:
    """Names, excluding batch-norm counters, which do not affect any result."""
    return [name for name in names if not name.endswith("num_batches_tracked")]


def _grouped(named: Any) -> list[tuple[str, str]]:
    """Group (name, reason) pairs: numbers in names become stars, and each resulting pair is listed once, with its count."""
    counts = Counter((re.sub(r"\.\d+(?=\.)", ".*", name), reason) for name, reason in named)
    return [(f"{name} ({count})" if count > 1 else name, reason) for (name, reason), count in counts.items()]
