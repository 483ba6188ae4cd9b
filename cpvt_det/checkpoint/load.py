# SPDX-License-Identifier: Apache-2.0
"""Weights -> a model: what fits by name and shape, class rows by class name, and a report of the rest."""

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import Tensor, nn

from cpvt_det.checkpoint.files import read_checkpoint, state_dict_of
from cpvt_det.checkpoint.weights import CLASS_HEAD, PROPOSALS_HEAD, Weights, read_weights
from cpvt_det.errors import WeightsError


@dataclass
class WeightsReport:
    """What became of weights.

    Attributes:
        loaded: names in the model that got their values.
        remade: names in both that kept their fresh values -> why.
        missing: names in the model only; they kept theirs too.
        unexpected: names in the weights only.
        rows_by_name: where the classes differ, class name -> the row that its row was taken from, ``None``: a fresh one.
        first_row_only: those of ``loaded`` of which only row 0 is the weights', class heads of proposals: it is "an object",
            and the other rows are no classes, only trained to say no.
        source: whose names the weights had, a key of ``CONVERSIONS``; ``None``: ours.
    """

    loaded: list[str] = field(default_factory=list)
    remade: dict[str, str] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    rows_by_name: dict[str, int | None] = field(default_factory=dict)
    first_row_only: list[str] = field(default_factory=list)
    source: str | None = None

    @property
    def is_partial(self) -> bool:
        """Whether something is left over, on either side; but for classes that the model does not have."""
        return bool(self.remade or self.missing or self.unexpected or None in self.rows_by_name.values())

    def __str__(self) -> str:
        """One line: how many of each kind, and some of their names."""
        parts = [f"{len(self.loaded)} tensors loaded" + (f", converted from {self.source}" if self.source else "")]
        for names, what in ((self.remade, "made anew"), (self.missing, "missing"), (self.unexpected, "unexpected")):
            grouped = [name for name, _ in _grouped((name, "") for name in names)]
            some = ", ".join(grouped[:3]) + (", ..." if len(grouped) > 3 else "")
            parts += [f"{len(names)} {what} ({some})"] if names else []
        if self.rows_by_name:
            found = sum(row is not None for row in self.rows_by_name.values())
            parts.append(f"{found} of {len(self.rows_by_name)} classes found by name")
        return "; ".join(parts)

    def table(self) -> str:
        """What did not load and why, names that differ in a layer's number as one; a sentence where everything did."""
        rows = [("made anew", name, reason) for name, reason in _grouped(self.remade.items())]
        rows += [("missing", name, "only in the model") for name, _ in _grouped((name, "") for name in self.missing)]
        rows += [("unexpected", name, "only in the weights") for name, _ in _grouped((name, "") for name in self.unexpected)]
        fresh = [name for name, row in self.rows_by_name.items() if row is None]
        rows += [("made anew", f"class {name}", "not among the weights' classes") for name in fresh[:10]]
        rows += [("made anew", f"{len(fresh) - 10} more classes", "")] if len(fresh) > 10 else []
        rows += [("row 0 loaded", name, "it is an object, the others are no classes") for name in self.first_row_only]
        return tabulate(rows, ("", "name", "why")) if rows else "every tensor loaded"


def load_weights(
    model: nn.Module, weights: str | Path | Mapping[str, Any] | Weights, class_names: Sequence[str] | None = None
) -> WeightsReport:
    """Give a model the weights that fit it by name and shape, in the model's own dtypes.

    Args:
        model: changed in place.
        weights: as in :func:`cpvt_det.checkpoint.read_weights`, or what it returned.
        class_names: what the model's labels 0..K-1 mean. Where the weights' classes are known and others, rows of the class
            heads are picked by class name; "no object", the last row, stays the last.

    Returns:
        What loaded, and what is fresh.

    Raises:
        WeightsError: weights that cannot be read, or of which nothing fits; the model is then unchanged.
        ValueError: class names that are double.
    """
    read = weights if isinstance(weights, Weights) else read_weights(weights)
    own = model.state_dict()
    rows = _rows_by_name(read, class_names)
    shared = {name: tensor for name, tensor in read.state_dict.items() if name in own}
    fitted = {name: _fit(name, tensor, own[name], read, rows) for name, tensor in shared.items()}
    chosen = {name: tensor for name, tensor in fitted.items() if tensor is not None}
    if not any(CLASS_HEAD.search(name) for name in chosen):
        rows = dict.fromkeys(rows)
    report = WeightsReport(
        loaded=list(chosen),
        remade={name: f"{_shape(tensor)} there, {_shape(own[name])} here" for name, tensor in shared.items() if name not in chosen},
        missing=_without_counters([name for name in own if name not in shared]),
        unexpected=_without_counters([name for name in read.state_dict if name not in own]),
        rows_by_name=rows,
        first_row_only=[name for name in chosen if PROPOSALS_HEAD.search(name) and (rows or len(shared[name]) != len(own[name]))],
        source=read.source,
    )
    if not report.loaded:
        example = f"{next(iter(read.state_dict), 'nothing')} there, {next(iter(own), 'nothing')} here"
        raise WeightsError(f"{read.origin} has nothing in common with the model ({example}); is it another detector's?")
    model.load_state_dict(chosen, strict=False)
    return report


def load_backbone_weights(backbone: nn.Module, weights: str, name: str) -> None:
    """Give a backbone pretrained weights.

    Args:
        backbone: changed in place.
        weights: what its ``load_pretrained`` takes: for a ResNet a name of torchvision's, or a file.
        name: what messages call the backbone, as in ``resnet50``.

    Raises:
        UnknownNameError: neither a known name nor a file.
        WeightsError: a backbone without pretrained weights, a failing download, or weights of another network.
    """
    if not hasattr(backbone, "load_pretrained"):
        raise WeightsError(f"backbone {name} has no pretrained weights: leave MODEL.BACKBONE.WEIGHTS empty")
    backbone.load_pretrained(weights, lambda path: state_dict_of(read_checkpoint(path), path))


def _rows_by_name(read: Weights, class_names: Sequence[str] | None) -> dict[str, int | None]:
    """The row of the weights' heads for each class name; empty where rows mean the same, or their meaning is unknown."""
    if class_names is None or read.classes is None or tuple(class_names) == read.classes.names:
        return {}
    if len(set(class_names)) != len(class_names):
        raise ValueError(f"class names must differ, got {', '.join(class_names)}")
    row_of = {name: row for row, name in enumerate(read.classes.names)}
    return {name: row_of.get(name) for name in class_names}


def _fit(name: str, tensor: Tensor, own: Tensor, read: Weights, rows_by_name: Mapping[str, int | None]) -> Tensor | None:
    """What the model's tensor ``own`` becomes; ``None`` where it has to keep its values.

    Heads of other classes, (K', ...) and (K'', ...), get the rows found in a copy of the model's.
    """
    if PROPOSALS_HEAD.search(name) and tensor.shape[1:] == own.shape[1:] and (rows_by_name or len(tensor) != len(own)):
        return torch.cat((tensor[:1].to(own), own[1:]))
    if not rows_by_name or not CLASS_HEAD.search(name):
        return tensor if tensor.shape == own.shape else None
    return _pick_rows(tensor, own, read, rows_by_name)


def _pick_rows(tensor: Tensor, own: Tensor, read: Weights, rows_by_name: Mapping[str, int | None]) -> Tensor | None:
    """Softmax and sigmoid heads have no row in common: their logits differ by what "no object" takes."""
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
    """Names but those of batch norms' counters: nothing that a model computes depends on them."""
    return [name for name in names if not name.endswith("num_batches_tracked")]


def _shape(tensor: Tensor) -> str:
    return str(tuple(tensor.shape))


def _grouped(named: Any) -> list[tuple[str, str]]:
    """(name, reason) pairs with numbers in names as stars, each once, and how many it stands for."""
    counts = Counter((re.sub(r"\.\d+(?=\.)", ".*", name), reason) for name, reason in named)
    return [(f"{name} ({count})" if count > 1 else name, reason) for (name, reason), count in counts.items()]
