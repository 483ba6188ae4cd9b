# SPDX-License-Identifier: Apache-2.0
"""All results of a detector and its criterion for one batch, ours or a peer's, and the differences of two such outcomes."""

import contextlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.detrex_model import replaced_names
from benchmarks.equal import DoubleTorch, difference
from benchmarks.parity_models import Peer
from cpvt_det.checkpoint import convert_state_dict
from cpvt_det.common.structures import PaddedBatch, Predictions, Targets
from cpvt_det.losses.matcher import PaddedTargets

NAMES = {"loss_ce": "loss_class", "loss_bbox": "loss_l1", "loss_giou": "loss_giou"}
"""Losses of the official code, and ours."""
STRIDES = (8, 16, 32, 64)  # of the four levels that proposals are made of


@dataclass
class Outcome:
    """The results of a detector and its criterion for a batch.

    Attributes:
        predictions: logits and boxes of all layers; those of proposals only where tokens are not padded.
        losses: official name -> (D,) unweighted losses by layer; under names with ``_enc`` those of proposals, (1,).
        total: weighted sum over losses, layers and proposals.
        gradients: our name of a parameter -> its gradient.
        pairs: layer or "proposals", and image -> matched pairs of query and object.
    """

    predictions: Predictions
    losses: dict[str, Tensor]
    total: Tensor
    gradients: dict[str, Tensor]
    pairs: dict[tuple[Any, int], frozenset[tuple[int, int]]]

    @property
    def gradient_norm(self) -> Tensor:
        return torch.stack([gradient.norm() for gradient in self.gradients.values()]).norm()


def our_outcome(detector: nn.Module, criterion: Any, batch: PaddedBatch, targets: Sequence[Targets]) -> Outcome:
    """Outcome of our detector and criterion."""
    detector.zero_grad()
    predictions = detector(batch.images, batch.padding_mask)
    total = sum(criterion(predictions, targets).losses.values())
    total.backward()
    losses, pairs = {}, {}
    normalizers = criterion.normalizers(targets, predictions.logits.shape[2])
    for of, suffix in ((predictions, ""), (predictions.proposals, "_enc")):
        if of is None:
            continue
        padded = PaddedTargets.from_targets(targets, of.boxes.dtype)
        if suffix:
            padded.labels.zero_()
        (matches,) = criterion.matcher((of, padded))
        by_layer = criterion.losses_by_layer(of, padded, matches, normalizers)
        losses |= {theirs + suffix: by_layer[ours].detach() for theirs, ours in NAMES.items()}
        indices = [index.tolist() for index in (matches.layer, matches.image, matches.query, matches.target)]
        pairs |= _pairs(zip(*indices, strict=True), len(of.logits), len(targets), bool(suffix))
    gradients = {name: parameter.grad.clone() for name, parameter in detector.named_parameters() if parameter.grad is not None}
    return Outcome(_detached(predictions, batch), losses, total.detach(), gradients, pairs)


def their_outcome(peer: Peer, batch: PaddedBatch, targets: Sequence[Targets]) -> Outcome:
    """Outcome of a peer in its settings; for float64 models, its code gets float64 wherever it names float32."""
    is_double = batch.images.dtype == torch.float64
    labels = [{"labels": target.labels, "boxes": target.boxes_cxcywh} for target in targets]
    peer.module.zero_grad()
    with peer.settings(), float64_for_float32(peer.module) if is_double else contextlib.nullcontext():
        output = peer.forward(batch)
        found = {name.replace("loss_class", "loss_ce"): loss for name, loss in peer.criterion(output, labels).items()}
        weights = {name.replace("loss_class", "loss_ce"): weight for name, weight in peer.criterion.weight_dict.items()}
        total = sum(loss * weights[name] for name, loss in found.items() if name in weights)
        total.backward()
        layers, proposals = [*output["aux_outputs"], output], output.get("enc_outputs")
        matched = [(layer, peer.criterion.matcher(of, labels)) for layer, of in enumerate(layers)]
        first_class = [{**of, "labels": torch.zeros_like(of["labels"])} for of in labels]
        matched += [("proposals", peer.criterion.matcher(proposals, first_class))] if proposals else []
    predictions = Predictions(*(torch.stack([of[name] for of in layers]) for name in ("pred_logits", "pred_boxes")))
    if proposals:
        predictions.proposals = Predictions(proposals["pred_logits"][None], proposals["pred_boxes"][None])
    suffixes = [*(f"_{layer}" for layer in range(len(layers) - 1)), ""]
    losses = {name: torch.stack([found[name + suffix] for suffix in suffixes]).detach() for name in NAMES}
    losses |= {f"{name}_enc": found[f"{name}_enc"][None].detach() for name in NAMES if proposals}
    pairs = {
        (layer, image): frozenset(zip(queries.tolist(), wanted.tolist(), strict=True))
        for layer, images in matched
        for image, (queries, wanted) in enumerate(images)
    }
    return Outcome(_detached(predictions, batch), losses, total.detach(), _gradients(peer), pairs)


def _pairs(matches: Any, layers: int, images: int, proposals: bool) -> dict[tuple[Any, int], frozenset[tuple[int, int]]]:
    found: dict[tuple[Any, int], set] = {(layer, image): set() for layer in range(layers) for image in range(images)}
    for layer, image, query, target in matches:
        found[layer, image].add((query, target))
    return {("proposals" if proposals else layer, image): frozenset(pairs) for (layer, image), pairs in found.items()}


def _detached(predictions: Predictions, batch: PaddedBatch) -> Predictions:
    found = Predictions(predictions.logits.detach(), predictions.boxes.detach())
    if predictions.proposals is not None:
        valid = ~torch.cat([batch.padding_mask[:, ::stride, ::stride].flatten(1) for stride in STRIDES], 1)
        proposals = predictions.proposals
        found.proposals = Predictions(proposals.logits.detach()[:, valid], proposals.boxes.detach()[:, valid])
    return found


def _gradients(peer: Peer) -> dict[str, Tensor]:
    """Gradients of a peer by our names; the gradient of a shared parameter under each of its names."""
    named = peer.module.named_parameters(remove_duplicate=False)
    return convert_state_dict({name: p.grad.clone() for name, p in named if p.grad is not None}, peer.source)


@contextlib.contextmanager
def float64_for_float32(module: nn.Module) -> Iterator[None]:
    """In this block, the code of a peer's modules gets float64 for float32, and ``Tensor.float`` returns float64."""
    spaces = {id(space): space for part in module.modules() if "torch" in (space := _namespace(part))}
    before = torch.Tensor.float
    torch.Tensor.float = torch.Tensor.double
    try:
        with replaced_names(list(spaces.values()), {"torch": DoubleTorch()}):
            yield
    finally:
        torch.Tensor.float = before


def _namespace(part: nn.Module) -> dict[str, Any]:
    """The globals of the files of the modules' classes, without files of torch and torchvision."""
    space = getattr(type(part).forward, "__globals__", {})
    return {} if space.get("__name__", "").partition(".")[0] in ("torch", "torchvision") else space


# Differences


@dataclass
class Gap:
    """The largest absolute difference of two results, and the same divided by the largest expected value."""

    shape: list[int]
    value: float
    relative: float

    @classmethod
    def of(cls, ours: Tensor, theirs: Tensor) -> "Gap":
        relative = difference(ours, theirs)
        value = relative if math.isinf(relative) else float((ours.double() - theirs.double()).abs().max())
        return cls(list(theirs.shape), value, relative)


def compare(ours: Outcome, theirs: Outcome) -> dict[str, Gap]:
    """The difference of every kind of result, by its column in docs/parity.md; for losses, the largest over the layers.

    A parameter that has a gradient in only one of the two is an infinite difference of "any gradient".
    """
    found = {}
    pairs = [("", ours.predictions, theirs.predictions), ("proposals' ", ours.predictions.proposals, theirs.predictions.proposals)]
    for of, first, second in pairs:
        if second is not None:
            found |= {f"{of}{name}": Gap.of(getattr(first, name), getattr(second, name)) for name in ("logits", "boxes")}
    found |= {name: Gap.of(ours.losses[name], loss) for name, loss in theirs.losses.items()}
    norm = float(theirs.gradient_norm)
    found["total"] = Gap.of(ours.total, theirs.total)
    found["gradient norm"] = Gap.of(ours.gradient_norm, theirs.gradient_norm)
    found["any gradient"] = _any_gradient(ours.gradients, theirs.gradients, norm)
    for column, of_proposals in (("matchings that differ", False), ("matchings of proposals that differ", True)):
        keys = [key for key in theirs.pairs if (key[0] == "proposals") == of_proposals]
        if keys:
            count = sum(ours.pairs[key] != theirs.pairs[key] for key in keys)
            found[column] = Gap([len(keys)], count, count / len(keys))
    return found


def _any_gradient(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], norm: float) -> Gap:
    if ours.keys() != theirs.keys():
        return Gap([len(theirs)], float("inf"), float("inf"))
    value = max(Gap.of(ours[name], gradient).value for name, gradient in theirs.items())
    return Gap([len(theirs)], value, value / norm)
