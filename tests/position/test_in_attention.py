# SPDX-License-Identifier: Apache-2.0
"""Encodings inside the attention: relative against a double loop, rotary ones against timm's classes; what refuses them."""

import pytest
import torch
from timm.layers.pos_embed_sincos import RotaryEmbeddingCat, RotaryEmbeddingMixed, apply_rot_embed_cat
from tiny import DEFORMABLE, IN_ATTENTION, random_config

from cpvt_det.builders import build_detector
from cpvt_det.common.errors import ConfigError
from cpvt_det.models.encoder import Encoder
from cpvt_det.position import PositionEncoding, build_position

CHANNELS, LAYERS, HEADS, SHAPE = 48, 3, 4, (3, 5)
TOKENS, WIDTH = SHAPE[0] * SHAPE[1], CHANNELS // HEADS


def make(name, **options):
    torch.manual_seed(0)
    encoding = build_position(name, CHANNELS, 1, LAYERS, HEADS, **options).double()
    for parameter in encoding.parameters():
        torch.nn.init.normal_(parameter)
    return encoding


def draw():
    torch.manual_seed(1)
    return (torch.randn(2, HEADS, TOKENS, WIDTH).double() for _ in range(2))


def place(encoding, queries, keys, layer):
    return encoding.place(queries, keys, torch.zeros(2, TOKENS, dtype=torch.bool), [SHAPE], layer)


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("reach", [1, 2, 8])
def test_relative_is_shaw_s_formula_pair_by_pair(reach, layer):
    """q . (rows[clip(dy)] + columns[clip(dx)]) / sqrt(width), tables shared by heads, of this layer alone."""
    encoding, (queries, keys) = make("relative", range=reach), draw()
    same, also, bias = place(encoding, queries, keys, layer)
    assert same is queries and also is keys
    expected = torch.zeros(2, HEADS, TOKENS, TOKENS).double()
    for i in range(TOKENS):
        for j in range(TOKENS):
            dy, dx = j // SHAPE[1] - i // SHAPE[1], j % SHAPE[1] - i % SHAPE[1]
            vector = (
                encoding.rows[layer, max(-reach, min(reach, dy)) + reach]
                + encoding.columns[layer, max(-reach, min(reach, dx)) + reach]
            )
            expected[:, :, i, j] = queries[:, :, i] @ vector / WIDTH**0.5
    assert (bias - expected).abs().max() < 1e-12


def test_relative_counts_its_tables():
    """12 layers x 2 axes x 17 offsets x 64 channels, of DeiT-tiny."""
    encoding = build_position("relative", 192, 1, 12, 3)
    assert sum(parameter.numel() for parameter in encoding.parameters()) == 26_112


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("ratio", [100.0, 10000.0])
def test_rope_is_timm_s(ratio, layer):
    """Cells from 0, rows in the first half of a head's channels; timm's in float32 and with (row, column) order."""
    encoding, (queries, keys) = make("rope", frequency_ratio=ratio), draw()
    timm = RotaryEmbeddingCat(WIDTH, temperature=ratio, in_pixels=False).get_embed(SHAPE).double()
    found = place(encoding, queries, keys, layer)
    for ours, given in zip(found, (queries, keys), strict=False):
        assert (ours - apply_rot_embed_cat(given, timm)).abs().max() < 1e-6
        torch.testing.assert_close(ours.norm(dim=-1), given.norm(dim=-1))
    assert found[2] is None


@pytest.mark.parametrize("layer", range(LAYERS))
def test_rope_mixed_is_timm_s_with_its_weights(layer):
    encoding, (queries, keys) = make("rope_mixed"), draw()
    timm = RotaryEmbeddingMixed(CHANNELS, LAYERS, HEADS)
    encoding.load_state_dict({name: tensor.double() for name, tensor in timm.state_dict().items()})
    angles = timm.get_embed(SHAPE)[layer].double()
    for ours, given in zip(place(encoding, queries, keys, layer), (queries, keys), strict=False):
        assert (ours - apply_rot_embed_cat(given, angles)).abs().max() < 1e-6


def test_rope_mixed_starts_as_timm_s():
    """The same frequencies in magnitude: two at right angles in each place of the list, of one direction per layer and head."""
    ours, timm = build_position("rope_mixed", CHANNELS, 1, LAYERS, HEADS).freqs, RotaryEmbeddingMixed(CHANNELS, LAYERS, HEADS).freqs
    assert ours.shape == timm.shape
    torch.testing.assert_close(ours.norm(dim=0), timm.norm(dim=0))
    half = ours.shape[-1] // 2
    assert (ours[..., :half] * ours[..., half:]).sum(0).abs().max() < 1e-6
    assert len(ours.flatten(1)[0].unique()) > LAYERS * HEADS


@pytest.mark.parametrize("name", ["rope", "rope_mixed"])
def test_rotary_products_see_offsets_alone(name):
    """Everything a row and two columns further on gives the same products."""
    encoding, vector = make(name), torch.randn(1, HEADS, 1, WIDTH).double().expand(2, -1, TOKENS, -1)
    queries, keys, _ = place(encoding, vector, vector, 1)
    products = (queries @ keys.transpose(-1, -2)).unflatten(-1, SHAPE).unflatten(2, SHAPE)
    assert (products[:, :, 0, 0, 1, 1] - products[:, :, 1, 2, 2, 3]).abs().max() < 1e-10
    assert (products[:, :, 0, 0, 1, 1] - products[:, :, 0, 0, 1, 2]).abs().max() > 1e-3


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_in_an_encoder_what_the_encoding_does_inside_attention_is_done_in_every_layer(name):
    """Against attention written out; with half of the tokens of the second image padded."""
    encoding = make(name)
    torch.manual_seed(2)
    encoder = Encoder(LAYERS, CHANNELS, HEADS, 20, 0.0, pre_norm=True).double().eval()
    tokens, mask = torch.randn(2, TOKENS, CHANNELS).double(), torch.zeros(2, TOKENS, dtype=torch.bool)
    mask[1, 10:] = True  # the last row
    found, x = encoder(tokens, None, mask, [SHAPE], encoding), tokens
    for index, layer in enumerate(encoder.layers):
        attention, normed = layer.self_attn, layer.norm1(x)
        projected = normed @ attention.in_proj_weight.T + attention.in_proj_bias
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected.chunk(3, -1))
        q, k, bias = encoding.place(q, k, mask, [SHAPE], index)
        scores = q @ k.transpose(-1, -2) / WIDTH**0.5 + (0 if bias is None else bias)
        weights = scores.masked_fill(mask[:, None, None], -torch.inf).softmax(-1)
        x = x + attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
        x = x + layer.linear2(layer.linear1(layer.norm2(x)).relu())
    assert (found - encoder.norm(x)).abs().max() < 1e-12


@pytest.mark.parametrize("name", IN_ATTENTION)
def test_recomputed_layers_have_the_same_gradients(name):
    gradients = []
    for checkpointing in (False, True):
        encoding = make(name)
        torch.manual_seed(2)
        encoder = Encoder(LAYERS, CHANNELS, HEADS, 20, 0.1, True, checkpointing, "gelu", 1e-6, 0.3).double().train()
        torch.manual_seed(3)
        out = encoder(torch.randn(2, TOKENS, CHANNELS).double(), None, torch.zeros(2, TOKENS, dtype=torch.bool), [SHAPE], encoding)
        out.square().sum().backward()
        gradients.append([parameter.grad for parameter in (*encoder.parameters(), *encoding.parameters())])
    assert all(torch.equal(*pair) for pair in zip(*gradients, strict=True))


@pytest.mark.parametrize("name", [*IN_ATTENTION, "rope+peg"])
def test_deformable_attention_refuses_them_with_the_reason(name):
    own = "RelativeEncoding" if name == "relative" else "RotaryEncoding"  # of a sum the part that acts
    with pytest.raises(ConfigError, match=own + " acts on the product of .*, which deformable attention does not compute"):
        build_detector(random_config(**DEFORMABLE, MODEL__POSITION__NAME=name))


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("relative", {"range": 0}, "relative positions need a range of at least 1, got 0"),
        ("relative", {"num_heads": 5}, "channels must be a multiple of the number of heads, got 48 channels and 5 heads"),
        ("rope", {"num_heads": 8}, "channels must be a multiple of 4 times the number of heads, got 48 channels and 8 heads"),
        ("rope_mixed", {"num_heads": 8}, "channels must be a multiple of 4 times the number of heads, got 48 channels and 8 heads"),
    ],
)
def test_sizes_that_do_not_divide_are_refused(name, options, message):
    with pytest.raises(ValueError, match=message):
        build_position(name, CHANNELS, **{"num_layers": LAYERS, "num_heads": HEADS, **options})


def test_an_encoding_of_ones_own_is_known_to_act_there_by_its_method():
    class Own(PositionEncoding):
        def place(self, queries, keys, padding_mask, level_shapes, layer):
            return queries, keys, None

    assert Own().acts_in_attention and not PositionEncoding().acts_in_attention
