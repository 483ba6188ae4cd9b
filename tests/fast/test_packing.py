# SPDX-License-Identifier: Apache-2.0
"""Encoders without padded tokens: where tokens stand, what is computed of them, and when the whole batch is computed."""

import pytest
import torch
from torch import nn

from cpvt_det.common.structures import Levels, padding_mask_of
from cpvt_det.fast import accelerate
from cpvt_det.fast.layers import FastDeformableEncoderLayer, FastEncoderLayer, Packing
from cpvt_det.models.backbones.vit import vision_transformer
from cpvt_det.models.deformable_detr import DeformableEncoder
from cpvt_det.models.encoder import Encoder
from cpvt_det.ops import routes
from cpvt_det.position import PositionEncoding, build_position

C, HEADS, LAYERS = 16, 2, 3
SHAPES = [(6, 7), (3, 4)]
SIZES = [[(6, 4), (3, 2)], [(2, 7), (1, 4)], [(5, 7), (3, 4)]]
"""Cells of three images on each level."""
CONVOLVED = ["peg", "sine+peg", "peg_borderless", "peg_stacked", "peg_separable"]


@pytest.fixture(autouse=True)
def forgotten():
    routes.is_on.cache_clear()
    yield
    routes.is_on.cache_clear()


def layout(num_levels=1, sizes=SIZES):
    by_level = [[image[level] for image in sizes] for level in range(num_levels)]
    masks = [padding_mask_of(cells, shape) for cells, shape in zip(by_level, SHAPES, strict=False)]
    return Levels.from_masks(masks, torch.float64)


def packings(monkeypatch):
    """The packings that are made from now on."""
    seen, make = [], Packing.of
    monkeypatch.setattr(Packing, "of", lambda mask: seen.append(make(mask)) or seen[-1])
    return seen


def encoder_of(kind, name="peg", **options):
    """An encoder in float64, and an encoding by name, or the one that is given; no parameter is 0 or 1."""
    torch.manual_seed(3)
    levels = 2 if kind == "deformable" else 1
    encoding = build_position(name, C, levels, LAYERS, HEADS, **options) if isinstance(name, str) else name
    if kind == "deformable":
        encoder = DeformableEncoder(LAYERS, C, HEADS, 24, 0.0, levels, 2)
    else:
        encoder = Encoder(LAYERS, C, HEADS, 24, 0.0, pre_norm=kind == "pre-norm", drop_path=0.2 if kind == "drop path" else 0.0)
    for parameter in [*encoder.parameters(), *encoding.parameters()]:
        nn.init.normal_(parameter, std=0.3)
    return accelerate(encoder).double(), encoding.double()


def encode(encoder, encoding, tokens, positions, levels):
    if isinstance(encoder, DeformableEncoder):
        return encoder(tokens, positions, levels, encoding)
    return encoder(tokens, positions, levels.padding_mask, levels.shapes, encoding)


def inputs_for(levels):
    torch.manual_seed(4)
    shape = (*levels.padding_mask.shape, C)
    return [torch.randn(shape, dtype=torch.float64, requires_grad=True) for _ in range(2)]


def test_packed_tokens_are_the_valid_ones_image_after_image():
    mask = layout(2).padding_mask
    whole = torch.arange(mask.numel() * 2.0).view(*mask.shape, 2)
    packing = Packing.of(mask)
    packed = packing.pack(whole)
    assert torch.equal(packed[0], whole[~mask])
    assert [image.shape[1] for image in packing.images(packed)] == [6 * 4 + 3 * 2, 2 * 7 + 4, 5 * 7 + 3 * 4]
    assert torch.equal(packing.unpack(packed), whole.masked_fill(mask[..., None], 0))
    shared = torch.randn(1, mask.shape[1], 2)  # positions without additive encoding are one for all images
    assert torch.equal(packing.pack(shared)[0], shared.expand_as(whole)[~mask])


def test_packing_has_first_and_second_derivatives():
    mask = layout().padding_mask
    packing, whole = Packing.of(mask), torch.randn(*mask.shape, 2, dtype=torch.float64, requires_grad=True)
    packed = packing.pack(whole).detach().requires_grad_()
    for function, x in ((packing.pack, whole), (packing.unpack, packed)):
        assert torch.autograd.gradcheck(lambda x, f=function: f(x).square(), (x,))
        assert torch.autograd.gradgradcheck(lambda x, f=function: f(x).pow(3), (x,))


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("kind", "training"),
    [*((kind, training) for kind in ("post-norm", "pre-norm", "deformable") for training in (False, True)), ("drop path", False)],
)
@pytest.mark.parametrize("name", ["none", *CONVOLVED])
def test_memory_and_gradients_are_those_of_the_whole_batch(monkeypatch, name, kind, training, checkpointing):
    """Batch norms between the layers count the same cells."""
    options = {"positions": (-1, 0, 2)} if name != "none" else {}
    options = {"peg": options} if "+" in name else options
    encoder, encoding = encoder_of(kind, name, **options)
    encoder.checkpointing = checkpointing
    levels = layout(2 if kind == "deformable" else 1)
    tokens, positions = inputs_for(levels)
    seen, valid, outcomes = packings(monkeypatch), ~levels.padding_mask, []
    for switch in ("", "packing"):
        monkeypatch.setenv(routes.SWITCH, switch)
        routes.is_on.cache_clear()
        parts = nn.ModuleList([encoder, encoding]).train(training)
        for norm in parts.modules():
            getattr(norm, "reset_running_stats", lambda: None)()
        memory = encode(encoder, encoding, tokens, positions, levels)[valid]
        wanted = [tokens, positions, *(p for p in parts.parameters() if p.requires_grad)]
        gradients = torch.autograd.grad(memory.sin().sum(), wanted, allow_unused=True)
        counted = [buffer.clone() for buffer in encoding.buffers()]  # the norms write into the same tensors in both runs
        outcomes.append([memory, *(gradient for gradient in gradients if gradient is not None), *counted])
    assert len(seen) == 1
    assert len(outcomes[0]) == len(outcomes[1]) > LAYERS * 10
    for packed, whole in zip(*outcomes, strict=True):
        assert (packed - whole).abs().max() <= 1e-11 * whole.abs().max().clamp(min=1e-3)


@pytest.mark.parametrize("kind", ["post-norm", "deformable"])
def test_an_image_of_which_nothing_is_valid_has_zeros(monkeypatch, kind):
    encoder, encoding = encoder_of(kind, "sine")
    levels = layout(2 if kind == "deformable" else 1, [*SIZES, [(0, 0), (0, 0)]])
    seen, (tokens, positions) = packings(monkeypatch), inputs_for(levels)
    memory = encode(encoder, encoding, tokens, positions, levels)
    memory.square().sum().backward()
    assert len(seen) == 1 and seen[0].counts[-1] == 0
    assert not memory[-1].any() and not tokens.grad[-1].any()
    assert memory.isfinite().all() and tokens.grad.isfinite().all() and memory[:-1].any() and tokens.grad[:-1].any()


class Blurring(PositionEncoding):
    """Adds the mean of all tokens, padded ones too."""

    def inject(self, tokens, padding_mask, level_shapes, layer):
        return tokens + tokens.mean(1, keepdim=True)


class OtherLayer(FastEncoderLayer):
    pass


class OtherDeformableLayer(FastDeformableEncoderLayer):
    pass


def hooked(encoder):
    encoder.layers[1].linear1.register_forward_hook(lambda *_: None)


def other_layer(encoder):
    encoder.layers[1].__class__ = OtherDeformableLayer if isinstance(encoder, DeformableEncoder) else OtherLayer


def other_attention(encoder):
    attention = encoder.layers[2].self_attn
    attention.__class__ = type("Other", (type(attention),), {})


@pytest.mark.parametrize("kind", ["post-norm", "deformable"])
@pytest.mark.parametrize("change", [hooked, other_layer, other_attention])
def test_layers_that_are_not_ours_alone_get_the_batch(monkeypatch, change, kind):
    encoder, encoding = encoder_of(kind)
    levels = layout(2 if kind == "deformable" else 1)
    seen, arguments = packings(monkeypatch), (encoding, *inputs_for(levels), levels)
    encode(encoder, *arguments)
    assert len(seen) == 1
    change(encoder)
    encode(encoder, *arguments)
    assert len(seen) == 1


@pytest.mark.parametrize(
    ("name", "options"),
    [("peg", {"mask_input": False}), ("peg_stacked", {"mask_input": False}), ("relative", {}), ("rope", {}), (Blurring(), {})],
)
def test_encodings_that_look_at_padded_tokens_or_compare_tokens_get_the_batch(monkeypatch, name, options):
    encoder, encoding = encoder_of("post-norm", name, **options)
    levels, seen = layout(), packings(monkeypatch)
    encode(encoder, encoding, *inputs_for(levels), levels)
    assert not seen


def test_images_that_skip_parts_of_layers_stay_apart_in_training_alone(monkeypatch):
    encoder, encoding = encoder_of("drop path", "none")
    levels, seen = layout(), packings(monkeypatch)
    encode(encoder.train(), encoding, *inputs_for(levels), levels)
    assert not seen
    encode(encoder.eval(), encoding, *inputs_for(levels), levels)
    assert len(seen) == 1


@pytest.mark.parametrize(("columns", "count"), [(7, 0), (6, 0), (5, 1)])
def test_a_little_padding_is_computed_with_the_rest(monkeypatch, columns, count):
    """Of two images with 7 columns, one has fewer: 1 of 14 is 7 %, 2 of 14 are 14 %."""
    encoder, encoding = encoder_of("post-norm", "none")
    levels, seen = layout(1, [[(6, 7)], [(6, columns)]]), packings(monkeypatch)
    encode(encoder, encoding, *inputs_for(levels), levels)
    assert len(seen) == count


def test_dropout_of_attention_is_drawn_for_packed_tokens_too():
    """In training, with p = 0.5, each valid token's memory differs from draw to draw, and is repeated by the seed."""
    torch.manual_seed(5)
    encoder, levels = accelerate(Encoder(1, C, HEADS, 24, 0.5, pre_norm=False)).train(), layout()
    tokens = torch.randn(*levels.padding_mask.shape, C)
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(encoder(tokens, None, levels.padding_mask, levels.shapes, PositionEncoding())[~levels.padding_mask])
    assert torch.equal(drawn[0], drawn[1])
    assert ((drawn[0] - drawn[2]).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("name", ["deit", "cpvt"])
def test_a_vision_transformer_with_a_class_token_packs_its_patches(monkeypatch, name):
    torch.manual_seed(6)
    backbone = accelerate(vision_transformer(f"{name}_tiny", embed_dim=24, depth=2, num_heads=3)).double().eval()
    mask = padding_mask_of([(96, 48), (64, 96)], (96, 96))
    images = torch.randn(2, 3, 96, 96, dtype=torch.float64).masked_fill(mask[:, None], 0)
    seen, packed = packings(monkeypatch), backbone.tokens(images, mask)
    monkeypatch.setattr("cpvt_det.fast.layers.packing_for", lambda *_: None)
    whole, valid = backbone.tokens(images, mask), ~mask[:, ::16, ::16].flatten(1)
    assert [one.counts for one in seen] == [[6 * 3 + 1, 4 * 6 + 1]]
    torch.testing.assert_close(packed[0], whole[0], rtol=0, atol=1e-11)
    torch.testing.assert_close(packed[1][valid], whole[1][valid], rtol=0, atol=1e-11)
