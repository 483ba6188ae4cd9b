# SPDX-License-Identifier: Apache-2.0
"""DETR: the same answer for an image whatever it is batched with, under every encoding; official names; its options."""

import functools
import itertools

import pytest
import tiny
import torch
from torch import nn

from cpvt_det.builders import DETECTOR_REGISTRY, build_detector
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.structures import PaddedBatch
from cpvt_det.config import get_cfg, merge_overrides
from cpvt_det.models import ResNetBackbone
from cpvt_det.models.detector import Memory
from cpvt_det.models.detr import DecoderLayer
from cpvt_det.models.encoder import EncoderLayer

DETECTORS = [name for name, _ in DETECTOR_REGISTRY]
ENCODED = [({"detr": "CPVTDetr", "deformable": "CPVTDeformableDetr"}[kind], position) for kind, position in tiny.ENCODED]
# On a canvas of 96 x 96. Halves that are even let pooling reach from the first padded cell back into the image; some are odd.
SIZES = [(68, 45), (33, 76), (96, 40)]
SMALL = {
    "MODEL.NUM_CLASSES": 3,
    "MODEL.BACKBONE.NAME": "resnet18",
    "MODEL.BACKBONE.STAGES": (4,),
    "MODEL.DETR.HIDDEN_DIM": 32,
    "MODEL.DETR.NHEADS": 4,
    "MODEL.DETR.DIM_FEEDFORWARD": 48,
    "MODEL.DETR.ENC_LAYERS": 2,
    "MODEL.DETR.DEC_LAYERS": 3,
    "MODEL.DETR.NUM_OBJECT_QUERIES": 6,
    "MODEL.DETR.DROPOUT": 0.5,  # in evaluation it has no say
}


def small_cfg(**overrides):
    """A config of a small detector; keys with ``__`` for the dots, below MODEL."""
    cfg = get_cfg()
    pairs = {**SMALL, **{f"MODEL.{key.replace('__', '.')}": value for key, value in overrides.items()}}
    merge_overrides(cfg, [str(word) for pair in pairs.items() for word in pair])
    return cfg


@functools.cache
def build_once(**overrides):
    """As :func:`build`, in evaluation, made once for the tests that do not change it."""
    return build(**overrides).eval().requires_grad_(False)


def build(seed=0, **overrides):
    """A small float64 detector, over a narrow ResNet unless told otherwise, with norms unlike their initial ones."""
    torch.manual_seed(seed)
    if overrides.get("BACKBONE__NAME", "resnet").startswith("resnet"):
        overrides = {"BACKBONE__WIDTH": 16, **overrides}
    return unlike_initial(build_detector(small_cfg(**overrides)).double())


def unlike_initial(module):
    for name, value in module.state_dict().items():
        if "running_mean" in name or name.endswith("bias"):
            nn.init.uniform_(value, -0.3, 0.3)
        elif "running_var" in name:
            nn.init.uniform_(value, 0.5, 1.5)
        elif name.endswith("weight") and not value.any():
            nn.init.uniform_(value, -0.1, 0.1)
    return module


def draw_images(sizes=SIZES, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *size, generator=generator, dtype=dtype) for size in sizes]


def detect(detector, images, divisor=32):
    batch = PaddedBatch.from_images(images, divisor)
    return detector(batch.images, batch.padding_mask)


def largest_difference(first, second):
    return max(float((a - b).detach().abs().max()) for a, b in zip(first, second, strict=True))


@torch.no_grad()
def alone_and_together(detector, images):
    """The largest difference of logits and boxes between each image alone and all of them in one batch."""
    together = detect(detector, images)
    differences = []
    for index, image in enumerate(images):
        for divisor in (32, 1):  # on a canvas of its own, and on none
            alone = detect(detector, [image], divisor)
            pairs = ((alone.logits, together.logits), (alone.boxes, together.boxes))
            differences += [float((a[:, 0] - b[:, index]).abs().max()) for a, b in pairs]
    return max(differences)


# Every detector with every encoding


@pytest.mark.parametrize(("detector", "position"), ENCODED)
def test_predictions_have_their_shapes_and_every_parameter_a_gradient(detector, position):
    model = build(META_ARCHITECTURE=detector, POSITION__NAME=position, BACKBONE__FREEZE_AT=0).train()
    predictions = detect(model, draw_images())
    assert predictions.logits.shape == (3, 3, 6, 4)
    assert predictions.boxes.shape == (3, 3, 6, 4)
    assert predictions.proposals is None
    assert ((predictions.boxes > 0) & (predictions.boxes < 1)).all()
    (predictions.logits.square().sum() + predictions.boxes.square().sum()).backward()
    unused = [name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter.grad is None]
    assert unused == []


@pytest.mark.parametrize(("detector", "position"), ENCODED)
def test_image_gets_the_same_answer_whatever_it_is_batched_with(detector, position):
    model = build_once(META_ARCHITECTURE=detector, POSITION__NAME=position)
    assert alone_and_together(model, draw_images()) <= 1e-10


@pytest.mark.parametrize(("detector", "position"), ENCODED)
def test_evaluation_is_deterministic(detector, position):
    model = build_once(META_ARCHITECTURE=detector, POSITION__NAME=position)
    assert any(isinstance(module, nn.Dropout) for module in model.modules())
    first, second = (detect(model, draw_images()) for _ in range(2))
    assert torch.equal(first.logits, second.logits)
    assert torch.equal(first.boxes, second.boxes)


@pytest.mark.parametrize(("detector", "position"), ENCODED)
def test_images_of_any_size_are_detected_in(detector, position):
    model = build_once(META_ARCHITECTURE=detector, POSITION__NAME=position)
    for size in ((1, 1), (33, 65), (1, 140), (70, 2)):
        for divisor in (32, 1):  # a canvas of multiples of the stride, and one as large as the image
            predictions = detect(model, [torch.ones(3, *size, dtype=torch.float64)], divisor)
            assert torch.isfinite(predictions.logits).all()
            assert torch.isfinite(predictions.boxes).all()


# Padding


@pytest.mark.parametrize("norm", ["FrozenBN", "BN", "SyncBN", "GN"])
def test_every_backbone_norm_keeps_images_apart(norm):
    model = build(BACKBONE__NORM=norm).eval()
    assert alone_and_together(model, draw_images()) <= 1e-10


@pytest.mark.parametrize(("name", "dilation"), [("resnet50", False), ("resnet50", True)])
def test_bottlenecks_and_dilation_keep_images_apart(name, dilation):
    model = build(BACKBONE__NAME=name, BACKBONE__DC5=dilation, BACKBONE__STAGES=(5,)).eval()
    assert alone_and_together(model, draw_images()[:2]) <= 1e-10


def test_features_do_not_depend_on_padding_whatever_the_size():
    """Sides of 32 to 63 pixels have every remainder by 2, 4, 8, 16 and 32; against the image on no canvas at all."""
    torch.manual_seed(0)
    backbone = unlike_initial(ResNetBackbone("resnet18", stages=(2, 3, 4, 5))).eval().requires_grad_(False)
    for side in range(32, 64):
        image = torch.randn(3, side, 95 - side)
        maps_alone = backbone(image[None], torch.zeros(1, *image.shape[1:], dtype=torch.bool))
        padded = PaddedBatch.from_images([image], 65)
        for alone, common in zip(maps_alone, backbone(padded.images, padded.padding_mask), strict=True):
            valid = common[:, :, : alone.shape[2], : alone.shape[3]]
            assert (valid - alone).abs().max() < 1e-5 * alone.abs().max(), side
            assert common.count_nonzero() == valid.count_nonzero()


@pytest.mark.parametrize(("name", "dilation"), [("resnet18", False), ("resnet50", False), ("resnet50", True)])
def test_features_of_an_image_do_not_depend_on_its_padding(name, dilation):
    """At every stage; and they do with MASK_PADDING off, the official arithmetic."""
    images = draw_images()[:2]
    differences = {}
    for mask_padding in (True, False):
        torch.manual_seed(0)
        backbone = ResNetBackbone(name, stages=(2, 3, 4, 5), dc5=dilation, mask_padding=mask_padding, width=16)
        backbone = unlike_initial(backbone.double()).eval().requires_grad_(False)
        together = PaddedBatch.from_images(images)
        maps_together = backbone(together.images, together.padding_mask)
        relative = []
        for index, image in enumerate(images):
            alone = PaddedBatch.from_images([image])
            for own, common, stride in zip(
                backbone(alone.images, alone.padding_mask), maps_together, backbone.strides, strict=True
            ):
                height, width = (-(-side // stride) for side in image.shape[1:])
                own, common = own[0, :, :height, :width], common[index, :, :height, :width]
                relative.append(float((own - common).abs().max() / own.abs().max()))
        differences[mask_padding] = relative
    assert max(differences[True]) <= 1e-12
    assert max(differences[False]) > 0.1


def test_without_mask_padding_answers_depend_on_the_batch():
    """The negative control: the same model, weights and images with the key off."""
    model = build(BACKBONE__MASK_PADDING=False).eval()
    assert alone_and_together(model, draw_images()) > 1e-4


@pytest.mark.parametrize("mask_padding", [True, False])
@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("content", [float("nan"), float("inf"), 1e30])
def test_content_under_the_padding_does_not_matter(content, training, mask_padding):
    batch = PaddedBatch.from_images(draw_images())
    spoiled = batch.images.masked_fill(batch.padding_mask[:, None], content)
    results = []
    for images in (batch.images, spoiled):
        model = build(BACKBONE__MASK_PADDING=mask_padding, DETR__DROPOUT=0.0).train(training)
        predictions = model(images, batch.padding_mask)
        predictions.boxes.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([predictions.logits, predictions.boxes, *gradients])
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


def test_backbone_from_elsewhere_may_leave_anything_under_the_padding():
    """NaN of its own making too: the detector hands on the valid cells of its map alone."""
    model = build(POSITION__NAME="sine+peg").eval()
    batch = PaddedBatch.from_images(draw_images())
    clean = model(batch.images, batch.padding_mask)
    padded = batch.padding_mask[:, None, ::16, ::16]
    model.backbone.register_forward_hook(lambda _, args, maps: [level.masked_fill(padded, float("nan")) for level in maps])
    dirty = model(batch.images, batch.padding_mask)
    assert largest_difference((clean.logits, clean.boxes), (dirty.logits, dirty.boxes)) < 1e-12


def test_padding_of_the_batch_does_not_matter_in_training():
    """Frozen backbone norms, masked PEG statistics: two canvases give one loss gradient too."""
    results = []
    for divisor in (32, 160):
        batch = PaddedBatch.from_images(draw_images(), divisor)
        model = build(DETR__DROPOUT=0.0).train()
        predictions = model(batch.images, batch.padding_mask)
        (predictions.boxes.sum() + predictions.logits.square().sum()).backward()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        results.append([predictions.logits, predictions.boxes, *model.position.buffers(), *gradients])
    assert largest_difference(*results) <= 1e-10


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.float32])
def test_mask_that_is_not_bool_is_refused(dtype):
    model = build()
    with pytest.raises(TypeError, match="must be bool"):
        model(torch.zeros(1, 3, 32, 32, dtype=torch.float64), torch.zeros(1, 32, 32).to(dtype))


def test_mask_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"need a padding_mask \(B, H, W\), got \(1, 1, 1\)"):
        build()(torch.zeros(1, 3, 32, 32, dtype=torch.float64), torch.zeros(1, 1, 1, dtype=torch.bool))


# Encoder and decoder


@pytest.mark.parametrize("pre_norm", [False, True])
def test_encoder_layer_is_torch_s(pre_norm):
    torch.manual_seed(0)
    layer = EncoderLayer(16, 4, 24, 0.1, pre_norm).double().eval()
    reference = nn.TransformerEncoderLayer(16, 4, 24, 0.1, batch_first=True, norm_first=pre_norm).double()
    reference.load_state_dict(unlike_initial(layer).state_dict())
    tokens, mask = torch.randn(2, 7, 16).double(), torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = True
    for parameter in reference.parameters():
        parameter.requires_grad_()  # off torch's fast path, which zeroes padded tokens
    expected = reference.eval()(tokens, src_key_padding_mask=mask)
    assert (layer(tokens, None, mask) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("pre_norm", [False, True])
def test_decoder_layer_is_torch_s(pre_norm):
    torch.manual_seed(0)
    layer = DecoderLayer(16, 4, 24, 0.1, pre_norm).double().eval()
    reference = nn.TransformerDecoderLayer(16, 4, 24, 0.1, batch_first=True, norm_first=pre_norm).double().eval()
    reference.load_state_dict(unlike_initial(layer).state_dict())
    queries, memory = torch.randn(2, 5, 16).double(), torch.randn(2, 7, 16).double()
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = True
    expected = reference(queries, memory, memory_key_padding_mask=mask)
    assert (layer(queries, torch.zeros_like(queries), Memory(memory, memory), mask) - expected).abs().max() < 1e-12


@pytest.mark.parametrize("pre_norm", [False, True])
def test_decoder_layer_adds_query_positions_to_both_attentions_and_key_positions_to_keys_alone(pre_norm):
    """Against torch's attention, norms and products put together as the paper's figure 10 has them."""
    torch.manual_seed(0)
    layer = unlike_initial(DecoderLayer(16, 4, 24, 0.0, pre_norm).double())
    attentions = []
    for own in (layer.self_attn, layer.multihead_attn):
        attentions.append(nn.MultiheadAttention(16, 4, batch_first=True).double())
        attentions[-1].load_state_dict(own.state_dict())
    queries, query_positions = torch.randn(2, 2, 5, 16).double()
    memory, key_positions = torch.randn(2, 2, 7, 16).double()
    mask = torch.zeros(2, 7, dtype=torch.bool)
    mask[1, 4:] = True

    def attend_queries(x):
        return attentions[0](x + query_positions, x + query_positions, x, need_weights=False)[0]

    def attend_memory(x):
        return attentions[1](x + query_positions, memory + key_positions, memory, key_padding_mask=mask, need_weights=False)[0]

    def feed_forward(x):
        return layer.linear2(layer.linear1(x).clamp(min=0))

    expected = queries
    for part, norm in zip((attend_queries, attend_memory, feed_forward), (layer.norm1, layer.norm2, layer.norm3), strict=True):
        expected = expected + part(norm(expected)) if pre_norm else norm(expected + part(expected))
    found = layer(queries, query_positions, Memory(memory, memory + key_positions), mask)
    assert (found - expected).abs().max() < 1e-12


def test_positions_go_to_queries_and_keys_and_not_to_values():
    """Attention with a single key returns its value whatever the positions are."""
    torch.manual_seed(0)
    layer = EncoderLayer(16, 4, 24, 0.0, False).double()
    tokens, positions = torch.randn(1, 4, 16).double(), torch.randn(1, 4, 16).double()
    one_key = torch.tensor([[False, True, True, True]])
    assert torch.equal(layer(tokens, positions, one_key), layer(tokens, None, one_key))
    every_key = torch.zeros(1, 4, dtype=torch.bool)
    assert not torch.allclose(layer(tokens, positions, every_key), layer(tokens, None, every_key))


def test_pre_norm_has_a_last_norm_in_the_encoder_and_other_answers():
    post, pre = build(), build(DETECTOR__PRE_NORM=True)
    extra = set(pre.state_dict()) - set(post.state_dict())
    assert extra == {"transformer.encoder.norm.weight", "transformer.encoder.norm.bias"}
    assert set(post.state_dict()) < set(pre.state_dict())
    pre.load_state_dict(post.state_dict(), strict=False)
    images = draw_images()
    assert not torch.allclose(detect(post.eval(), images).logits, detect(pre.eval(), images).logits)


def test_tokens_and_their_positions_run_row_by_row():
    """Token r * W + c of the encoder is the feature and the sine of row r and column c, on a 6 x 4 map."""
    model = build(POSITION__NAME="sine").eval()
    seen = []
    model.transformer.encoder.layers[0].register_forward_pre_hook(lambda _, args: seen.append(args))
    features = []
    model.input_proj.register_forward_hook(lambda _, args, output: features.append(output))
    detect(model, draw_images([(96, 64)]))
    ((tokens, positions, *_),) = seen
    ((feature,), _) = features[0]
    assert feature.shape[-2:] == (6, 4)
    valid = torch.ones(1, 6, 4, dtype=torch.bool)
    (sine,) = model.position([feature], [~valid])
    for row in range(6):
        for column in range(4):
            assert torch.equal(tokens[0, row * 4 + column], feature[0, :, row, column])
            assert torch.equal(positions[0, row * 4 + column], sine[0, :, row, column])


def test_decoder_position_options_differ():
    """sine, the encoder's own and none, from the same weights."""
    images = draw_images()
    answers = {}
    for option in ("sine", "same", "none"):
        model = build(POSITION__NAME="learned", DETECTOR__DECODER_POSITION=option).eval()
        answers[option] = detect(model, images).logits
    for first, second in itertools.combinations(answers.values(), 2):
        assert not torch.allclose(first, second, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [("sine", "sine", "same"), ("sine+peg", "sine", "same"), ("peg", "same", "none"), ("none", "same", "none")],
)
def test_decoder_position_options_agree_where_they_mean_the_same(name, first, second):
    images = draw_images()
    answers = [detect(build(POSITION__NAME=name, DETECTOR__DECODER_POSITION=option).eval(), images) for option in (first, second)]
    assert torch.equal(answers[0].logits, answers[1].logits)


def test_decoder_position_is_sine_by_default_under_peg():
    images = draw_images()
    default, sine, none = (
        detect(build(POSITION__NAME="peg", **options).eval(), images).logits
        for options in ({}, {"DETECTOR__DECODER_POSITION": "sine"}, {"DETECTOR__DECODER_POSITION": "none"})
    )
    assert torch.equal(default, sine)
    assert not torch.allclose(default, none, atol=1e-6)


def test_unknown_decoder_position_lists_the_known():
    with pytest.raises(
        UnknownNameError, match=r"MODEL.DETECTOR.DECODER_POSITION 'sines' \(did you mean 'sine'\?\); known: none, same, sine"
    ):
        build_detector(small_cfg(DETECTOR__DECODER_POSITION="sines"))


def test_zero_init_peg_beside_sine_is_the_sine_model_at_step_zero():
    """Bit for bit, in training and evaluation, after loading the sine model's weights into it."""
    sine = build(POSITION__NAME="sine", DETR__DROPOUT=0.0)
    with_peg = build(seed=9, POSITION__NAME="sine+peg", POSITION__PEG__ZERO_INIT=True, DETR__DROPOUT=0.0)
    missing, unexpected = with_peg.load_state_dict(sine.state_dict(), strict=False)
    assert unexpected == []
    assert missing
    assert all(name.startswith("position.pegs.") for name in missing)
    for training in (True, False):
        first, second = (detect(model.train(training), draw_images()) for model in (sine, with_peg))
        assert torch.equal(first.logits, second.logits)
        assert torch.equal(first.boxes, second.boxes)


@pytest.mark.parametrize(("position", "fused"), [("none", 2), ("peg", 2), ("sine", 0), ("learned", 0), ("sine+peg", 0)])
def test_encoder_without_additive_encoding_spends_one_product_a_layer(position, fused, monkeypatch):
    """PEG and none share one input between queries, keys and values: a weight of (3 C, C) in each of the two layers."""
    model = build(POSITION__NAME=position).eval()
    linear, shapes = nn.functional.linear, []
    monkeypatch.setattr(nn.functional, "linear", lambda x, weight, *rest: shapes.append(weight.shape) or linear(x, weight, *rest))
    detect(model, draw_images())
    assert shapes.count((3 * 32, 32)) == fused
    assert shapes.count((2 * 32, 32)) >= 2 - fused


def test_every_decoder_layer_answers_through_one_norm_and_one_pair_of_heads():
    """Cutting the decoder after n layers gives the n-th answer as the last."""
    whole = build_once()
    images = draw_images()
    predictions = detect(whole, images)
    for layers in (1, 2):
        cut = build(DETR__DEC_LAYERS=layers).eval()
        assert set(cut.state_dict()) < set(whole.state_dict())
        cut.load_state_dict({name: whole.state_dict()[name] for name in cut.state_dict()})
        answer = detect(cut, images)
        assert (answer.logits[-1] - predictions.logits[layers - 1]).abs().max() < 1e-12
        assert (answer.boxes[-1] - predictions.boxes[layers - 1]).abs().max() < 1e-12


def test_encoder_may_have_no_layer_and_the_decoder_may_not():
    model = build(DETR__ENC_LAYERS=0, POSITION__NAME="sine").eval()
    assert torch.isfinite(detect(model, draw_images()).logits).all()
    with pytest.raises(ConfigError, match="a decoder needs at least one layer, got 0"):
        build_detector(small_cfg(DETR__DEC_LAYERS=0))


# Names, dtypes, preprocessing


OFFICIAL_NAMES = {  # of facebookresearch/detr, with their shapes for C = 32, F = 48, Q = 6, K = 3
    "transformer.encoder.layers.1.self_attn.in_proj_weight": (96, 32),
    "transformer.encoder.layers.0.self_attn.in_proj_bias": (96,),
    "transformer.encoder.layers.0.self_attn.out_proj.weight": (32, 32),
    "transformer.encoder.layers.0.linear1.weight": (48, 32),
    "transformer.encoder.layers.0.norm2.bias": (32,),
    "transformer.decoder.layers.2.multihead_attn.in_proj_weight": (96, 32),
    "transformer.decoder.layers.2.self_attn.out_proj.bias": (32,),
    "transformer.decoder.layers.0.norm3.weight": (32,),
    "transformer.decoder.norm.weight": (32,),
    "class_embed.weight": (4, 32),
    "class_embed.bias": (4,),
    "bbox_embed.layers.0.weight": (32, 32),
    "bbox_embed.layers.2.weight": (4, 32),
    "query_embed.weight": (6, 32),
    "input_proj.weight": (32, 256, 1, 1),
}


def test_official_names_and_shapes_are_kept():
    state = build(POSITION__NAME="sine", BACKBONE__WIDTH=64).state_dict()
    for name, shape in OFFICIAL_NAMES.items():
        assert tuple(state[name].shape) == shape, name
    prefixes = {name.split(".")[0] for name in state}
    assert prefixes == {"backbone", "transformer", "input_proj", "query_embed", "class_embed", "bbox_embed"}


def test_peg_adds_nine_weights_a_channel_and_its_norm():
    sine, peg = (build(POSITION__NAME=name) for name in ("sine", "peg"))
    extra = {name: parameter.numel() for name, parameter in peg.named_parameters() if name not in dict(sine.named_parameters())}
    assert extra == {
        "position.pegs.0.0.conv.weight": 9 * 32,
        "position.pegs.0.0.norm.weight": 32,
        "position.pegs.0.0.norm.bias": 32,
    }


def test_mixed_precision_gives_float32_boxes_and_logits():
    model = build().float().eval()
    images = draw_images(dtype=torch.float32)
    exact = detect(model, images)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predictions = detect(model, images)
    assert predictions.boxes.dtype == predictions.logits.dtype == torch.float32
    assert (predictions.boxes - exact.boxes).abs().max() < 0.1
    assert not torch.equal(predictions.boxes, exact.boxes)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", ["CPVTDetr", "CPVTDeformableDetr"])
def test_weights_in_half_precision_are_refused_by_name(name, dtype):
    """Also where the default dtype made them; in float32 again, the detector works."""
    model, images = build(META_ARCHITECTURE=name).float().eval(), draw_images(dtype=torch.float32)
    expected = (
        rf"the weights of this {type(model).__name__} are {dtype}.*float\(\).*torch\.autocast\(device, torch\.bfloat16\).*AMP"
    )
    with pytest.raises(TypeError, match=expected):
        detect(model.to(dtype), [image.to(dtype) for image in images])
    detect(model.float(), images)
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        made = build_detector(small_cfg(META_ARCHITECTURE=name)).eval()
        with pytest.raises(TypeError, match=expected):
            detect(made, made.preprocess(images).images.unbind())
        detect(model, images)  # made in float32, it works
    finally:
        torch.set_default_dtype(before)


@pytest.mark.parametrize("norm", ["BN", "SyncBN", "GN", "none"])
def test_mixed_precision_trains_with_every_norm_of_peg(norm):
    model = build(POSITION__NORM=norm).float().train()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        predictions = detect(model, draw_images(dtype=torch.float32))
    (predictions.boxes.sum() + predictions.logits.square().sum()).backward()
    assert all(torch.isfinite(parameter.grad).all() for parameter in model.parameters() if parameter.grad is not None)


def test_focal_starts_with_rare_objects():
    """K logits, and a bias with which every class has the probability 0.01."""
    torch.manual_seed(0)
    model = build_detector(small_cfg(CRITERION__CLASSIFICATION__NAME="focal"))
    assert model.class_embed.out_features == 3
    assert model.class_embed.bias.detach().sigmoid().tolist() == pytest.approx([0.01] * 3)


def test_preprocess_normalises_then_pads_to_the_stride():
    """(50 - mean) / std of each channel by hand, and zeros beside it."""
    model = build_detector(small_cfg(BACKBONE__STAGES=(5,)))
    batch = model.preprocess([torch.full((3, 33, 20), 50, dtype=torch.uint8), torch.full((3, 5, 40), 0, dtype=torch.uint8)])
    assert batch.images.shape == (2, 3, 64, 64)
    assert batch.image_sizes == [(33, 20), (5, 40)]
    expected = [(50 - 123.675) / 58.395, (50 - 116.28) / 57.12, (50 - 103.53) / 57.375]
    assert batch.images[0, :, 32, 19].tolist() == pytest.approx(expected)
    assert (batch.images.masked_select(batch.padding_mask[:, None]) == 0).all()


def test_pixel_statistics_of_the_config_are_used_and_not_saved():
    model = build_detector(small_cfg(PIXEL_MEAN=[0.0, 0.0, 0.0], PIXEL_STD=[1.0, 2.0, 4.0]))
    assert model.preprocess([torch.full((3, 1, 1), 8)]).images[0, :, 0, 0].tolist() == [8, 4, 2]
    assert not any("pixel" in name for name in model.state_dict())


def test_unknown_detector_lists_the_known():
    with pytest.raises(UnknownNameError, match=r"unknown MODEL.META_ARCHITECTURE 'CPVTDetrs'.*known: .*CPVTDetr"):
        build_detector(small_cfg(META_ARCHITECTURE="CPVTDetrs"))


def test_number_of_classes_has_to_be_known():
    with pytest.raises(ConfigError, match=r"MODEL\.NUM_CLASSES is 0"):
        build_detector(small_cfg(NUM_CLASSES=0))


def test_what_a_constructor_refuses_is_a_config_error():
    with pytest.raises(ConfigError, match="MODEL: channels must be a multiple of num_heads, got 32 channels and 5 heads"):
        build_detector(small_cfg(DETR__NHEADS=5))


def test_frozen_stages_keep_their_statistics_too():
    backbone = ResNetBackbone("resnet10", "BN", freeze_at=2).train()
    before = {name: value.clone() for name, value in backbone.state_dict().items()}
    backbone(torch.randn(2, 3, 32, 64), torch.zeros(2, 32, 64, dtype=torch.bool))
    changed = {name for name, value in backbone.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert not any(name.startswith(("body.bn1", "body.layer1")) for name in changed)
    with pytest.raises(ValueError, match="from 0"):
        ResNetBackbone("resnet10", freeze_at=6)
