# SPDX-License-Identifier: Apache-2.0
"""Properties of padding and batch, for any sizes: what an image is batched with, and what lies beside it, does not matter.

Single cases of it are in the tests of each part; here hypothesis draws sizes, batches and contents.
"""

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from test_backbone import narrow_resnet
from test_solver import tiny_cfg
from tiny import DETECTORS

from cpvt_det import builders
from cpvt_det.common.boxes import cxcywh_to_xyxy, generalized_iou
from cpvt_det.common.structures import PaddedBatch, Predictions, Targets, level_padding_mask
from cpvt_det.losses.matcher import PaddedTargets
from cpvt_det.models import ResNetBackbone
from cpvt_det.models.necks import ProjectionNeck

bounded = settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    phases=[Phase.generate],  # a failing example of one drawing says enough; making it smaller takes minutes
    suppress_health_check=[HealthCheck.too_slow],
)
sizes = st.lists(st.tuples(st.integers(1, 70), st.integers(1, 70)), min_size=1, max_size=4)
fillings = st.sampled_from([0.0, 1e30, float("inf"), float("nan")])
margins = st.tuples(st.integers(0, 2), st.integers(0, 2))
POSITIONS = ("peg", "sine+peg", "learned")
NORMS = ("BN", "SyncBN", "GN", "FrozenBN")


def make(detector, dtype=torch.float64, **more):
    torch.manual_seed(0)
    cfg = tiny_cfg(MODEL__DETR__DROPOUT=0.0, **DETECTORS[detector], **more)
    model = builders.build_detector(cfg).to(dtype)
    generator = torch.Generator().manual_seed(1)
    for name, buffer in model.named_buffers():  # norms that have seen something
        if name.endswith("running_mean"):
            buffer.normal_(0, 0.2, generator=generator)
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 1.5, generator=generator)
    for name, parameter in model.named_parameters():
        if name.endswith("sampling_offsets.bias"):  # away from whole cells, where an interpolation has two gradients
            parameter.data += torch.randn(parameter.shape, generator=generator).to(dtype) * 0.3
    return model


def batch_of(model, image_sizes, margin=(0, 0), filling=0.0):
    """Drawn images on a canvas ``margin`` strides larger than need be, with ``filling`` under the padding."""
    generator = torch.Generator().manual_seed(2)
    images = [torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in image_sizes]
    stride = model.size_divisibility
    batch = PaddedBatch.from_images(images, stride)
    right, bottom = (side * stride for side in margin)
    canvas = torch.nn.functional.pad(batch.images, (0, right, 0, bottom))
    mask = torch.nn.functional.pad(batch.padding_mask, (0, right, 0, bottom), value=True)
    return canvas.masked_fill(mask[:, None], filling).to(next(model.parameters()).dtype), mask


def alone(model, image_sizes, number):
    canvas, mask = batch_of(model, image_sizes)
    stride = model.size_divisibility
    height, width = (-(-side // stride) * stride for side in image_sizes[number])
    return canvas[number : number + 1, :, :height, :width], mask[number : number + 1, :height, :width]


@torch.no_grad()
def difference(one: Predictions, two: Predictions):
    return max((one.logits - two.logits).abs().max().item(), (one.boxes - two.boxes).abs().max().item())


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-10), (torch.float32, 1e-4)], ids=["float64", "float32"])
@pytest.mark.parametrize("detector", DETECTORS)
def test_a_detector_gives_an_image_the_same_answer_in_any_batch(detector, dtype, bound):
    """The whole detector, ResNet with MASK_PADDING included."""
    models = [make(detector, dtype, MODEL__POSITION__NAME=position).eval() for position in POSITIONS]

    @bounded
    @given(sizes, margins, fillings, st.sampled_from(models))
    def check(image_sizes, margin, filling, model):
        with torch.no_grad():
            together = model(*batch_of(model, image_sizes, margin, filling))
            for number in range(len(image_sizes)):
                single = model(*alone(model, image_sizes, number))
                mine = Predictions(together.logits[:, number : number + 1], together.boxes[:, number : number + 1])
                assert difference(single, mine) <= bound

    check()


class Maps(torch.nn.Module):
    """A backbone that hands on maps of one stride, whatever lies under the padding."""

    strides, channels, size_divisibility, stages, spoilt = [8], [24], 8, [3], None

    def forward(self, images, padding_mask):
        return self.spoilt or [images.repeat(1, 8, 1, 1)[:, :, ::8, ::8]]


@pytest.mark.parametrize("position", POSITIONS)
def test_the_transformer_gives_an_image_the_same_answer_in_any_batch_to_the_last_digits(position):
    model = make("detr", MODEL__POSITION__NAME=position)
    model.backbone = Maps()
    model.input_proj = ProjectionNeck([24], [8], 16).double()
    model.eval()

    @bounded
    @given(sizes, margins, fillings)
    def check(image_sizes, margin, filling):
        canvas, mask = batch_of(model, image_sizes, margin)
        with torch.no_grad():
            features = model.backbone(canvas, mask)[0]
            spoilt = features.masked_fill(level_padding_mask(mask, 8)[:, None], filling)
            model.backbone.spoilt = [spoilt]
            together = model(canvas, mask)
            model.backbone.spoilt = None
            for number in range(len(image_sizes)):
                single = model(*alone(model, image_sizes, number))
                mine = Predictions(together.logits[:, number : number + 1], together.boxes[:, number : number + 1])
                assert difference(single, mine) <= 1e-12

    check()


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("detector", DETECTORS)
def test_training_does_not_see_amount_or_content_of_padding(detector, norm):
    """Outputs, gradients and all running statistics, those of the ResNet's norms and of PEG's, depend on the images alone."""
    peg = "GN" if norm == "GN" else "SyncBN" if norm == "SyncBN" else "BN"

    def train(image_sizes, margin, filling):
        model = make(detector, MODEL__BACKBONE__NORM=norm, MODEL__POSITION__NORM=peg).train()
        predictions = model(*batch_of(model, image_sizes, margin, filling))
        (predictions.logits.square().mean() + predictions.boxes.square().mean()).backward()
        gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        statistics = {name: buffer for name, buffer in model.named_buffers() if "running" in name}
        return predictions, gradients, statistics

    larger = st.lists(
        st.tuples(st.integers(17, 70), st.integers(17, 70)), min_size=1, max_size=4
    )  # no two tokens that are the same

    @settings(bounded, max_examples=3)
    @given(larger, margins, fillings)
    def check(image_sizes, margin, filling):
        plain, padded = train(image_sizes, (0, 0), 0.0), train(image_sizes, margin, filling)
        assert difference(plain[0], padded[0]) <= 1e-10
        for one, two in zip(plain[1:], padded[1:], strict=True):
            assert one.keys() == two.keys()
            for name in one:
                torch.testing.assert_close(
                    two[name], one[name], rtol=1e-7, atol=1e-10, msg=lambda text, name=name: f"{name}: {text}"
                )
                assert one[name].isfinite().all()

    check()


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_masked_batch_norm_trains_as_torchvision_does_where_nothing_is_padded(name):
    """The oracle: torchvision's own network and ``nn.BatchNorm2d``. The mask has a padded margin that must not be seen."""
    torch.manual_seed(0)
    theirs = narrow_resnet(name).double().train()
    ours = ResNetBackbone(name, norm="BN", stages=[5], freeze_at=0, width=16).double().train()
    ours.body.load_state_dict(theirs.state_dict(), strict=False)
    images = torch.randn(3, 3, 64, 96, dtype=torch.float64)
    x = theirs.maxpool(theirs.relu(theirs.bn1(theirs.conv1(images))))
    expected = theirs.layer4(theirs.layer3(theirs.layer2(theirs.layer1(x))))
    canvas = torch.nn.functional.pad(images, (0, 32, 0, 64))
    mask = torch.nn.functional.pad(torch.zeros(3, 64, 96, dtype=torch.bool), (0, 32, 0, 64), value=True)
    (found,) = ours(canvas, mask)
    assert (found[:, :, :2, :3] - expected).abs().max() < 1e-10
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (found[:, :, :2, :3] * weights).sum().backward()
    for key, parameter in ours.body.named_parameters():
        torch.testing.assert_close(parameter.grad, theirs.get_parameter(key).grad, rtol=1e-6, atol=1e-8)
    for key, buffer in ours.body.named_buffers():
        if "running" in key:
            torch.testing.assert_close(buffer, theirs.get_buffer(key), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("detector", DETECTORS)
@pytest.mark.parametrize("norm", ["BN", "SyncBN", "GN"])
def test_images_of_one_pixel_train_to_finite_weights(detector, norm):
    model = make(detector, MODEL__BACKBONE__NORM=norm, MODEL__POSITION__NORM=norm).train()
    images, mask = batch_of(model, [(1, 1)])
    model(images, mask).logits.sum().backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters() if parameter.grad is not None)
    assert all(tensor.isfinite().all() for tensor in model.state_dict().values())


# Half precision


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("classification", ["softmax", "focal"])
def test_matching_and_losses_are_in_float32_under_autocast(dtype, classification):
    """Bit-equal to those without, with boxes of 4 pixels of 1333, whose GIoU bfloat16 cannot tell."""
    criterion = builders.build_criterion(tiny_cfg(MODEL__NUM_CLASSES=3, MODEL__CRITERION__CLASSIFICATION__NAME=classification))
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 6, criterion.classification.num_logits, requires_grad=True)
    boxes = torch.cat((torch.rand(2, 3, 6, 2) * 0.8 + 0.1, torch.full((2, 3, 6, 2), 4 / 1333)), -1).requires_grad_()
    targets = [Targets(torch.randint(3, (count,)), boxes[0, 0, :count].detach() + 1 / 1333) for count in (0, 1, 9)]
    targets = [Targets(t.labels[: len(t.boxes_cxcywh)], t.boxes_cxcywh) for t in targets]
    predictions, results = Predictions(logits, boxes), []
    for enabled in (False, True):
        logits.grad = boxes.grad = None
        with torch.autocast("cpu", dtype, enabled=enabled):
            cost = criterion.matcher.cost(predictions, PaddedTargets.from_targets(targets, torch.float32))
            losses = criterion(predictions, targets).losses
            giou = generalized_iou(cxcywh_to_xyxy(boxes[0, 0]), cxcywh_to_xyxy(boxes[1, 1]))
        sum(losses.values()).backward()
        results.append([cost, giou, *losses.values(), logits.grad, boxes.grad])
    for plain, under_autocast in zip(*results, strict=True):
        assert under_autocast.dtype == torch.float32
        assert torch.equal(plain, under_autocast)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("detector", DETECTORS)
def test_heads_are_in_float32_under_autocast(detector, dtype):
    """Every product of a head, those of proposals and of reference points included, by the dtype of what goes in and out."""
    model, seen = make(detector, torch.float32), []
    for name, module in model.named_modules():
        if any(part in name for part in ("class_embed", "bbox_embed", "reference_points")) and isinstance(module, torch.nn.Linear):
            module.register_forward_hook(lambda module, inputs, out, name=name: seen.append((name, inputs[0].dtype, out.dtype)))
    with torch.autocast("cpu", dtype):
        predictions = model(*batch_of(model, [(40, 60), (33, 50)]))
    assert len(seen) >= 4
    assert {dtypes for _, *dtypes in map(tuple, seen) for dtypes in dtypes} == {torch.float32}
    assert predictions.logits.dtype == predictions.boxes.dtype == torch.float32
