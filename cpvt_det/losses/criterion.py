# SPDX-License-Identifier: Apache-2.0
"""The loss of a detector, over matched pairs in all decoder layers at once.

Place in the pipeline: after ``losses/matcher.py``, as the last step in training.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from cpvt_det.common import defaults, distributed
from cpvt_det.common.structures import PROPOSAL_LABEL, Predictions, Sample, Targets
from cpvt_det.losses.matcher import HungarianMatcher, Matches, PaddedTargets
from cpvt_det.losses.terms import LOSS_REGISTRY, Loss, Matched, Normalizers

Group = tuple[Predictions, PaddedTargets, Normalizers]
"""Predictions, their targets and the divisors of their losses."""


@dataclass
class Losses:
    """Losses and metrics of a training step.

    Attributes:
        losses: name -> scalar, weighted and summed over layers; their sum is the objective.
        metrics: name -> scalar, only logged and not part of any loss.
        finite: (B,) bool, whether all predictions for an image are finite. If this is False for any image, the losses are
            meaningless.
    """

    losses: dict[str, Tensor]
    metrics: dict[str, Tensor]
    finite: Tensor


class SetCriterion:
    """DETR's set loss.

    Args:
        matcher: matcher of predictions and targets; the loss uses the same classification.
        class_weight, l1_weight, giou_weight: weights of DETR's three losses, the same in every layer; 0 leaves a loss out.
        proposal_matches: number of proposals matched with each object; more than one match gives a stronger training signal.
        hybrid_matches: number of the hybrid branch's queries matched with each object.
        losses: additional losses, name -> (weight, function); :data:`LOSS_REGISTRY` describes the functions.

    Raises:
        ValueError: there is less than one match, a weight is below 0, or one of the three losses is given twice.

    Source: arXiv 2005.12872, section 3.1 and equation 2. Several matches per object, by repeating the object, are from arXiv
    2207.13080.
    """

    def __init__(
        self,
        matcher: HungarianMatcher,
        class_weight: float = defaults.CLASS_WEIGHT,
        l1_weight: float = defaults.L1_WEIGHT,
        giou_weight: float = defaults.GIOU_WEIGHT,
        proposal_matches: int = 1,
        losses: Mapping[str, tuple[float, Loss]] | None = None,
        hybrid_matches: int = defaults.HYBRID_MATCHES,
    ):
        for name, matches in (("proposal_matches", proposal_matches), ("hybrid_matches", hybrid_matches)):
            if matches < 1:
                raise ValueError(f"{name} must be at least 1, got {matches}")
        self.proposal_matches = proposal_matches
        self.hybrid_matches = hybrid_matches
        self.matcher = matcher
        self.classification = matcher.classification
        for name, weight in (("class", class_weight), ("L1", l1_weight), ("GIoU", giou_weight)):
            if not weight >= 0:
                raise ValueError(f"the {name} weight must be at least 0, got {weight}")
        weights = {"loss_class": class_weight, "loss_l1": l1_weight, "loss_giou": giou_weight}
        self.losses: dict[str, Loss] = {name: LOSS_REGISTRY.find(name.removeprefix("loss_")) for name in weights}
        for name, (weight, loss) in (losses or {}).items():
            if weights.get(f"loss_{name}"):
                raise ValueError(f"the loss {name!r} exists already, with the weight {weights[f'loss_{name}']}")
            weights[f"loss_{name}"], self.losses[f"loss_{name}"] = weight, loss
        self.weights = {name: weight for name, weight in weights.items() if weight}

    def __call__(self, predictions: Predictions, targets: Sequence[Targets], normalizers: Normalizers | None = None) -> Losses:
        """Compare predictions with targets.

        Args:
            predictions: logits (D, B, Q, K') and boxes (D, B, Q, 4), float32 or float64.
            targets: targets of the B images, on the same device.
            normalizers: divisors for the whole step, if this batch is only a part of it. With ``None``, the divisors are computed
                from this batch.

        Returns:
            ``loss_class``, ``loss_l1``, ``loss_giou`` and any additional losses. Proposals, if there are any, add
            ``loss_proposal_class`` and so on; in these losses, all objects count as one class unless the proposals have class
            logits. Denoising queries add ``loss_denoising_class`` and so on, and the hybrid branch ``loss_hybrid_class`` and so
            on. The metrics are ``metric_class_error`` (percent of
            matched queries with the wrong class) and ``metric_cardinality_error`` (mean absolute difference between the predicted
            and the true number of objects), both of the last layer.
        """
        padded = PaddedTargets.from_targets(targets, predictions.boxes.dtype)
        if normalizers is None:
            normalizers = self.normalizers(targets, predictions.logits.shape[2])
        groups = {"loss_": (predictions, padded, normalizers)}
        if predictions.proposals is not None:
            found = targets
            if not predictions.proposals.by_class:  # all objects have one class
                found = [Targets(torch.full_like(target.labels, PROPOSAL_LABEL), target.boxes_cxcywh) for target in targets]
            groups["loss_proposal_"] = _repeated(predictions.proposals, found, normalizers, self.proposal_matches)
        if predictions.hybrid is not None:
            groups["loss_hybrid_"] = _repeated(predictions.hybrid, targets, normalizers, self.hybrid_matches)
        matches = dict(zip(groups, self.matcher(*(group[:2] for group in groups.values())), strict=True))
        if (denoising := predictions.denoising) is not None:
            groups["loss_denoising_"] = (denoising, padded, _times(normalizers, denoising.groups))
            matches["loss_denoising_"] = _known_matches(denoising)
        losses, finite = {}, []
        for prefix, (predicted, wanted, divisors) in groups.items():
            for name, values in self.losses_by_layer(predicted, wanted, matches[prefix], divisors).items():
                losses[name.replace("loss_", prefix)] = self.weights[name] * values.sum()
            logits, boxes = predicted.logits.detach(), predicted.boxes.detach()
            finite.append((logits.sum((0, 2, 3)) + boxes.sum((0, 2, 3))).isfinite())  # a sum is finite if all its terms are
        return Losses(losses, self._metrics(predictions, padded, matches["loss_"]), torch.stack(finite).all(0))

    def normalizers(self, targets: Sequence[Targets], num_queries: int) -> Normalizers:
        """The divisors for the images of one step; each process calls it with its own images.

        Gradients are averaged over the processes, so each divisor is the total divided by the number of processes. The mean over
        processes is then the loss that one process would compute for the whole batch. If there are no boxes, the number of boxes is
        taken as 1.
        """
        boxes = [len(target.labels) for target in targets]
        matched = sum(min(count, num_queries) for count in boxes)
        counts = torch.tensor([sum(boxes), matched, len(targets) * num_queries - matched], dtype=torch.float64)
        counts = counts.to(targets[0].labels.device, non_blocking=True)  # if made there, the host would wait for the device
        total_boxes, total_matched, total_unmatched = distributed.all_reduce_sum(counts)
        total_boxes = total_boxes.clamp(min=1)
        classes = self.classification.normalizer(total_matched, total_unmatched, total_boxes)
        share = distributed.world_size()
        return Normalizers(total_boxes / share, classes / share, (total_matched / share, total_unmatched / share))

    def losses_by_layer(
        self, predictions: Predictions, targets: PaddedTargets, matches: Matches, normalizers: Normalizers
    ) -> dict[str, Tensor]:
        """The unweighted losses of every layer, by name, (D,) each."""
        matched = Matched(predictions, targets, matches, self.classification, normalizers)
        losses = {name: self.losses[name](matched) for name in self.weights}
        return {name: values for name, values in losses.items() if values is not None}

    @torch.no_grad()
    def _metrics(self, predictions: Predictions, targets: PaddedTargets, matches: Matches) -> dict[str, Tensor]:
        logits = predictions.logits[-1]
        last = slice(len(matches.layer) // len(predictions.logits) * (len(predictions.logits) - 1), None)  # same number per layer
        image, query, target = matches.image[last], matches.query[last], matches.target[last]
        wrong = (logits[image, query].argmax(-1) != targets.labels[image, target]).to(logits.dtype)
        claimed = self.classification.predicted_object(logits).sum(-1)
        counts = torch.tensor(targets.counts).to(logits.device, non_blocking=True)
        return {
            "metric_class_error": 100 * wrong.sum() / max(1, len(wrong)),
            "metric_cardinality_error": (claimed - counts).abs().to(logits.dtype).mean(),
        }


def _repeated(predictions: Predictions, targets: Sequence[Targets], normalizers: Normalizers, times: int) -> Group:
    """Predictions, and targets in which each object occurs ``times`` times."""
    objects = [Targets(target.labels.repeat(times), target.boxes_cxcywh.repeat(times, 1)) for target in targets]
    return predictions, PaddedTargets.from_targets(objects, predictions.boxes.dtype), _times(normalizers, times)


def _known_matches(denoising: Predictions) -> Matches:
    """The matches of denoising queries. No search for matches is needed, because the object of each query is known."""
    image, query = (denoising.objects >= 0).nonzero(as_tuple=True)
    layers = len(denoising.logits)
    pairs = (part.repeat(layers) for part in (image, query, denoising.objects[image, query]))
    layer = torch.arange(layers, device=image.device).repeat_interleave(len(image))
    return Matches(layer, *pairs)


def _times(normalizers: Normalizers, count: int) -> Normalizers:
    """The divisors of losses in which every object counts ``count`` times."""
    return Normalizers(normalizers.boxes * count, normalizers.classes * count)


class TrainingModel(nn.Module):
    """A detector and its criterion as one module, so that one call of a wrapper (DDP) computes the losses.

    Args:
        detector: any detector with ``preprocess``; checkpoints contain its state dict.
        criterion: the set loss, built for the detector's classification; it has no parameters.
    """

    def __init__(self, detector: nn.Module, criterion: SetCriterion):
        super().__init__()
        self.detector = detector
        self.criterion = criterion

    def forward(self, samples: Sequence[Sample], normalizers: Normalizers | None = None) -> Losses:
        """Compute the losses of samples, in one process.

        Args:
            samples: each with ``image`` (3, h, w) in [0, 255] and ``targets``.
            normalizers: divisors of the whole step, if these samples are only a part of it.
        """
        batch = self.detector.preprocess([sample["image"] for sample in samples])
        targets = [sample["targets"].to(batch.images.device) for sample in samples]
        predictions = self.detector(batch.images, batch.padding_mask, targets)
        return self.criterion(predictions, targets, normalizers)

    def normalizers(self, samples: Sequence[Sample]) -> Normalizers:
        """The divisors of the losses of a whole step, for calls of :meth:`forward` with only a part of the step's samples."""
        targets: list[Targets] = [sample["targets"].to(self.detector.pixel_mean.device) for sample in samples]
        return self.criterion.normalizers(targets, self.detector.num_queries)
