# SPDX-License-Identifier: Apache-2.0
"""The matcher against all permutations, the criterion against loops over layers and images, and what each normaliser means."""

import itertools
import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torchvision.ops import generalized_box_iou, sigmoid_focal_loss

from cpvt_det.builders import build_criterion
from cpvt_det.common import defaults, distributed
from cpvt_det.common.boxes import cxcywh_to_xyxy, generalized_iou, pairwise_generalized_iou
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.structures import Predictions, Targets
from cpvt_det.config import get_cfg
from cpvt_det.losses import FocalClassification, HungarianMatcher, SetCriterion, SoftmaxClassification, make_classification
from cpvt_det.losses.classification import softplus
from cpvt_det.losses.matcher import PaddedTargets

K, D, B, Q = 3, 2, 4, 5
COUNTS = [2, 0, 3, 1]  # objects of the images; the second has none
WEIGHTS = {"class": 1.5, "l1": 5.0, "giou": 2.0}


@pytest.fixture(params=["softmax", "focal"])
def classification(request):
    return make_classification(request.param, K)


def make_batch(classification, counts=COUNTS, queries=Q, layers=D, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)

    def boxes(*shape):
        center, size = (torch.rand(*shape, 2, generator=generator, dtype=torch.float64) for _ in range(2))
        return torch.cat((0.2 + 0.6 * center, 0.05 + 0.3 * size), -1).to(dtype)

    shape = (layers, len(counts), queries)
    logits = torch.randn(*shape, classification.num_logits, generator=generator, dtype=torch.float64).to(dtype)
    targets = [Targets(torch.randint(K, (count,), generator=generator), boxes(count)) for count in counts]
    return Predictions(logits.requires_grad_(), boxes(*shape).requires_grad_()), targets


def make_criterion(classification):
    matcher = HungarianMatcher(classification, WEIGHTS["class"], WEIGHTS["l1"], WEIGHTS["giou"])
    return SetCriterion(matcher, class_weight=0.7, l1_weight=5.0, giou_weight=2.0)


# The oracle: Python floats, one pair at a time


def slow_giou(box1, box2):
    (x1, y1, w1, h1), (x2, y2, w2, h2) = box1, box2
    left, right = max(x1 - w1 / 2, x2 - w2 / 2), min(x1 + w1 / 2, x2 + w2 / 2)
    top, bottom = max(y1 - h1 / 2, y2 - h2 / 2), min(y1 + h1 / 2, y2 + h2 / 2)
    intersection = max(0.0, right - left) * max(0.0, bottom - top)
    union = w1 * h1 + w2 * h2 - intersection
    hull_width = max(x1 + w1 / 2, x2 + w2 / 2) - min(x1 - w1 / 2, x2 - w2 / 2)
    hull_height = max(y1 + h1 / 2, y2 + h2 / 2) - min(y1 - h1 / 2, y2 - h2 / 2)
    hull = hull_width * hull_height
    return intersection / union - (hull - union) / hull


def slow_probabilities(logits, kind):
    if kind == "focal":
        return [1 / (1 + math.exp(-logit)) for logit in logits]
    total = sum(math.exp(logit) for logit in logits)
    return [math.exp(logit) / total for logit in logits]


def slow_cost(logits, box, label, wanted, kind):
    probability = slow_probabilities(logits, kind)[label]
    class_cost = -probability
    if kind == "focal":
        positive = 0.25 * (1 - probability) ** 2 * -math.log(probability + 1e-8)
        negative = 0.75 * probability**2 * -math.log(1 - probability + 1e-8)
        class_cost = positive - negative
    l1 = sum(abs(a - b) for a, b in zip(box, wanted, strict=True))
    return WEIGHTS["class"] * class_cost + WEIGHTS["l1"] * l1 - WEIGHTS["giou"] * slow_giou(box, wanted)


def slow_matching(cost):
    """(Q, G) costs -> the pairs (query, target) of the least sum, by trying every assignment."""
    queries, count = len(cost), len(cost[0]) if len(cost) else 0
    if count <= queries:
        choices = ([*zip(chosen, range(count), strict=True)] for chosen in itertools.permutations(range(queries), count))
    else:
        choices = ([*zip(range(queries), chosen, strict=True)] for chosen in itertools.permutations(range(count), queries))
    return sorted(min(choices, key=lambda pairs: sum(cost[q][g] for q, g in pairs)))


def slow_class_loss(logits, label, kind):
    """The loss of one query; ``label`` None is no object."""
    probabilities = slow_probabilities(logits, kind)
    if kind == "softmax":
        return -math.log(probabilities[label]) if label is not None else -0.1 * math.log(probabilities[-1])
    total = 0.0
    for k, p in enumerate(probabilities):
        total += 0.25 * (1 - p) ** 2 * -math.log(p) if k == label else 0.75 * p**2 * -math.log(1 - p)
    return total


def slow_criterion(predictions, targets, kind):
    """The three weighted losses, summed over layers: the definition, layer by layer and image by image."""
    logits, boxes = predictions.logits.tolist(), predictions.boxes.tolist()
    num_boxes = max(1, sum(len(target) for target in targets))
    losses = {"loss_class": 0.0, "loss_l1": 0.0, "loss_giou": 0.0}
    for layer in range(len(logits)):
        class_sum, class_weight = 0.0, 0.0
        for image, target in enumerate(targets):
            labels, wanted = target.labels.tolist(), target.boxes_cxcywh.tolist()
            of_query = dict(match_slowly(logits[layer][image], boxes[layer][image], labels, wanted, kind))
            for query, query_logits in enumerate(logits[layer][image]):
                label = labels[of_query[query]] if query in of_query else None
                class_sum += slow_class_loss(query_logits, label, kind)
                class_weight += 1.0 if label is not None else 0.1
            for query, g in of_query.items():
                box = boxes[layer][image][query]
                losses["loss_l1"] += 5.0 * sum(abs(a - b) for a, b in zip(box, wanted[g], strict=True)) / num_boxes
                losses["loss_giou"] += 2.0 * (1 - slow_giou(box, wanted[g])) / num_boxes
        losses["loss_class"] += 0.7 * class_sum / (class_weight if kind == "softmax" else num_boxes)
    return losses


def match_slowly(logits, boxes, labels, wanted, kind):
    cost = [
        [slow_cost(query_logits, box, label, target, kind) for label, target in zip(labels, wanted, strict=True)]
        for query_logits, box in zip(logits, boxes, strict=True)
    ]
    return slow_matching(cost)


def kind_of(classification):
    return "softmax" if isinstance(classification, SoftmaxClassification) else "focal"


# The matcher


def test_cost_is_that_of_each_pair(classification):
    predictions, targets = make_batch(classification)
    cost = make_criterion(classification).matcher.cost(predictions, PaddedTargets.from_targets(targets, torch.float64)).detach()
    for layer, image, query in itertools.product(range(D), range(B), range(Q)):
        logits, box = predictions.logits[layer, image, query].tolist(), predictions.boxes[layer, image, query].tolist()
        for g in range(COUNTS[image]):
            label, wanted = int(targets[image].labels[g]), targets[image].boxes_cxcywh[g].tolist()
            expected = slow_cost(logits, box, label, wanted, kind_of(classification))
            assert float(cost[layer, image, g, query]) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("counts", [COUNTS, [5, 0, 4, 5], [6, 7, 0, 1]], ids=["fewer boxes", "as many", "more than queries"])
def test_matching_is_the_cheapest_of_all_assignments(classification, counts):
    predictions, targets = make_batch(classification, counts, queries=4)
    (matches,) = make_criterion(classification).matcher((predictions, PaddedTargets.from_targets(targets, torch.float64)))
    found = list(zip(*(part.tolist() for part in (matches.layer, matches.image, matches.query, matches.target)), strict=True))
    expected = []
    for layer, image in itertools.product(range(D), range(B)):
        logits, boxes = predictions.logits[layer, image].tolist(), predictions.boxes[layer, image].tolist()
        labels, wanted = targets[image].labels.tolist(), targets[image].boxes_cxcywh.tolist()
        if labels:
            pairs = match_slowly(logits, boxes, labels, wanted, kind_of(classification))
            expected += [(layer, image, *pair) for pair in pairs]
    assert found == expected  # ordered by layer, image and query
    assert len(found) == D * sum(min(4, count) for count in counts)


def test_matching_by_hand():
    """Two queries on two boxes, crosswise; the class cost is equal, so L1 decides: 0.1 a pair against 1.3."""
    boxes = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.8, 0.8, 0.2, 0.2]])
    target = Targets(torch.tensor([0, 0]), boxes.flip(0) + torch.tensor([0.05, 0.05, 0, 0]))
    matcher = HungarianMatcher(SoftmaxClassification(1))
    predictions = Predictions(torch.zeros(1, 1, 2, 2), boxes[None, None])
    (matches,) = matcher((predictions, PaddedTargets.from_targets([target], torch.float32)))
    assert (matches.query.tolist(), matches.target.tolist()) == ([0, 1], [1, 0])


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("part", ["logits", "boxes"])
@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0]], ids=["with boxes", "no box at all"])
def test_predictions_that_are_not_finite_are_told_by_image_and_do_not_raise(classification, counts, part, bad):
    """At positions 1, which has no object, and 2 of the batch; also where no image has an object. All processes go on alike."""
    predictions, targets = make_batch(classification, counts)
    with torch.no_grad():
        getattr(predictions, part)[1, 2, 4, 1] = bad
        getattr(predictions, part)[0, 1, 0, 0] = bad
    assert make_criterion(classification)(predictions, targets).finite.tolist() == [True, False, False, True]


# The criterion


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0], [6, 7, 0, 1]], ids=["usual", "no box at all", "more than queries"])
def test_losses_are_the_sums_over_layers_and_images(classification, counts):
    predictions, targets = make_batch(classification, counts)
    found = make_criterion(classification)(predictions, targets).losses
    expected = slow_criterion(predictions, targets, kind_of(classification))
    assert list(found) == ["loss_class", "loss_l1", "loss_giou"]
    for name, value in expected.items():
        assert found[name].item() == pytest.approx(value, abs=1e-12), name


def test_losses_in_float32_are_those_in_float64(classification):
    exact, targets = make_batch(classification)
    predictions, _ = make_batch(classification, dtype=torch.float32)
    found = make_criterion(classification)(predictions, targets).losses
    for name, value in make_criterion(classification)(exact, targets).losses.items():
        assert found[name].dtype == torch.float32
        assert found[name].item() == pytest.approx(value.item(), rel=1e-5)


def test_softmax_loss_is_torch_s_weighted_cross_entropy():
    """With its gradient, for which each layer's sum is weighted by another number."""
    classification = SoftmaxClassification(K, background_weight=0.3)
    logits = (3 * torch.randn(D, B, Q, K + 1, dtype=torch.float64)).requires_grad_()
    classes = torch.randint(K + 1, (D, B, Q))
    weights = torch.tensor([1, 1, 1, 0.3], dtype=torch.float64)
    found = classification.loss(logits, classes)
    scales = torch.arange(1.0, D + 1, dtype=torch.float64)
    (slopes,) = torch.autograd.grad(scales @ found, logits)
    total = 0
    for layer in range(D):
        matched = (classes[layer] < K).sum().double()
        normalizer = classification.normalizer(matched, B * Q - matched, matched)
        expected = torch.nn.functional.cross_entropy(logits[layer].flatten(0, 1), classes[layer].flatten(), weights)
        assert (found[layer] / normalizer).item() == pytest.approx(expected.item(), abs=1e-12)
        total = total + scales[layer] * normalizer * expected
    torch.testing.assert_close(slopes, torch.autograd.grad(total, logits)[0], rtol=1e-10, atol=1e-12)


def test_metrics_by_hand():
    """One image with two boxes, three queries; the last layer counts.

    Query 0 sits on box 0 and says its class, query 1 on box 1 and says another: class error 50 %. Queries 0, 1 and 2 claim an
    object where there are 2: cardinality error 1.
    """
    boxes = torch.tensor([[0.2, 0.2, 0.2, 0.2], [0.8, 0.8, 0.2, 0.2], [0.5, 0.5, 0.9, 0.9]])
    targets = [Targets(torch.tensor([0, 1]), boxes[:2])]
    logits = 5 * torch.eye(4)[torch.tensor([[0, 2, 1]])]
    first_layer = 5 * torch.eye(4)[torch.tensor([[3, 3, 3]])]
    predictions = Predictions(torch.stack((first_layer, logits)), boxes[None, None].expand(2, -1, -1, -1))
    metrics = make_criterion(SoftmaxClassification(K))(predictions, targets).metrics
    assert {name: float(value) for name, value in metrics.items()} == {"metric_class_error": 50, "metric_cardinality_error": 1}
    focal = Predictions(predictions.logits[..., :K] * 2 - 5, predictions.boxes)
    metrics = make_criterion(FocalClassification(K))(focal, targets).metrics
    assert {name: float(value) for name, value in metrics.items()} == {"metric_class_error": 50, "metric_cardinality_error": 1}


@pytest.mark.parametrize("counts", [COUNTS, [0, 0, 0, 0], [1, 0, 0, 0], [9, 9, 9, 9]])
def test_every_prediction_of_every_head_gets_a_finite_gradient(classification, counts):
    """A batch without boxes gives the box head a gradient of zeros, so every process of a group takes part in the reduction."""
    predictions, targets = make_batch(classification, counts)
    losses = make_criterion(classification)(predictions, targets).losses
    sum(losses.values()).backward()
    for value in (*losses.values(), predictions.logits.grad, predictions.boxes.grad):
        assert torch.isfinite(value).all()
    assert (predictions.logits.grad != 0).any(-1).all()
    matched = (predictions.boxes.grad != 0).any(-1).sum((0, 2))
    assert matched.tolist() == [D * min(count, Q) for count in counts]


@pytest.mark.parametrize("corner", [[0.0, 0.0, 0.0, 0.0], [0.5, 0.5, 0.0, 0.0], [0.5, 0.5, 0.0, 0.2]])
def test_identical_boxes_without_area_give_finite_gradients(classification, corner):
    box = torch.tensor(corner)
    logits = torch.zeros(D, 1, Q, classification.num_logits, requires_grad=True)
    boxes = box.expand(D, 1, Q, 4).clone().requires_grad_()
    losses = make_criterion(classification)(Predictions(logits, boxes), [Targets(torch.tensor([0]), box[None])]).losses
    sum(losses.values()).backward()
    assert all(torch.isfinite(value) for value in losses.values())
    assert torch.isfinite(boxes.grad).all()
    assert torch.isfinite(logits.grad).all()


def test_step_copies_to_the_host_once(classification, monkeypatch):
    """One ``.cpu()``, the costs of all groups; nothing else that waits for a device: no item, tolist, nonzero, numpy of others."""
    predictions, targets = make_batch(classification)
    predictions.hybrid = Predictions(predictions.logits, predictions.boxes)
    copies = []

    def counting(name):
        original = getattr(torch.Tensor, name)
        return lambda self, *args, **kwargs: copies.append((name, tuple(self.shape))) or original(self, *args, **kwargs)

    for name in ("cpu", "item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "unique"):
        monkeypatch.setattr(torch.Tensor, name, counting(name))
    losses = make_criterion(classification)(predictions, targets).losses
    sum(losses.values()).backward()
    assert [name for name, _ in copies if name != "numpy"] == ["cpu"]


class Crossings(TorchDispatchMode):
    """Writes down every copy between devices that the host waits for; fake tensors refuse to tell the host a value themselves."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        waits = not (kwargs or {}).get("non_blocking", False)
        devices = {tensor.device.type for tensor in (*args, out) if isinstance(tensor, torch.Tensor)}
        if waits and devices == {"cpu", "cuda"} and "copy" in str(func):
            self.found.append((tuple(args[0].shape), out.device.type))
        return out


def test_on_a_gpu_the_host_waits_once_in_a_step(classification, monkeypatch):
    """A GPU that computes nothing, but whose tensors know where they are: the only wait is for the costs of all groups."""

    try:
        with FakeTensorMode():
            torch.zeros(2, 3, device="cuda").gather(-1, torch.zeros(2, dtype=torch.int64, device="cuda")[:, None].expand(2, 2))
    except RuntimeError as error:
        pytest.skip(f"this torch asks the driver of a GPU even for fake tensors: {error}".splitlines()[0])
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: tensor.to("cpu"))
    monkeypatch.setattr(torch.Tensor, "numpy", lambda tensor: np.zeros(tuple(tensor.shape), dtype=np.float32))
    with FakeTensorMode(), Crossings() as crossings:
        logits, boxes = (torch.zeros(D, B, Q, width, device="cuda") for width in (classification.num_logits, 4))
        labels = [torch.zeros(count, dtype=torch.int64, device="cuda") for count in COUNTS]
        targets = [Targets(label, torch.zeros(len(label), 4, device="cuda")) for label in labels]
        result = make_criterion(classification)(Predictions(logits, boxes, hybrid=Predictions(logits, boxes)), targets)
    costs = (1 + defaults.HYBRID_MATCHES) * D * B * max(COUNTS) * Q
    assert crossings.found == [((costs,), "cpu")]
    assert {value.device.type for value in (*result.losses.values(), *result.metrics.values())} == {"cuda"}


# Normalisers


def test_parts_of_a_batch_with_its_normalizers_add_up_to_the_whole(classification):
    predictions, targets = make_batch(classification)
    criterion = make_criterion(classification)
    whole = criterion(predictions, targets).losses
    normalizers = criterion.normalizers(targets, Q)
    for cut in (1, 2, 3):
        parts = [
            criterion(Predictions(predictions.logits[:, part], predictions.boxes[:, part]), targets[part], normalizers).losses
            for part in (slice(0, cut), slice(cut, None))
        ]
        for name, value in whole.items():
            assert abs((parts[0][name] + parts[1][name] - value).item()) <= 1e-12, name


def test_normalizers_by_hand():
    """Counts 2, 0, 3 and 9 with 5 queries: 14 boxes, 10 of 20 queries matched; softmax 10 + 0.1 * 10 = 11, focal 14."""
    for classification, classes in ((SoftmaxClassification(K), 11), (FocalClassification(K), 14)):
        _, targets = make_batch(classification, [2, 0, 3, 9])
        normalizers = make_criterion(classification).normalizers(targets, Q)
        assert (float(normalizers.boxes), float(normalizers.classes)) == (14, pytest.approx(classes))


def test_boxes_count_at_least_one():
    for classification, classes in ((SoftmaxClassification(K), 0.1 * 20), (FocalClassification(K), 1)):
        _, targets = make_batch(classification, [0, 0, 0, 0])
        normalizers = make_criterion(classification).normalizers(targets, Q)
        assert (float(normalizers.boxes), float(normalizers.classes)) == (1, pytest.approx(classes))


def test_mean_over_processes_is_the_loss_of_the_batch_in_one(classification, monkeypatch):
    """Two processes, the second without any box; their gradients are averaged, so the mean of their losses counts."""
    predictions, targets = make_batch(classification, [2, 3, 0, 0])
    criterion = make_criterion(classification)
    whole = criterion(predictions, targets).losses
    parts = [slice(0, 2), slice(2, 4)]
    counts = []
    with monkeypatch.context() as patch:
        patch.setattr(distributed, "all_reduce_sum", lambda values: counts.append(values) or values)
        for part in parts:
            criterion.normalizers(targets[part], Q)
    monkeypatch.setattr(distributed, "all_reduce_sum", lambda values: sum(counts))
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    losses = [
        criterion(Predictions(predictions.logits[:, part], predictions.boxes[:, part]), targets[part]).losses for part in parts
    ]
    for name, value in whole.items():
        assert ((losses[0][name] + losses[1][name]) / 2).item() == pytest.approx(value.item(), abs=1e-12), name


# Classification: loss, cost and score are of one mind


def test_focal_cost_is_what_the_loss_gains_by_a_match():
    """The loss of a query as class k, less its loss as no object."""
    classification = FocalClassification(K, alpha=0.3, gamma=1.5)
    logits = torch.linspace(-3, 3, 7 * K, dtype=torch.float64).view(1, 7, 1, K)
    nothing = torch.stack([classification.loss(logits[:, [b]], torch.full((1, 1, 1), K)) for b in range(7)])
    for k in range(K):
        as_class = torch.stack([classification.loss(logits[:, [b]], torch.full((1, 1, 1), k)) for b in range(7)])
        cost = classification.cost(logits, torch.full((7, 1), k))
        assert (cost.flatten() - (as_class - nothing).flatten()).abs().max() < 1e-6  # the cost's logarithms have an epsilon


@pytest.mark.parametrize("gamma", [0.5, 1.0, 2.0])
def test_focal_gradient_is_that_of_its_definition(gamma):
    logits = torch.linspace(-30, 30, 60, dtype=torch.float64).view(1, 4, 5, K).requires_grad_()
    classes = torch.arange(20).view(1, 4, 5) % (K + 1)
    found = FocalClassification(K, gamma=gamma).loss(logits, classes)
    expected = sigmoid_focal_loss(logits, torch.nn.functional.one_hot(classes, K + 1)[..., :K].double(), 0.25, gamma).sum((1, 2, 3))
    assert found.item() == pytest.approx(expected.item(), rel=1e-12)
    gradients = [torch.autograd.grad(loss.sum(), logits)[0] for loss in (found, expected)]
    assert (gradients[0] - gradients[1]).abs().max() < 1e-10
    assert torch.autograd.gradcheck(lambda x: FocalClassification(K, gamma=gamma).loss(x, classes), logits / 5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_softplus_is_exact_at_both_ends(dtype):
    """Down to the smallest normal number, where the rest of 1 + y is all that counts."""
    x = torch.linspace(-85, 85, 100_001, dtype=dtype)
    exact = np.logaddexp(np.longdouble(0), x.numpy().astype(np.longdouble))
    error = np.abs((softplus(x).numpy().astype(np.longdouble) - exact) / exact).max()
    assert error < 3 * torch.finfo(dtype).eps
    ends = softplus(torch.tensor([math.inf, -math.inf, math.nan], dtype=dtype))
    assert ends[0] == math.inf and ends[1] == 0 and ends[2].isnan()


def test_cheaper_means_a_higher_score(classification):
    """For one class, the order of queries by cost is their order by score."""
    logits = torch.randn(1, 1, 9, classification.num_logits, dtype=torch.float64)
    for k in range(K):
        cost = classification.cost(logits, torch.tensor([[k]]))[0, 0, 0]
        score = logits.softmax(-1)[0, 0, :, k] if kind_of(classification) == "softmax" else logits.sigmoid()[0, 0, :, k]
        assert cost.argsort().tolist() == score.argsort(descending=True).tolist()


def test_softmax_decodes_the_best_class_of_the_best_queries():
    logits = torch.tensor([[[0.0, 2.0, 0.0, 5.0], [4.0, 0.0, 0.0, 0.0], [0.0, 0.0, 1.0, 0.0]]])  # the last is no object
    scores, labels, queries = SoftmaxClassification(K).decode(logits, 2)
    assert labels.tolist() == [[0, 2]]
    assert queries.tolist() == [[1, 2]]
    assert scores[0].tolist() == pytest.approx([math.exp(4) / (math.exp(4) + 3), math.e / (math.e + 3)])


def test_focal_decodes_the_best_pairs_so_one_query_may_come_twice():
    logits = torch.tensor([[[3.0, -9.0, 2.0], [-9.0, 2.5, -9.0]]])
    scores, labels, queries = FocalClassification(K).decode(logits, 3)
    assert labels.tolist() == [[0, 1, 2]]
    assert queries.tolist() == [[0, 1, 0]]
    assert scores[0].tolist() == pytest.approx([1 / (1 + math.exp(-x)) for x in (3.0, 2.5, 2.0)])


@pytest.mark.parametrize("most", [1, 4, 1000])
def test_decoding_is_ordered_and_bounded(classification, most):
    logits = torch.randn(2, Q, classification.num_logits)
    scores, labels, queries = classification.decode(logits, most)
    possible = Q if kind_of(classification) == "softmax" else Q * K
    assert scores.shape == labels.shape == queries.shape == (2, min(most, possible))
    assert (scores.diff() <= 0).all()
    assert int(labels.max()) < K
    values = logits.softmax(-1) if kind_of(classification) == "softmax" else logits.sigmoid()
    for image in range(2):
        assert torch.equal(scores[image], values[image, queries[image], labels[image]])


def test_number_of_logits():
    assert (SoftmaxClassification(K).num_logits, FocalClassification(K).num_logits) == (K + 1, K)


def test_criterion_of_the_config_takes_its_weights():
    cfg = get_cfg()
    cfg.MODEL.NUM_CLASSES = K
    cfg.MODEL.CRITERION.L1_WEIGHT = 7.0
    cfg.MODEL.CRITERION.GIOU_COST = 3.0
    cfg.MODEL.CRITERION.CLASSIFICATION.BACKGROUND_WEIGHT = 0.25
    criterion = build_criterion(cfg)
    assert criterion.weights == {"loss_class": 1.0, "loss_l1": 7.0, "loss_giou": 2.0}
    assert (criterion.matcher.class_cost, criterion.matcher.l1_cost, criterion.matcher.giou_cost) == (1.0, 5.0, 3.0)
    assert criterion.classification.background_weight == 0.25
    assert criterion.matcher.classification is criterion.classification
    cfg.MODEL.CRITERION.CLASSIFICATION.NAME, cfg.MODEL.CRITERION.CLASSIFICATION.BACKGROUND_WEIGHT = "focal", None
    cfg.MODEL.CRITERION.CLASSIFICATION.GAMMA = 1.0
    assert build_criterion(cfg).classification.gamma == 1.0


def test_unknown_classification_lists_the_known():
    with pytest.raises(
        UnknownNameError,
        match=r"unknown classification 'sofmax' \(did you mean 'softmax'\?\); known: focal, ia_bce, mal, softmax, varifocal",
    ):
        make_classification("sofmax", K)


# Generalised IoU


def test_generalized_iou_is_torchvision_s():
    generator = torch.Generator().manual_seed(0)
    boxes = [torch.rand(n, 4, generator=generator, dtype=torch.float64) for n in (40, 30)]
    first, second = (cxcywh_to_xyxy(box) for box in boxes)
    found = generalized_iou(first[:, None], second[None])
    assert (found - generalized_box_iou(first, second)).abs().max() < 1e-12
    slow = [[slow_giou(a, b) for b in boxes[1].tolist()] for a in boxes[0].tolist()]
    assert np.abs(found.numpy() - np.array(slow)).max() < 1e-12


def test_generalized_iou_by_hand():
    """Unit squares: the same, 1; side by side, 0 (the hull is the union); one apart, 0 - 1 / 3; half over, 1/3 - 0."""
    square = torch.tensor([0.0, 0.0, 1.0, 1.0])
    others = torch.tensor([[0.0, 0.0, 1.0, 1.0], [1.0, 0.0, 2.0, 1.0], [2.0, 0.0, 3.0, 1.0], [0.5, 0.0, 1.5, 1.0]])
    assert generalized_iou(square, others).tolist() == pytest.approx([1, 0, -1 / 3, 1 / 3])


sides = st.lists(st.floats(0, 1, width=32), min_size=8, max_size=8)


@settings(max_examples=100, deadline=None)
@given(sides)
def test_generalized_iou_is_finite_bounded_and_symmetric(values):
    boxes = torch.tensor(values, dtype=torch.float64).view(2, 4).requires_grad_()
    first, second = cxcywh_to_xyxy(boxes)
    giou = generalized_iou(first, second)
    giou.backward()
    assert -1 - 1e-9 <= giou.item() <= 1 + 1e-9
    assert giou.item() == pytest.approx(generalized_iou(second, first).item())
    assert torch.isfinite(boxes.grad).all()


def test_pairwise_generalized_iou_is_that_of_each_pair():
    """Of boxes of any size, with some that have no width, no height, neither, or are the same."""
    generator = torch.Generator().manual_seed(0)
    first, second = (torch.rand(2, n, 4, generator=generator, dtype=torch.float64) for n in (40, 30))
    first[:, ::3, 2], first[:, ::4, 3] = 0, 0
    second[:, :20] = first[:, :20]
    first, second = cxcywh_to_xyxy(first), cxcywh_to_xyxy(second)
    expected = generalized_iou(first[:, :, None], second[:, None])
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        found = pairwise_generalized_iou(first.to(dtype), second.to(dtype))
        assert found.shape == (2, 40, 30)
        assert (found - expected).abs().max() < tolerance
    assert pairwise_generalized_iou(first[:, :0], second).shape == (2, 0, 30)
    assert pairwise_generalized_iou(torch.full_like(first, torch.nan), second).isnan().all()


@pytest.mark.parametrize(
    ("classification", "key", "value", "said"),
    [
        ("softmax", "CLASSIFICATION.BACKGROUND_WEIGHT", -0.1, "background_weight must be at least 0, got -0.1"),
        ("focal", "CLASSIFICATION.ALPHA", 1.5, "alpha must be from 0 to 1, got 1.5"),
        ("focal", "CLASSIFICATION.GAMMA", -1.0, "gamma must be at least 0, got -1.0"),
        ("mal", "CLASSIFICATION.GAMMA", -1.0, "gamma must be at least 0, got -1.0"),
        ("varifocal", "CLASSIFICATION.ALPHA", -0.5, "alpha must be at least 0, got -0.5"),
        ("varifocal", "CLASSIFICATION.GAMMA", math.nan, "gamma must be at least 0, got nan"),
        ("ia_bce", "CLASSIFICATION.ALPHA", 1.2, "alpha must be from 0 to 1, got 1.2"),
        ("ia_bce", "CLASSIFICATION.GAMMA", -2.0, "gamma must be at least 0, got -2.0"),
        ("focal", "CLASS_WEIGHT", -1.0, "the class weight must be at least 0, got -1.0"),
        ("focal", "L1_WEIGHT", math.nan, "the L1 weight must be at least 0, got nan"),
        ("focal", "GIOU_WEIGHT", -2.0, "the GIoU weight must be at least 0, got -2.0"),
    ],
)
def test_numbers_out_of_their_range_are_refused_before_training(classification, key, value, said):
    cfg, (*node, option) = get_cfg(), key.split(".")
    cfg.MODEL.NUM_CLASSES, cfg.MODEL.CRITERION.CLASSIFICATION.NAME = 3, classification
    (cfg.MODEL.CRITERION.CLASSIFICATION if node else cfg.MODEL.CRITERION)[option] = value
    with pytest.raises(ConfigError, match=rf"MODEL.CRITERION(.CLASSIFICATION)?: {re.escape(said)}"):
        build_criterion(cfg)
