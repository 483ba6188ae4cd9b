# SPDX-License-Identifier: Apache-2.0
"""The seams between a detector's parts: attention masks, queries that exist in training only, necks, further losses."""

import math

import pytest
import torch
from tiny import DEFORMABLE, DETECTORS, random_config
from torch import nn

from cpvt_det.builders import DETECTOR_REGISTRY, build_criterion, build_detector, register_detector
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.structures import Predictions, Targets, level_padding_mask
from cpvt_det.layers import Attention
from cpvt_det.losses.terms import LOSS_REGISTRY, class_loss
from cpvt_det.models import DETR
from cpvt_det.models.queries import Queries


def make(kind, **more):
    torch.manual_seed(0)
    return build_detector(random_config(**{**DETECTORS[kind], **more}))


def batch_of(detector):
    """Two images of other sizes; the second has no object."""
    batch = detector.preprocess([torch.rand(3, 48, 80) * 255, torch.rand(3, 33, 50) * 255])
    boxes = torch.tensor([[0.5, 0.5, 0.4, 0.3], [0.2, 0.6, 0.1, 0.2]])
    targets = [Targets(torch.tensor([0, 2]), boxes), Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4))]
    return batch, targets


@pytest.mark.parametrize("padded", [False, True])
def test_an_attention_mask_is_that_of_torch_s_attention(padded):
    torch.manual_seed(0)
    ours, theirs = Attention(16, 4).double(), nn.MultiheadAttention(16, 4, batch_first=True).double()
    theirs.load_state_dict(ours.state_dict())
    queries, keys = torch.randn(2, 5, 16).double(), torch.randn(2, 7, 16).double()
    mask = torch.randn(5, 7).double()
    mask[1, 2:] = -math.inf
    padding = torch.zeros(2, 7, dtype=torch.bool)
    padding[1, 4:] = padded
    expected, _ = theirs(queries, keys, keys, key_padding_mask=padding, attn_mask=mask)
    torch.testing.assert_close(ours(queries, keys, keys, padding, mask), expected)


def test_in_training_a_hidden_key_is_not_seen():
    """The path with dropout, whose weights are made step by step."""
    attention = Attention(16, 4, 0.5).double().train()
    queries, keys = torch.randn(1, 3, 16).double(), torch.randn(1, 6, 16).double()
    mask = torch.zeros(3, 6).double()
    mask[:, 4:] = -math.inf
    found = []
    for change in (0, 100):
        keys[:, 4:] += change
        torch.manual_seed(1)
        found.append(attention(queries, keys, keys, None, mask))
    assert torch.equal(*found)


def test_a_mask_that_is_not_float_is_refused():
    attention, x = Attention(16, 4), torch.randn(1, 3, 16)
    with pytest.raises(TypeError, match=r"attention_mask is added to the scores, so it must be float, got torch.bool"):
        attention(x, x, x, attention_mask=torch.zeros(3, 3, dtype=torch.bool))


class WithExtra(nn.Module):
    """A query source that puts two more queries, of the targets, before those of another; neither group sees the other."""

    def __init__(self, source):
        super().__init__()
        self.source = source
        self.num_queries = source.num_queries
        self.seen = None

    def forward(self, memory, levels, targets=None):
        queries, self.seen = self.source(memory, levels, targets), targets
        if targets is None:
            return queries
        batch, count, channels = queries.content.shape
        extra = memory.new_ones(batch, 2, channels)
        references = None if queries.references is None else torch.cat((queries.references[:, :2], queries.references), 1)
        mask = memory.new_zeros(count + 2, count + 2)
        mask[:2, 2:] = mask[2:, :2] = -math.inf
        content, positions = (torch.cat((extra, part), 1) for part in (queries.content, queries.positions))
        objects = torch.tensor([[0, -1], [-1, -1]])[:batch]  # the first image's first object, and none of the second's
        return Queries(content, positions, references, queries.proposals, mask, 2, objects, groups=1)


@pytest.mark.parametrize("kind", DETECTORS)
def test_queries_of_training_change_no_other_query_and_only_the_loss_sees_them(kind):
    detector = make(kind).eval()
    batch, targets = batch_of(detector)
    with torch.no_grad():
        before = detector(batch.images, batch.padding_mask)
        source = WithExtra(detector.queries)
        setattr(detector, "query_embed" if kind == "detr" else "queries", source)
        after = detector(batch.images, batch.padding_mask, targets)
        assert source.seen is targets
        assert before.denoising is None and after.denoising.logits.shape[2] == 2
        assert after.denoising.boxes.shape == (*after.boxes.shape[:2], 2, 4)
        torch.testing.assert_close(after.logits, before.logits)
        torch.testing.assert_close(after.boxes, before.boxes)
        without = detector(batch.images, batch.padding_mask)
        assert source.seen is None and torch.equal(without.logits, before.logits)


@pytest.mark.parametrize("kind", DETECTORS)
def test_the_loss_of_denoising_queries_is_that_of_the_objects_they_stand_for(kind):
    """By hand: one of the two queries of the first image stands for its first object, all others for none."""
    detector = make(kind)
    setattr(detector, "query_embed" if kind == "detr" else "queries", WithExtra(detector.queries))
    batch, targets = batch_of(detector)
    criterion = build_criterion(random_config(**DETECTORS[kind]))
    predictions = detector(batch.images, batch.padding_mask, targets)
    found = criterion(predictions, targets)
    group, boxes = predictions.denoising, max(1, sum(len(target) for target in targets))
    distance = (group.boxes[:, 0, 0] - targets[0].boxes_cxcywh[0]).abs().sum()
    torch.testing.assert_close(found.losses["loss_denoising_l1"], 5 * distance / boxes)
    if kind == "detr":  # softmax
        log_odds = group.logits.log_softmax(-1)
        wanted = -log_odds[:, 0, 0, targets[0].labels[0]] - 0.1 * (log_odds[:, 0, 1, -1] + log_odds[:, 1, :, -1].sum(-1))
        torch.testing.assert_close(found.losses["loss_denoising_class"], wanted.sum() / (2 + 0.1 * 10))  # 2 of 12 queries matched
    gradient = torch.autograd.grad(sum(v for k, v in found.losses.items() if "denoising" in k), predictions.denoising.logits)[0]
    assert gradient.abs().sum() > 0 and found.finite.all()
    predictions.denoising.logits = group.logits * torch.tensor([math.nan, 1.0])[None, :, None, None]
    assert criterion(predictions, targets).finite.tolist() == [False, True]


def test_denoising_queries_without_their_objects_are_refused():
    predictions, part = Predictions(torch.zeros(1, 2, 5, 3), torch.zeros(1, 2, 5, 4)), torch.zeros(2, 5, 8)
    with pytest.raises(ValueError, match=r"2 denoising queries, objects must have shape \(2, 2\)"):
        Queries(part, part, num_denoising=2).split(predictions)


@pytest.mark.parametrize("kind", DETECTORS)
def test_the_neck_leaves_zeros_under_the_padding(kind):
    detector = make(kind).eval()
    batch, _ = batch_of(detector)
    with torch.no_grad():
        features, levels = detector.neck(detector.backbone(batch.images, batch.padding_mask), batch.padding_mask)
    assert len(features) == len(levels.shapes) == len(detector.strides)
    for feature, mask, stride in zip(features, levels.masks, detector.strides, strict=True):
        assert torch.equal(mask, level_padding_mask(batch.padding_mask, stride)) and mask[1].any()
        assert not feature.permute(0, 2, 3, 1)[mask].any() and feature.permute(0, 2, 3, 1)[~mask].any()


@pytest.mark.parametrize("kind", DETECTORS)
def test_parts_named_in_the_config_are_the_detector_s_own(kind):
    names = {"detr": ("projection", "learned"), "deformable": ("multi_level", "proposals")}[kind]
    torch.manual_seed(0)
    default = make(kind)
    named = make(kind, MODEL__NECK__NAME=names[0], MODEL__QUERIES__NAME=names[1])
    assert [type(part) for part in (named.neck, named.queries)] == [type(part) for part in (default.neck, default.queries)]
    assert {name: value.shape for name, value in named.state_dict().items()} == {
        name: value.shape for name, value in default.state_dict().items()
    }


def test_unknown_parts_and_options_are_refused_by_name():
    for key, kind in (("NECK", "neck"), ("QUERIES", "query source")):
        with pytest.raises(UnknownNameError, match=rf"unknown {kind} 'own'; known: .*--import MODULE"):
            make("detr", **{f"MODEL__{key}__NAME": "own"})
    with pytest.raises(UnknownNameError, match=r"unknown option of backbone 'resnet10' 'widht' \(did you mean 'width'\?\)"):
        make("detr", MODEL__BACKBONE__WIDHT=3)
    with pytest.raises(UnknownNameError, match=r"unknown option of classification 'softmax' 'margin'; known: background_weight"):
        make("detr", MODEL__CRITERION__CLASSIFICATION__MARGIN=3)


def test_a_loss_by_name_is_weighted_and_in_the_total():
    criterion = build_criterion(random_config(MODEL__CRITERION__LOSSES=[["l1_again", 3.0]]))
    plain = build_criterion(random_config())
    predictions = Predictions(torch.randn(2, 1, 5, 4), torch.rand(2, 1, 5, 4))
    targets = [Targets(torch.tensor([1]), torch.tensor([[0.5, 0.5, 0.2, 0.3]]))]
    found, expected = criterion(predictions, targets).losses, plain(predictions, targets).losses
    assert list(found) == [*expected, "loss_l1_again"]
    torch.testing.assert_close(found["loss_l1_again"], expected["loss_l1"] * 3 / 5)


@pytest.fixture(autouse=True)
def registered():
    """A loss under another name, for this file."""
    from cpvt_det.losses import LOSS_REGISTRY
    from cpvt_det.losses.terms import l1_loss

    LOSS_REGISTRY._obj_map["l1_again"] = l1_loss
    yield
    del LOSS_REGISTRY._obj_map["l1_again"]


@pytest.mark.parametrize(
    ("losses", "error", "message"),
    [
        ([["area", 1.0]], UnknownNameError, r"unknown loss 'area'; known: class, ddf, fgl, giou, l1, l1_again"),
        ([["l1", 1.0]], ConfigError, r"MODEL.CRITERION: the loss 'l1' exists already, with the weight 5"),
        ([["l1_again", 1.0], ["l1_again", 2.0]], ConfigError, r"MODEL.CRITERION.LOSSES contains a loss twice: "),
        (
            ["l1_again"],
            ConfigError,
            r"LOSSES must contain entries of the form \[name of a loss, weight\] or .*, got 'l1_again'",
        ),
    ],
)
def test_losses_that_cannot_be_are_refused(losses, error, message):
    with pytest.raises(error, match=message):
        build_criterion(random_config(MODEL__CRITERION__LOSSES=losses))


def test_two_stages_are_refused_under_softmax():
    with pytest.raises(ConfigError, match="ranks proposals by sigmoid scores"):
        build_detector(random_config(**{**DEFORMABLE, "MODEL__CRITERION__CLASSIFICATION__NAME": "softmax"}))


def test_a_part_that_lacks_what_its_contract_asks_for_is_refused():
    detector = make("detr")
    del detector.backbone.size_divisibility
    with pytest.raises(
        TypeError, match=r"the backbone FastResNetBackbone has no size_divisibility; its contract requires strides, chan"
    ):
        DETR(detector.backbone, detector.position, detector.transformer, 16, num_queries=2, num_logits=3)


@pytest.mark.parametrize("kind", ["detr", "deformable"])
def test_a_query_source_without_a_number_of_queries_is_refused_and_an_empty_one_is_not_replaced(kind):
    """An empty ``ModuleList`` is false, as a part of one's own may be."""
    detector, source = make(kind), nn.ModuleList()
    parts = (detector.backbone, detector.position, detector.transformer, 16)
    more = {"neck": detector.neck, "queries": source} | ({"decoder_position": None} if kind == "detr" else {})
    with pytest.raises(TypeError, match=r"the query source ModuleList has no num_queries; its contract requires num_queries"):
        type(detector)(*parts, num_queries=2, num_logits=3, **more)
    source.num_queries = 2
    assert type(detector)(*parts, num_queries=2, num_logits=3, **more).queries is source


def test_a_loss_takes_options_and_one_of_weight_0_is_left_out():
    """Proof by an option that multiplies; the class loss is replaced."""
    name = "times"
    LOSS_REGISTRY.register_as(name)(lambda matched, factor=1.0: factor * class_loss(matched))
    try:
        more = {"MODEL__CRITERION__CLASS_WEIGHT": 0.0, "MODEL__CRITERION__LOSSES": [[name, 2.0, {"factor": 3.0}]]}
        replaced, usual = build_criterion(random_config(**more)), build_criterion(random_config())
        detector = make("detr")
        batch, targets = batch_of(detector)
        predictions = detector(batch.images, batch.padding_mask)
        found, expected = replaced(predictions, targets).losses, usual(predictions, targets).losses
        assert found.keys() == {"loss_times", "loss_l1", "loss_giou"}
        torch.testing.assert_close(found["loss_times"], 6 * expected["loss_class"])
        with pytest.raises(UnknownNameError, match=r"unknown option of loss 'times' 'facto'"):
            build_criterion(random_config(MODEL__CRITERION__LOSSES=[[name, 2.0, {"facto": 3.0}]]))
    finally:
        del LOSS_REGISTRY._obj_map[name]


@pytest.mark.parametrize(("source", "two_stage"), [("learned", True), ("proposals", False)])
def test_two_stages_and_a_query_source_that_contradicts_them_are_refused(source, two_stage):
    more = {"MODEL__QUERIES__NAME": source, "MODEL__DETECTOR__TWO_STAGE": two_stage}
    with pytest.raises(ConfigError, match=rf"QUERIES.NAME is '{source}', but MODEL.DETECTOR.TWO_STAGE is {two_stage}"):
        make("deformable", **more)


def test_a_detector_of_ones_own_refuses_what_its_parent_does_not_take():
    class Own(DETR):
        pass

    register_detector("Own", Own)(DETECTOR_REGISTRY.get("CPVTDetr"))
    DETECTOR_REGISTRY.get("CPVTDetr").detector = DETR  # the decorated function is shared here
    try:
        with pytest.raises(ConfigError, match="unknown option of MODEL.META_ARCHITECTURE 'Own' 'box_refinement'"):
            make("detr", MODEL__META_ARCHITECTURE="Own", MODEL__DETECTOR__BOX_REFINEMENT=True)
    finally:
        del DETECTOR_REGISTRY._obj_map["Own"]
