# SPDX-License-Identifier: Apache-2.0
"""Pictures of vision transformers: what is drawn is what the layers compute, patch by patch, on images that are not square."""

import math

import pytest
import torch
import torch.nn.functional as F
from click.testing import CliRunner
from image_classes import class_words
from PIL import Image
from torch import nn

from cpvt_det.builders import build_detector
from cpvt_det.common.errors import BadInputError
from cpvt_det.config import load_cfg
from cpvt_det.visualize import attention as attention_module
from cpvt_det.visualize.attention import AttentionByPosition
from cpvt_det.visualize.position import NamedDetector
from studies import patches
from studies.__main__ import main
from studies.patches import as_tiles, channels_of, patch_attention, patch_features, pixel_features

HEIGHT, WIDTH = 3, 5
"""Patches of the images."""
VIT = {
    "MODEL__BACKBONE__NAME": "deit_tiny",
    "MODEL__BACKBONE__STAGES": (4,),
    "MODEL__BACKBONE__EMBED_DIM": 32,
    "MODEL__BACKBONE__DEPTH": 3,
    "MODEL__BACKBONE__NUM_HEADS": 2,
    "MODEL__BACKBONE__NORM": "FrozenBN",
    "MODEL__BACKBONE__FREEZE_AT": 2,
}
TNT = {**VIT, "MODEL__BACKBONE__NAME": "tnt_small", "MODEL__BACKBONE__EMBED_DIM": 64}
ENCODED = [
    (VIT, "none"),
    (VIT, "table"),
    (VIT, "relative"),
    (VIT, "rope"),
    (VIT, "peg_plain"),
    (TNT, "table"),
    (TNT, "table+peg_plain"),
]


def config(tmp_path, **more):
    words = class_words(tmp_path, tmp_path / "out", MODEL__NUM_CLASSES=3, **more)
    return load_cfg("", words)


def make(tmp_path, **more):
    """A small classifier in float64, with weights large enough for attention that is far from even."""
    torch.manual_seed(0)
    model = build_detector(config(tmp_path, **more)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return NamedDetector("a model", model)


def draw(count=2, height=16 * HEIGHT, width=16 * WIDTH):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(256, (3, height, width), dtype=torch.uint8, generator=generator) for _ in range(count)]


def arguments_of(module, model, image):
    """The arguments of a module's call."""
    kept = []
    handle = module.register_forward_pre_hook(lambda _, args: kept.append(args))
    batch = model.preprocess([image])
    with torch.no_grad():
        model(batch.images, batch.padding_mask)
    handle.remove()
    return kept[0]


@pytest.mark.parametrize(("backbone", "encoding"), ENCODED)
@pytest.mark.parametrize("num_tokens", [0, 1, 2])
def test_attention_between_patches_is_that_of_the_layer(backbone, encoding, num_tokens, tmp_path):
    """Worked out query by query from the layer's input; tokens beside the patches count in the sum, and are not drawn."""
    more = {"MODEL__BACKBONE__NUM_TOKENS": num_tokens, "MODEL__BACKBONE__POSITION__NAME": encoding, **backbone}
    model, images = make(tmp_path, **more), draw()
    found = patch_attention(model, images, 1)
    assert found.layer == 1 and found.weights.shape == (HEIGHT, WIDTH, HEIGHT, WIDTH)
    layer = model.detector.backbone.encoder.layers[1]
    layer = getattr(layer, "outer", layer)
    total = torch.zeros(HEIGHT * WIDTH, HEIGHT * WIDTH, dtype=torch.float64)
    for image in images:
        tokens, _, _, place = arguments_of(layer, model.detector, image)[:4]
        q, k, _ = F.linear(layer.norm1(tokens), layer.self_attn.in_proj_weight, layer.self_attn.in_proj_bias)[0].chunk(3, dim=-1)
        q, k = (x.unflatten(-1, (2, -1)).transpose(0, 1)[None] for x in (q, k))
        bias = torch.zeros(())
        if place is not None:
            q, k, bias = place(q, k)
        for head in range(2):
            scores = torch.stack([(k[0, head] * query).sum(1) for query in q[0, head]]) / math.sqrt(q.shape[-1])
            scores = scores + (0 if bias is None or not bias.ndim else bias[0, head if bias.shape[1] > 1 else 0])
            weights = scores.exp() / scores.exp().sum(1, keepdim=True)
            total += weights[num_tokens:, num_tokens:] / 4
    assert (found.weights.flatten(2).flatten(0, 1) - total).abs().max() < 1e-12
    sums = found.weights.sum((2, 3))
    assert (sums < 1).all() if num_tokens else (sums - 1).abs().max() < 1e-12


@pytest.mark.parametrize("backbone", [VIT, TNT], ids=["vit", "tnt"])
def test_features_are_the_patches_after_a_layer(backbone, tmp_path):
    """Of the last layer they are, after the last norm, the backbone's own map; of the first, what the second is given."""
    model, (image, *_) = make(tmp_path, **{**backbone, "MODEL__BACKBONE__NUM_TOKENS": 2}), draw()
    found = patch_features(model, image, [0, 2])
    trunk, batch = model.detector.backbone, model.detector.preprocess([image])
    with torch.no_grad():
        (expected,) = trunk(batch.images, batch.padding_mask)
        last = trunk.encoder.norm(found[2].double().permute(1, 2, 0)).permute(2, 0, 1)
    assert list(found) == [0, 2] and found[0].shape == (64 if backbone is TNT else 32, HEIGHT, WIDTH)
    assert (last - expected[0]).abs().max() < 1e-4 * expected.abs().max()
    given = arguments_of(trunk.encoder.layers[1], model.detector, image)[0][0, 2:]
    assert torch.equal(found[0], given.T.reshape(found[0].shape).float())


def test_pixels_are_those_of_their_patch(tmp_path):
    """In the first layer a patch's pixels see each other alone: another patch in row 1, column 3 changes its tile alone."""
    model, (image, *_) = make(tmp_path, **TNT), draw()
    other = image.clone()
    other[:, 16:32, 48:64] = 255 - image[:, 16:32, 48:64]
    before, after = (pixel_features(model, one, [0])[0] for one in (image, other))
    assert before.shape == (HEIGHT, WIDTH, 4, 4)
    differs = (before - after).abs().amax((2, 3)) > 1e-6
    assert differs.nonzero().tolist() == [[1, 3]]
    trunk = model.detector.backbone
    batch = model.detector.preprocess([image])
    patch = batch.images[:, :, 16:32, 48:64]
    with torch.no_grad():
        pixels = (trunk.pixel_embed(patch) + trunk.pixel_table)[0].flatten(1).T  # (16, C')
        expected = trunk.encoder.layers[0].inner(pixels[None], None, None)[0].mean(1)
    assert (before[1, 3].flatten() - expected).abs().max() < 1e-5


def test_tiles_by_hand():
    """2 x 2 patches of 1 x 2 cells, with a column and a row of NaN between them."""
    values = torch.arange(8.0).view(2, 2, 1, 2)
    assert as_tiles(values).nan_to_num(-1).tolist() == [[0, 1, -1, 2, 3], [-1] * 5, [4, 5, -1, 6, 7]]


@pytest.fixture
def figures(monkeypatch):
    """What would be saved, by the name of its file."""
    kept = {}
    for module in (patches, attention_module):
        monkeypatch.setattr(module, "save_figure", lambda figure, path: kept.__setitem__(path.name, figure))
    return kept


def test_the_tile_at_a_place_is_where_this_patch_looks(figures, tmp_path):
    weights = torch.rand(HEIGHT, WIDTH, HEIGHT, WIDTH)
    patches.draw_attention_grids([("one", AttentionByPosition(1, weights))], "title", tmp_path / "grids.png")
    drawn = torch.from_numpy(figures["grids.png"].axes[0].images[0].get_array().filled(math.nan))
    assert drawn.shape == (HEIGHT * (HEIGHT + 1) - 1, WIDTH * (WIDTH + 1) - 1)
    for y in range(HEIGHT):
        for x in range(WIDTH):
            tile = drawn[y * (HEIGHT + 1) :][:HEIGHT, x * (WIDTH + 1) :][:, :WIDTH]
            assert (tile - weights[y, x] * HEIGHT * WIDTH).abs().max() < 1e-6


def write(tmp_path, name, **more):
    path = tmp_path / f"{name}.yaml"
    path.write_text(config(tmp_path, **more).dump(), encoding="utf-8")
    return path


def call(*words):
    return CliRunner().invoke(main, [str(word) for word in words])


def test_models_are_drawn_side_by_side(figures, tmp_path):
    """The arrays of attention.png are those of the models, in multiples of even attention."""
    configs = [write(tmp_path, name, **{**VIT, "MODEL__BACKBONE__POSITION__NAME": name}) for name in ("none", "table")]
    Image.new("RGB", (30, 20), "red").save(tmp_path / "image.png")
    options = ["--output", tmp_path / "out", "--size", "48x80", "--input", tmp_path / "image.png"]
    result = call("patches", *configs, *options, "--layer", 2)
    assert result.exit_code == 0, result.output
    assert result.output.split() == [str(tmp_path / "out" / f"{name}.png") for name in ("attention", "grids")]
    red = torch.tensor([255, 0, 0], dtype=torch.uint8)[:, None, None].expand(3, 48, 80)
    for path, drawn, name in zip(configs, figures["attention.png"].axes, ("none", "table"), strict=False):
        torch.manual_seed(0)
        model = NamedDetector(name, build_detector(load_cfg(str(path))).eval())
        expected = patch_attention(model, [red], 2).weights.view(15, 15) * 15
        assert abs(drawn.images[0].get_array() - expected.numpy()).max() < 1e-5
        assert drawn.get_title().startswith(f"deit_tiny, {name}, random weights\nlayer 2")


def test_features_and_pixels_are_drawn(figures, tmp_path):
    path = write(tmp_path, "tnt", **TNT)
    for command, panels in (("features", 2 * 5), ("pixels", 2)):
        more = ["--channels", 5] if command == "features" else []
        result = call(command, path, "--output", tmp_path / "out", "--size", "48x80", "--layers", "0,2", *more)
        assert result.exit_code == 0, result.output
        assert result.output.strip() == str(tmp_path / "out" / f"{command}.png")
        assert len(figures[f"{command}.png"].axes) == panels
    channels = [int(axes.get_title()) for axes in figures["features.png"].axes]
    assert channels == channels_of(64, 5, 0) * 2 and len(set(channels)) == 5


def test_without_layers_they_are_first_middle_and_last(figures, tmp_path):
    result = call("pixels", write(tmp_path, "tnt", **TNT), "--output", tmp_path / "out", "--size", "32x48")
    assert result.exit_code == 0, result.output
    assert [axes.get_title() for axes in figures["pixels.png"].axes] == ["layer 0", "layer 1", "layer 2"]


@pytest.mark.parametrize(
    ("command", "more", "options", "message"),
    [
        ("patches", {}, [], "has no patches: its backbone is no DeiT, CPVT or TNT"),
        ("patches", VIT, ["--layer", 3], "deit_tiny, table, random weights has layers 0 to 2, not 3"),
        ("patches", VIT, ["--size", "48x50"], "--size 48x50: the sides must be multiples of 16 for deit_tiny"),
        ("features", VIT, ["--layers", "0;2"], "--layers '0;2' is not a list of numbers, such as 0,5,11"),
        ("features", VIT, ["--layers", "0,7"], "has layers 0 to 2, not 7"),
        ("pixels", VIT, [], "has no pixel tokens: its backbone is no TNT"),
    ],
)
def test_what_cannot_be_drawn_is_refused(command, more, options, message, tmp_path):
    path = write(tmp_path, "one", **more)
    result = call(command, path, "--output", tmp_path / "out", *(["--size", "32x48"] if "--size" not in options else []), *options)
    assert result.exit_code == 2 and message in result.output


def test_another_backbone_is_refused_in_python_too(tmp_path):
    with pytest.raises(BadInputError, match="its backbone is no DeiT"):
        patches.transformer_of(make(tmp_path))
