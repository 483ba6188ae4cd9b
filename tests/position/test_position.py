# SPDX-License-Identifier: Apache-2.0
"""The position contract, over everything that is registered; and the values of each encoding."""

import math

import pytest
import torch
from fvcore.common.config import CfgNode
from tiny import random_config

from cpvt_det.builders import build_detector, build_encoder_position
from cpvt_det.common.defaults import FFN_CHANNELS
from cpvt_det.common.errors import ConfigError, UnknownNameError
from cpvt_det.common.structures import padding_mask_of
from cpvt_det.config import get_cfg
from cpvt_det.position.encoding import POSITION_REGISTRY, PositionEncoding, build_position
from cpvt_det.position.peg import PEGEncoding

NAMES = [*POSITION_REGISTRY.names, "relative+peg", "rope+peg_plain"]
CHANNELS, NUM_LAYERS, NUM_HEADS = 16, 3, 2
LEVELS = {1: [(5, 7)], 2: [(5, 7), (3, 4)]}
SIZES = [(5, 7), (4, 3), (2, 6)]  # valid (h, w) on the first level; the second has half, rounded up


@pytest.fixture(params=NAMES)
def name(request):
    return request.param


@pytest.fixture(params=[1, 2], ids=["one level", "two levels"])
def num_levels(request):
    return request.param


def build(name, num_levels=1, dtype=torch.float64, **options):
    torch.manual_seed(0)
    encoding = build_position(name, CHANNELS, num_levels, NUM_LAYERS, NUM_HEADS, **options).to(dtype)
    for tensor in [*encoding.parameters(), *encoding.buffers()]:
        if tensor.dim() == 1:  # of norms, whose initial values would hide faults
            torch.nn.init.uniform_(tensor, 0.5, 1.5)
    return encoding


def level_sizes(sizes, level):
    return [(-(-h // 2**level), -(-w // 2**level)) for h, w in sizes]


def make_batch(shapes, sizes=SIZES, dtype=torch.float64):
    """Features and masks over levels; an image's valid content does not depend on the shapes or on the other images."""
    features, masks = [], []
    for level, shape in enumerate(shapes):
        maps = []
        for size in sizes:
            generator = torch.Generator().manual_seed(100 * level + 10 * size[0] + size[1])
            maps.append(torch.randn(CHANNELS, 16, 16, generator=generator, dtype=torch.float64)[:, : shape[0], : shape[1]])
        features.append(torch.stack(maps).to(dtype))
        masks.append(padding_mask_of(level_sizes(sizes, level), shape))
    return features, masks


def flatten(features, masks):
    tokens = torch.cat([level.flatten(2).transpose(1, 2) for level in features], dim=1)
    return tokens, torch.cat([mask.flatten(1) for mask in masks], dim=1)


def scores_of(encoding, features, masks):
    """(B, M, N, N) scores of attention per layer, of queries and keys that are the tokens; nothing for other encodings."""
    tokens, mask = flatten(features, masks)
    heads = tokens.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2)
    shapes, scores = [tuple(level.shape[-2:]) for level in features], []
    for layer in range(NUM_LAYERS if encoding.acts_in_attention else 0):
        queries, keys, bias = encoding.place(heads, heads.flip(-1), mask, shapes, layer)
        assert queries.shape == keys.shape == heads.shape and queries.dtype == keys.dtype == heads.dtype
        scores.append(queries @ keys.transpose(-1, -2) * heads.shape[-1] ** -0.5 + (0 if bias is None else bias))
    return scores


def feed_all(encoding, features, masks):
    """What is made of the inner channels of every feed-forward network; nothing of encodings that do not act there."""
    tokens, mask = flatten(features, masks)
    hidden, shapes = tokens.repeat(1, 1, FFN_CHANNELS // CHANNELS), [tuple(level.shape[-2:]) for level in features]
    return [encoding.feed(hidden, mask, shapes, layer) for layer in range(NUM_LAYERS if encoding.acts_in_ffn else 0)]


def inject_all(encoding, features, masks):
    """The tokens after every call that an encoder with layers that do nothing would make."""
    tokens, mask = flatten(features, masks)
    shapes = [tuple(level.shape[-2:]) for level in features]
    for layer in range(-1, NUM_LAYERS):
        tokens = encoding.inject(tokens, mask, shapes, layer)
    return tokens


# The contract


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_embedding_has_shape_and_dtype_of_the_features(name, num_levels, dtype):
    features, masks = make_batch(LEVELS[num_levels], dtype=dtype)
    embedding = build(name, num_levels, dtype)(features, masks)
    if embedding is None:
        assert name.partition("+")[0] in ("none", "relative", "rope", "rope_mixed") or name.startswith("peg")
        return
    assert [level.shape for level in embedding] == [level.shape for level in features]
    assert all(level.dtype == dtype and torch.isfinite(level).all() for level in embedding)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inject_keeps_shape_and_dtype(name, num_levels, dtype):
    features, masks = make_batch(LEVELS[num_levels], dtype=dtype)
    tokens = inject_all(build(name, num_levels, dtype), features, masks)
    assert tokens.shape == flatten(features, masks)[0].shape
    assert tokens.dtype == dtype


@pytest.mark.parametrize("training", [False, True])
def test_inject_leaves_padded_tokens_as_they_are(name, num_levels, training):
    features, masks = make_batch(LEVELS[num_levels])
    tokens, mask = flatten(features, masks)
    injected = inject_all(build(name, num_levels).train(training), features, masks)
    assert torch.equal(injected[mask], tokens[mask])


@pytest.mark.parametrize("training", [False, True])
def test_padded_content_does_not_matter(name, num_levels, training):
    features, masks = make_batch(LEVELS[num_levels])
    spoiled = [level.masked_fill(mask[:, None], float("nan")) for level, mask in zip(features, masks, strict=True)]
    _, mask = flatten(features, masks)
    results = []
    for content in (features, spoiled):
        encoding = build(name, num_levels).train(training)
        embedding = encoding(content, masks) or []
        results.append([*(flatten(embedding, masks)[0][~mask] for _ in embedding[:1]), inject_all(encoding, content, masks)[~mask]])
        seen = ~mask[:, None, :, None] & ~mask[:, None, None]
        for scores in scores_of(encoding, content, masks) if num_levels == 1 else ():
            results[-1].append(scores.masked_select(seen))
    for clean, dirty in zip(*results, strict=True):
        assert torch.equal(clean, dirty)


def test_every_parameter_gets_a_gradient(name, num_levels):
    encoding = build(name, num_levels)
    features, masks = make_batch(LEVELS[num_levels])
    if (encoding.acts_in_attention or encoding.acts_in_ffn) and num_levels > 1:
        with pytest.raises(ValueError, match="inside layers needs one level, whose cells are one grid, got 2"):
            scores_of(encoding, features, masks), feed_all(encoding, features, masks)
        return
    inside = [*scores_of(encoding, features, masks), *feed_all(encoding, features, masks)]
    total = sum(
        (made.square().sum() for made in inside),
        inject_all(encoding, features, masks).pow(3).sum(),
    )
    for level in encoding(features, masks) or []:
        total = total + level.square().sum()
    assert total.requires_grad == any(parameter.requires_grad for parameter in encoding.parameters())
    if total.requires_grad:
        total.backward()
    trained = [(part, parameter) for part, parameter in encoding.named_parameters() if parameter.requires_grad]
    for part, parameter in trained:
        assert torch.isfinite(parameter.grad).all(), part
        assert (parameter.grad != 0).any(), part


def test_image_alone_gets_what_it_gets_in_a_larger_batch(name, num_levels):
    """In evaluation, on a canvas of its own against a larger one with others."""
    encoding = build(name, num_levels).eval()
    shapes = [(9, 8), (5, 4)][:num_levels]
    together = make_batch(shapes)
    embedding_together = encoding(*together)
    injected_together = inject_all(encoding, *together)
    for image, size in enumerate(SIZES):
        own_shapes = [level_sizes([size], level)[0] for level in range(num_levels)]
        alone = make_batch(own_shapes, [size])
        embedding_alone = encoding(*alone)
        injected_alone = inject_all(encoding, *alone)
        injected = injected_together[image].split([h * w for h, w in shapes])
        parts = []
        for level, (height, width) in enumerate(own_shapes):
            parts.append(injected[level].unflatten(0, shapes[level])[:height, :width].flatten(0, 1))
            if embedding_alone is not None:
                cropped = embedding_together[level][image, :, :height, :width]
                assert (cropped - embedding_alone[level][0]).abs().max() <= 1e-12
        assert (torch.cat(parts) - injected_alone[0]).abs().max() <= 1e-12
        if num_levels == 1:
            (height, width), canvas = size, shapes[0]
            for wide, narrow in zip(scores_of(encoding, *together), scores_of(encoding, *alone), strict=True):
                grid = wide[image].unflatten(-1, canvas).unflatten(1, canvas)[:, :height, :width, :height, :width]
                assert (grid.flatten(3).flatten(1, 2) - narrow[0]).abs().max() <= 1e-12


def test_levels_do_not_mix(name):
    encoding = build(name, 2).eval()
    features, masks = make_batch(LEVELS[2])
    changed = [features[0], features[1] + 1]
    first = LEVELS[2][0][0] * LEVELS[2][0][1]
    before, after = inject_all(encoding, features, masks), inject_all(encoding, changed, masks)
    assert torch.equal(before[:, :first], after[:, :first])
    assert not torch.equal(before[:, first:], after[:, first:])


def test_encoding_survives_its_state_dict(name, num_levels):
    features, masks = make_batch(LEVELS[num_levels])
    source, target = build(name, num_levels), build_position(name, CHANNELS, num_levels, NUM_LAYERS, NUM_HEADS).double()
    target.load_state_dict(source.state_dict())
    assert torch.equal(inject_all(source.eval(), features, masks), inject_all(target.eval(), features, masks))


def test_detr_s_encodings_are_registered():
    assert {"none", "sine", "sine_offset", "learned", "peg", "sine+peg", "sine_offset+peg"} <= set(NAMES)


# Values


def slow_sine(height, width, valid_height, valid_width, offset, temperature=10000):
    """DETR's formula, a cell at a time in Python floats: (C, H, W); NaN where a cell is not valid."""
    half = CHANNELS // 2
    values = torch.full((CHANNELS, height, width), math.nan, dtype=torch.float64)
    for y in range(valid_height):
        for x in range(valid_width):
            for axis, (index, extent) in enumerate(((y + 1, valid_height), (x + 1, valid_width))):
                angle = 2 * math.pi * (index + offset) / (extent + 1e-6)
                for channel in range(half):
                    phase = angle / temperature ** (2 * (channel // 2) / half)
                    values[axis * half + channel, y, x] = math.sin(phase) if channel % 2 == 0 else math.cos(phase)
    return values


@pytest.mark.parametrize(("name", "offset"), [("sine", 0.0), ("sine_offset", -0.5), ("sine+peg", 0.0), ("sine_offset+peg", -0.5)])
def test_sine_is_the_formula_cell_by_cell(name, offset):
    """On a padded map that is not square; the first half of the channels is the row's."""
    (features,), (mask,) = make_batch([(5, 7)])
    (embedding,) = build(name)([features], [mask])
    for image, (h, w) in enumerate(SIZES):
        expected = slow_sine(5, 7, h, w, offset)[:, :h, :w]
        assert (embedding[image, :, :h, :w] - expected).abs().max() < 1e-12


@pytest.mark.parametrize(("name", "offset"), [("sine", 0.0), ("sine_offset", -0.5), ("sine+peg", 0.0), ("sine_offset+peg", -0.5)])
def test_the_temperature_is_the_longest_wavelength_over_the_shortest(name, offset):
    """20 is that of DINO's authors."""
    (features,), (mask,) = make_batch([(5, 7)])
    own = name.partition("+")[0]
    options = {"temperature": 20.0} if own == name else {own: {"temperature": 20.0}}
    (embedding,) = build_position(name, CHANNELS, **options)([features], [mask])
    for image, (h, w) in enumerate(SIZES):
        expected = slow_sine(5, 7, h, w, offset, 20)[:, :h, :w]
        assert (embedding[image, :, :h, :w] - expected).abs().max() < 1e-12


def test_a_temperature_that_cannot_be_is_refused():
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="temperature of a sine encoding must be above 0"):
            build_position("sine", CHANNELS, temperature=temperature)
    cfg = get_cfg()
    cfg.MODEL.NUM_CLASSES, cfg.MODEL.POSITION.TEMPERATURE = 3, 20.0
    with pytest.raises(
        ConfigError, match="unknown option of position encoding 'peg' 'temperature'; .* it belongs to .*sine, sine_offset"
    ):
        build_detector(cfg)


def test_a_rotary_encoding_of_a_config_has_its_own_frequencies():
    cfg = random_config(MODEL__POSITION__NAME="rope")
    assert build_detector(cfg).position.frequency_ratio == 100.0
    cfg.MODEL.POSITION.FREQUENCY_RATIO = 50.0
    assert build_detector(cfg).position.frequency_ratio == 50.0
    cfg.MODEL.POSITION.TEMPERATURE = 20.0
    with pytest.raises(ConfigError, match="unknown option of position encoding 'rope' 'temperature'"):
        build_detector(cfg)


def test_the_temperature_is_that_of_detr_s_decoder_too():
    cfg = get_cfg()
    cfg.MODEL.NUM_CLASSES, cfg.MODEL.BACKBONE.NAME = 3, "resnet10"
    cfg.MODEL.POSITION.NAME, cfg.MODEL.POSITION.TEMPERATURE = "sine_offset", 20.0
    assert build_detector(cfg).transformer.decoder_position.temperature == 20.0


def test_sine_and_sine_offset_differ():
    features, masks = make_batch([(5, 7)])
    (sine,), (offset,) = build("sine")(features, masks), build("sine_offset")(features, masks)
    assert (sine - offset)[0].abs().max() > 0.1


def test_sine_of_the_last_cell_by_hand():
    """Row 5 of 5 and column 7 of 7 are the whole turn: sin(2 pi) = 0 and cos(2 pi) = 1 at the shortest wavelength."""
    (embedding,) = build("sine")(*make_batch([(5, 7)]))
    assert embedding[0, [0, 1, 8, 9], 4, 6].tolist() == pytest.approx([0, 1, 0, 1], abs=1e-5)


def test_sine_in_half_precision_is_the_rounded_float32():
    """Positions are computed in float32 whatever the features are, and whatever autocast says."""
    features, masks = make_batch([(5, 7)], dtype=torch.float32)
    encoding = build("sine", dtype=torch.float32)
    (exact,) = encoding(features, masks)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (half,) = encoding([features[0].bfloat16()], masks)
    assert half.dtype == torch.bfloat16
    assert torch.equal(half, exact.bfloat16())


@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith("sine")])
def test_sine_refuses_a_mask_that_is_not_bool(name):
    """``~`` of an integer mask is -1 and -2, which would add up to positions without an error."""
    features, masks = make_batch([(5, 7)])
    with pytest.raises(TypeError, match="must be bool"):
        build(name)(features, [mask.long() for mask in masks])


def test_sine_of_numbers_is_the_same_whatever_the_size_of_the_image():
    """Without NORMALIZE a cell has the value of its index from 1: the second row is 2 radians at the shortest wavelength."""
    (embedding,) = build("sine", normalize=False)(*make_batch([(5, 7)]))
    assert torch.equal(embedding[0, :, :2, :6], embedding[2, :, :2, :6])
    assert embedding[1, 0, 1, 1].item() == pytest.approx(math.sin(2), abs=1e-12)


def test_learned_is_its_table_of_columns_then_rows():
    """The first half of the channels is the column's, as in the official code."""
    encoding = build("learned", table_size=7)
    (embedding,) = encoding(*make_batch([(5, 7)]))
    for y in range(5):
        for x in range(7):
            expected = torch.cat((encoding.col_embed.weight[x], encoding.row_embed.weight[y]))
            assert torch.equal(embedding[:, :, y, x], expected.expand(3, -1))


@pytest.mark.parametrize("shape", [(5, 8), (8, 5)])
def test_learned_beyond_its_table_names_the_key(shape):
    with pytest.raises(ValueError, match=rf"{shape[0]} x {shape[1]} tokens.*table of 7 x 7.*MODEL\.POSITION\.TABLE_SIZE"):
        build("learned", table_size=7)(*make_batch([shape]))


def test_learned_reaches_50_by_default():
    encoding = build_position("learned", 4)
    assert encoding([torch.zeros(1, 4, 50, 50)], [torch.zeros(1, 50, 50, dtype=torch.bool)])[0].shape == (1, 4, 50, 50)
    with pytest.raises(ValueError, match="TABLE_SIZE"):
        encoding([torch.zeros(1, 4, 1, 51)], [torch.zeros(1, 1, 51, dtype=torch.bool)])


@pytest.mark.parametrize(("options", "acts"), [({}, [0]), ({"positions": [-1]}, [-1]), ({"positions": [2, -1, 1]}, [-1, 1, 2])])
def test_peg_acts_after_its_layers_alone(options, acts):
    """After layer 0 by default; -1 is before the first."""
    features, masks = make_batch([(5, 7)])
    tokens, mask = flatten(features, masks)
    encoding = build("peg", **options).eval()
    changed = [layer for layer in range(-1, NUM_LAYERS) if not torch.equal(encoding.inject(tokens, mask, [(5, 7)], layer), tokens)]
    assert changed == acts
    assert len(encoding.pegs) == len(acts)


def test_each_position_and_level_has_a_peg_of_its_own():
    encoding = build("peg", 2, positions=[0, 1])
    convolutions = [parameter for name, parameter in encoding.named_parameters() if name.endswith("conv.weight")]
    assert len(convolutions) == len({id(parameter) for parameter in convolutions}) == 4


def test_options_reach_the_peg():
    peg = build("sine+peg", peg={"kernel_size": 5, "norm": "GN", "mask_input": False, "zero_init": True}).pegs["0"][0]
    assert peg.conv.kernel_size == (5, 5)
    assert isinstance(peg.norm, torch.nn.GroupNorm)
    assert not peg.mask_input
    assert peg.scale is not None


@pytest.mark.parametrize("name", ["peg", "sine+peg"])
@pytest.mark.parametrize("positions", [[], [3], [-2], [0, 0]])
def test_positions_outside_the_encoder_are_refused(name, positions):
    with pytest.raises(ValueError, match=r"from -1 \(before the first\) to 2, got"):
        build(name, **({"peg": {"positions": positions}} if "+" in name else {"positions": positions}))


# Names and options


def test_unknown_name_lists_the_known():
    with pytest.raises(UnknownNameError, match=r"unknown position encoding 'pge' \(did you mean 'peg'\?\); known: .*sine\+peg"):
        build_position("pge", 16)


def test_unknown_option_lists_the_encoding_s_own():
    with pytest.raises(
        UnknownNameError, match=r"'learned' 'kernel_size'.*known: table_size; it belongs to peg, peg_plain, peg_ffn"
    ):
        build_position("learned", 16, kernel_size=3)


@pytest.mark.parametrize(("name", "channels"), [("sine", 18), ("sine_offset", 2), ("learned", 15)])
def test_channels_that_do_not_divide_are_refused(name, channels):
    with pytest.raises(ValueError, match=f"got {channels}"):
        build_position(name, channels)


@pytest.fixture
def registered():
    """A name to register under, forgotten afterwards."""
    yield "scaled"
    POSITION_REGISTRY._obj_map.pop("scaled", None)


def test_an_encoding_of_one_s_own_gets_its_options_from_the_config(registered):
    """Registering is one line, and a key of its own in MODEL.POSITION arrives as a keyword."""

    class Scaled(PositionEncoding):
        def __init__(self, channels, factor):
            super().__init__()
            self.channels, self.factor = channels, factor

    POSITION_REGISTRY._do_register(registered, Scaled)
    cfg = get_cfg()
    cfg.merge_from_other_cfg(CfgNode({"MODEL": {"POSITION": {"NAME": registered, "FACTOR": 2.5}}}))
    encoding = build_encoder_position(cfg, 16, num_levels=1, num_layers=6)
    assert (encoding.channels, encoding.factor) == (16, 2.5)


def test_an_encoding_is_built_by_its_name_alone(name):
    cfg = get_cfg()
    cfg.MODEL.POSITION.NAME = name
    encoding = build_encoder_position(cfg, 32, num_levels=1, num_layers=6)
    assert isinstance(encoding, PEGEncoding) == ("peg" in name and name not in ("peg_query_key", "peg_ffn"))
    assert encoding.acts_in_ffn == (name == "peg_ffn")
    assert encoding.acts_in_attention == (name.partition("+")[0] in ("relative", "rope", "rope_mixed"))
    assert isinstance(encoding, PositionEncoding)


def test_misspelt_option_in_the_config_is_refused():
    cfg = get_cfg()
    cfg.merge_from_other_cfg(CfgNode({"MODEL": {"POSITION": {"KERNAL_SIZE": 5}}}))
    with pytest.raises(UnknownNameError, match=r"'kernal_size' \(did you mean 'kernel_size'\?\)"):
        build_encoder_position(cfg, 16, num_levels=1, num_layers=6)
