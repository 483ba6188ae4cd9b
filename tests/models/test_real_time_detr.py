# SPDX-License-Identifier: Apache-2.0
"""RT-DETR and D-FINE: padding changes nothing, what they learn, bad input. Their values: ``test_parity_real_time.py``."""

from dataclasses import replace

import pytest
import torch
from tiny import DFINE, RTDETR, random_config

from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.structures import BoxDistributions, PaddedBatch, Predictions, Targets
from cpvt_det.layers.attention import DeformableAttention
from cpvt_det.layers.norm import MaskedBatchNorm2d, MaskedGroupNorm
from cpvt_det.losses.matcher import Matches, PaddedTargets
from cpvt_det.losses.terms import Matched, Normalizers, fine_grained_localization
from cpvt_det.models import BACKBONE_REGISTRY, HybridEncoder
from cpvt_det.models.distribution_decoder import DistributionDecoder
from cpvt_det.models.encoder import Encoder
from cpvt_det.models.real_time_detr import ConvNorm, NormedNeck, RepVGGBlock
from cpvt_det.position import build_position

KINDS = {"dfine": DFINE, "rtdetr": RTDETR, "dfine, resnet18d": {**DFINE, "MODEL__BACKBONE__NAME": "resnet18d"}}
POSITIONS = ("none", "sine", "sine_grid", "sine_scrambled", "peg", "sine_grid+peg", "peg_ffn", "rope", "relative")
ENCODED = [*(("dfine", position) for position in POSITIONS), ("rtdetr", "sine_grid"), ("dfine, resnet18d", "peg")]
SIZES = [(100, 192), (128, 70), (41, 150)]  # some levels of the first have padding, the coarsest has not
TARGETS = [
    Targets(torch.tensor([0, 1]), torch.tensor([[0.5, 0.5, 0.2, 0.3], [0.3, 0.4, 0.1, 0.1]], dtype=torch.float64)),
    Targets(torch.zeros(0, dtype=torch.int64), torch.zeros(0, 4, dtype=torch.float64)),
    Targets(torch.tensor([2]), torch.tensor([[0.5, 0.5, 0.9, 0.3]], dtype=torch.float64)),
]


def make(kind="dfine", position="peg", **more):
    """A float64 detector whose norms have seen something and whose heads are not zero."""
    torch.manual_seed(0)
    model = build_detector(random_config(**{**KINDS[kind], "MODEL__POSITION__NAME": position, "MODEL__DETR__DROPOUT": 0.0, **more}))
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.state_dict().items():
        if name.endswith("running_mean"):
            tensor.normal_(0, 0.2, generator=generator)
        elif name.endswith("running_var"):
            tensor.uniform_(0.5, 1.5, generator=generator)
        elif "embed" in name or "pre_bbox" in name or "lqe" in name:
            tensor.normal_(0, 0.3, generator=generator)
    return model.double()


def images_of(sizes=SIZES):
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in sizes]


def run(model, images, targets=None):
    batch = PaddedBatch.from_images(images, model.size_divisibility)
    return model(batch.images, batch.padding_mask, targets)


@pytest.mark.parametrize(("kind", "position"), ENCODED)
def test_an_image_alone_and_in_a_padded_batch_gets_the_same_answer(kind, position):
    model, images = make(kind, position).eval(), images_of()
    with torch.no_grad():
        together = run(model, images)
        for index, image in enumerate(images):
            alone = run(model, [image])
            torch.testing.assert_close(alone.logits[:, 0], together.logits[:, index], rtol=0, atol=1e-10)
            torch.testing.assert_close(alone.boxes[:, 0], together.boxes[:, index], rtol=0, atol=1e-10)
    assert together.boxes.std() > 0.01 and together.logits.std() > 0.1


@pytest.mark.parametrize("kind", KINDS)
def test_more_padding_changes_neither_losses_nor_statistics(kind):
    """In training, where norms count cells, on a canvas of twice the size with anything under the padding."""
    results = []
    for margin, filling in (((0, 0), 0.0), ((64, 96), 1e3)):
        model, images = make(kind).train(), images_of()
        batch = PaddedBatch.from_images(images, model.size_divisibility)
        pad = (0, margin[1], 0, margin[0])
        mask = torch.nn.functional.pad(batch.padding_mask, pad, value=True)
        canvas = torch.nn.functional.pad(batch.images, pad).masked_fill(mask[:, None], filling)
        torch.manual_seed(3)  # of denoising
        losses = build_criterion(random_config(**KINDS[kind]))(model(canvas, mask, TARGETS), TARGETS).losses
        sum(losses.values()).backward()
        statistics = [buffer for name, buffer in model.named_buffers() if "running" in name]
        results.append(
            [torch.stack(list(losses.values())), torch.cat(statistics), torch.cat([p.grad.flatten() for p in model.parameters()])]
        )
    for small, large in zip(*results, strict=True):
        torch.testing.assert_close(small, large, rtol=1e-9, atol=1e-9)


def test_every_weight_learns_and_every_loss_is_there():
    model = make().train()
    losses = build_criterion(random_config(**DFINE))(run(model, images_of(), TARGETS), TARGETS).losses
    own = {f"loss_{group}{name}" for group in ("", "denoising_") for name in ("class", "l1", "giou", "fgl", "ddf")}
    assert losses.keys() == own | {f"loss_proposal_{name}" for name in ("class", "l1", "giou")}
    assert all(value.isfinite() and value > 0 for value in losses.values())
    sum(losses.values()).backward()
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []


def test_a_batch_without_objects_has_losses():
    nothing = [TARGETS[1]] * 3
    losses = build_criterion(random_config(**DFINE))(run(make().train(), images_of(), nothing), nothing).losses
    assert all(value.isfinite() for value in losses.values()) and losses["loss_ddf"] == losses["loss_fgl"] == 0


@pytest.mark.parametrize("kind", ["dfine", "rtdetr"])
def test_fewer_layers_in_evaluation_give_the_answer_of_the_last_of_them(kind):
    whole, short = make(kind).eval(), make(kind, MODEL__DETECTOR__EVAL_LAYERS=1).eval()
    with torch.no_grad():
        expected, found = run(whole, images_of()), run(short, images_of())
    assert len(found.boxes) == 1 and len(expected.boxes) == 2
    assert torch.equal(found.boxes[0], expected.boxes[0]) and torch.equal(found.logits[0], expected.logits[0])
    assert len(run(short.train(), images_of(), TARGETS).proposals.boxes) == 1
    with pytest.raises(ConfigError, match="eval_layers must be from 0 .all. to the decoder's 2 layers, got 3"):
        make(kind, MODEL__DETECTOR__EVAL_LAYERS=3)


def test_boxes_have_the_sides_that_their_distributions_stand_for():
    """N = 4, scale 4, reach 0.5: values -4, -2, 0, 2, 4; a start at (0.5, 0.5) of 0.4 x 0.2 moves sides by 0.1 and 0.05."""
    decoder = DistributionDecoder(1, 16, 2, 32, 0.0, 1, 2, num_bins=4)
    assert torch.allclose(decoder.values(), torch.tensor([-4.0, -2.0, 0.0, 2.0, 4.0]))
    start, distances = torch.tensor([[[0.5, 0.5, 0.4, 0.2]]]), torch.tensor([[[1.0, 0.0, -1.0, 2.0]]])
    # left 0.5 - 0.2 - 0.1, top 0.5 - 0.1, right 0.5 + 0.2 - 0.1, bottom 0.5 + 0.1 + 0.1
    assert torch.allclose(decoder._boxes(start, distances), torch.tensor([[[0.4, 0.55, 0.4, 0.3]]]))


def test_the_loss_of_sides_is_least_at_the_objects_own():
    """A distance of 1 lies half-way between the bins 0 and 2: the loss of (1/2, 1/2) is log 2 a side, times the overlap, 1."""
    start = torch.tensor([[[0.5, 0.5, 0.4, 0.2]]], dtype=torch.float64)
    box = torch.tensor([[[0.5, 0.5, 0.6, 0.3]]], dtype=torch.float64)  # each side one unit further out
    values, scale = torch.tensor([-4.0, -2.0, 0.0, 2.0, 4.0]).double(), torch.tensor(4.0).double()
    targets = PaddedTargets(torch.zeros(1, 1, dtype=torch.int64), box, [1])
    matches = Matches(*(torch.zeros(1, dtype=torch.int64) for _ in range(4)))
    criterion, one = build_criterion(random_config(**DFINE)), torch.ones((), dtype=torch.float64)

    def loss(logits):
        made = BoxDistributions(logits, start, values, scale)
        predictions = Predictions(torch.zeros(1, 1, 1, 3).double(), box[None], distributions=made)
        return fine_grained_localization(Matched(predictions, targets, matches, criterion.classification, Normalizers(one, one)))

    best = torch.tensor([-100.0, -100.0, 0.0, 0.0, -100.0]).double().expand(1, 1, 1, 4, 5)
    torch.testing.assert_close(loss(best), 4 * torch.tensor([2.0], dtype=torch.float64).log())
    assert loss(best) < loss(torch.zeros(1, 1, 1, 4, 5).double())


@pytest.mark.parametrize(("kind", "norm"), [("dfine", "BN"), ("rtdetr", "BN"), ("dfine", "GN")])
def test_norms_and_branches_that_are_folded_change_nothing_with_padding_or_without(kind, norm):
    """To 1e-10 where norms have seen something; a group norm depends on the image and stays."""
    model, images = make(kind, MODEL__DETECTOR__NORM=norm).eval(), images_of()
    with torch.no_grad():
        expected = [run(model, batch) for batch in (images, images[:1])]
        parts = [part for part in model.modules() if isinstance(part, (ConvNorm, RepVGGBlock))]
        for part in [*parts, *parts]:  # what is folded stays as it is
            part.fold()
        found = [run(model, batch) for batch in (images, images[:1])]
    left = [part for part in model.transformer.encoder.modules() if isinstance(part, (MaskedBatchNorm2d, MaskedGroupNorm))]
    blocks = [part for part in parts if isinstance(part, RepVGGBlock)]
    assert bool(left) == (norm == "GN") and {block.conv2 is None for block in blocks} == {norm == "BN"}
    for one, other in zip(expected, found, strict=True):
        torch.testing.assert_close(other.logits, one.logits, rtol=0, atol=1e-10)
        torch.testing.assert_close(other.boxes, one.boxes, rtol=0, atol=1e-10)


def test_the_distillation_of_parts_of_a_step_sums_to_that_of_the_step():
    """Of one image and of two, of which one has no object: its queries count in the step's mean all the same."""
    criterion, model, images = build_criterion(random_config(**DFINE)), make(MODEL__QUERIES__DENOISING=0).train(), images_of()
    whole = run(model, images, TARGETS)
    normalizers = criterion.normalizers(TARGETS, whole.logits.shape[2])
    sums = []
    for part in (slice(0, 1), slice(1, 3)):
        made = replace(whole.distributions, logits=whole.distributions.logits[:, part], starts=whole.distributions.starts[part])
        predictions = Predictions(whole.logits[:, part], whole.boxes[:, part], distributions=made)
        sums.append(criterion(predictions, TARGETS[part], normalizers).losses["loss_ddf"])
    expected = criterion(whole, TARGETS).losses["loss_ddf"]
    torch.testing.assert_close(sum(sums), expected, rtol=1e-12, atol=0)
    assert criterion(predictions, [TARGETS[1]] * 2, normalizers).losses["loss_ddf"] > 0
    counted_here = criterion(whole, TARGETS, Normalizers(normalizers.boxes, normalizers.classes)).losses["loss_ddf"]
    torch.testing.assert_close(counted_here, expected, rtol=1e-12, atol=0)


def test_points_per_level_are_those_of_one_number_where_they_agree():
    torch.manual_seed(0)
    one, several = DeformableAttention(16, 2, 2, 3), DeformableAttention(16, 2, 2, (3, 3))
    several.load_state_dict(one.state_dict())
    assert one.points == several.points == (3, 3)
    uneven = DeformableAttention(16, 2, 2, (1, 3), has_projections=False)
    assert uneven.sampling_offsets.out_features == 2 * 2 * 4 and not list(uneven.value_proj.parameters())
    with pytest.raises(ValueError, match=r"point per level, got 2 levels and \(1, 2, 3\) points"):
        DeformableAttention(16, 2, 2, (1, 2, 3))


def test_scrambled_sines_give_cells_the_places_of_others_off_the_square():
    right, wrong = build_position("sine_grid", 16), build_position("sine_scrambled", 16)
    for shape, own in (((5, 5), 25), ((4, 6), 4)):  # of 4 x 6 the first four cells alone keep their own
        mask = torch.zeros(1, *shape, dtype=torch.bool)
        expected, found = right([torch.zeros(1, 16, *shape)], [mask])[0], wrong([torch.zeros(1, 16, *shape)], [mask])[0]
        assert ((expected - found).abs().amax(1) < 1e-6).sum() == own
        assert torch.equal(expected[0, 0, :, 0], torch.arange(shape[0]).sin())  # the row, in the first half
        assert torch.equal(expected[0, 8, 0], torch.arange(shape[1]).sin())


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"MODEL__DETECTOR__POINTS": (2, 3, 2)},
            r"POINTS is \[2, 3, 2\], but the backbone has 2 feature maps; give a single number, or one per map",
        ),
        (
            {"MODEL__DETECTOR__LOOK_FORWARD_TWICE": True},
            "LOOK_FORWARD_TWICE needs box refinement, which BINS replaces; with BINS, set it to False",
        ),
        ({"MODEL__DETECTOR__BINS": 7}, "an even number of bins, at least 4, got 7"),
        ({"MODEL__DETECTOR__BIN_SCALE": 0.0}, "the scale of distributions must be above 0, got 0.0"),
        ({"MODEL__DETECTOR__DEPTH": 0}, "needs at least one level, one block and one inner channel, got 2 levels, depth 0"),
        ({"MODEL__DETECTOR__EXPANSION": 0.01}, "inner channel, got 2 levels, depth 1 and expansion 0.01 of 16 channels"),
        ({"MODEL__BACKBONE__STAGES": (2, 4)}, r"twice the stride of the one before, got \[4, 16\]; set MODEL.BACKBONE.STAGES"),
        ({"MODEL__QUERIES__REFINED_POSITIONS": False}, "position_sines=False requires refined_positions=True"),
        ({"MODEL__CRITERION__CLASSIFICATION__NAME": "softmax"}, "ranks proposals by sigmoid scores"),
        ({"MODEL__DETECTOR__FUSION": "pan"}, "unknown fusion of the hybrid encoder 'pan'"),
        ({"MODEL__DETECTOR__TWO_STAGE": True}, "'two_stage'"),
        (
            {"INPUT__MIN_SIZE_TRAIN": (15, 40)},
            "images of 15 pixels, which is smaller than a cell of the coarsest feature map .16 pixels.: .* or change "
            "MODEL.BACKBONE.STAGES",
        ),
        (
            {"MODEL__POSITION__NAME": "sine_scrambled+peg"},
            "use it alone and in CPVTRealTimeDetr, or use sine_grid, which is correct",
        ),
        ({"MODEL__POSITION__NAME": "sine_grid", "MODEL__DETR__HIDDEN_DIM": 18}, "channels in multiples of 4, got 18"),
    ],
)
def test_what_cannot_be_built_is_refused_by_key(more, message):
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        build_detector(random_config(**{**DFINE, **more}))


def test_scrambled_sines_are_for_hybrid_encoders_alone():
    with pytest.raises(
        ConfigError,
        match="sine_scrambled reproduces, for comparison, what other code computes .* use it alone and in CPVTRealTimeDetr",
    ):
        build_detector(random_config(MODEL__POSITION__NAME="sine_scrambled"))
    vit = {"MODEL__BACKBONE__NAME": "deit_tiny", "MODEL__BACKBONE__POSITION__NAME": "sine_scrambled+peg"}
    with pytest.raises(ConfigError, match=r"MODEL\.BACKBONE\.POSITION\.NAME: sine_scrambled is only for hybrid encoders"):
        build_detector(random_config(**vit))


def test_parts_refuse_what_does_not_fit():
    with pytest.raises(ValueError, match="the temperature of a sine encoding must be above 0, got 0"):
        build_position("sine_grid", 16, temperature=0)
    with pytest.raises(ValueError, match=r"needs maps that each have twice the stride of the one before, got \[8, 32\]"):
        NormedNeck([8, 8], [8, 32], 16)
    with pytest.raises(UnknownNameError, match="norm 'LN'"):
        HybridEncoder(1, 16, 16, Encoder(0, 16, 2, 32, 0.0, False), norm="LN")
    backbone = BACKBONE_REGISTRY.build("resnet18d", {}, {"norm": "BN", "stages": (3, 4), "freeze_at": 0, "width": 8})
    assert (backbone.strides, backbone.channels, backbone.name) == ([8, 16], [16, 32], "resnet18d")
