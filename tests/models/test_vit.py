# SPDX-License-Identifier: Apache-2.0
"""DeiT and CPVT as backbones: timm's numbers, the articles' sizes, an image alone and in any batch, what is refused."""

import itertools

import pytest
import timm
import torch
from tiny import DEFORMABLE, random_config
from torch import nn

from cpvt_det.builders import build_backbone, build_detector, build_optimizer
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import PaddedBatch
from cpvt_det.models import BACKBONE_REGISTRY
from cpvt_det.models.backbones.vit import vision_transformer
from cpvt_det.models.backbones.vit_weights import convert_deit
from cpvt_det.position import POSITION_REGISTRY

SMALL = {"MODEL__BACKBONE__EMBED_DIM": 16, "MODEL__BACKBONE__DEPTH": 3, "MODEL__BACKBONE__NUM_HEADS": 2}
VIT = {"MODEL__BACKBONE__NAME": "cpvt_tiny", "MODEL__BACKBONE__STAGES": (4,), "MODEL__BACKBONE__NORM": "FrozenBN"}
VIT |= {"MODEL__BACKBONE__FREEZE_AT": 2, **SMALL}
SIZES = [(48, 80), (37, 50), (96, 33)]  # partly covered patches too; the grids are 3 x 5, 3 x 4 and 6 x 3


def config(**more):
    return random_config(**{**VIT, **{f"MODEL__BACKBONE__{key}": value for key, value in more.items()}})


def make(**more):
    """A small backbone whose weights are large enough to show what they do."""
    torch.manual_seed(0)
    backbone = build_backbone(config(**more)).double().eval()
    for name, parameter in backbone.named_parameters():
        if name.startswith(("special", "position")):
            nn.init.normal_(parameter, std=0.5)
    return backbone


def draw(sizes=SIZES):
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *size, generator=generator, dtype=torch.float64) for size in sizes]


def count(backbone, classes=1000, heads=1):
    return sum(parameter.numel() for parameter in backbone.parameters()) + heads * classes * (backbone.channels[0] + 1)


# Sizes

FIVE = {"POSITION__NAME": "peg_plain", "POSITION__POSITIONS": [0, 1, 2, 3, 4]}


@pytest.mark.parametrize(
    ("family", "options", "numbers"),
    [
        ("deit", {}, (5_717_416, 22_050_664, 86_567_656)),
        ("deit", {"NUM_TOKENS": 2}, (5_910_800, 22_436_432, 87_338_192)),
        ("deit", {"POSITION__NAME": "none"}, (5_679_592, 21_975_016, 86_416_360)),
        ("deit", {"POSITION__NAME": "sine"}, (5_679_592, 21_975_016, 86_416_360)),
        ("deit", {"POSITION__NAME": "relative"}, (5_705_704, 22_001_128, 86_442_472)),
        ("cpvt", {}, (5_681_512, 21_978_856, 86_424_040)),
        ("cpvt", FIVE, (5_689_192, 21_994_216, 86_454_760)),
        ("cpvt", {"NUM_TOKENS": 0}, (5_681_320, 21_978_472, 86_423_272)),
        ("cpvt", {"NUM_TOKENS": 0, **FIVE}, (5_689_000, 21_993_832, 86_453_992)),
    ],
    ids=lambda value: "" if isinstance(value, tuple) else str(value),
)
def test_parameters_are_those_of_the_articles(family, options, numbers):
    """With a head of 1000 classes, for Ti, S, B: of DeiT timm's numbers, of the others sums by hand."""
    sizes = {key: VIT[key] for key in ("MODEL__BACKBONE__STAGES", "MODEL__BACKBONE__NORM", "MODEL__BACKBONE__FREEZE_AT")}
    for size, number in zip(("tiny", "small", "base"), numbers, strict=True):
        more = {f"MODEL__BACKBONE__{key}": value for key, value in {"NAME": f"{family}_{size}", **options}.items()}
        with torch.device("meta"):
            backbone = build_backbone(random_config(**sizes, **more))
        assert count(backbone, heads=2 if options.get("NUM_TOKENS") == 2 else 1) == number


# Values


@pytest.mark.parametrize("distilled", [False, True], ids=["one token", "distilled"])
@pytest.mark.parametrize("size", ["tiny", "small", "base"])
def test_features_and_gradients_are_timm_s_with_its_weights(size, distilled):
    """Widths and heads of DeiT, two layers (the largest has one, of 60 MB), a grid of 3 x 3; random weights, float64."""
    torch.manual_seed(0)
    name, depth = f"deit_{size}_distilled_patch16_224" if distilled else f"deit_{size}_patch16_224", 1 if size == "base" else 2
    theirs = timm.create_model(name, depth=depth, img_size=48).double()
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.05)
    more = {"NAME": f"deit_{size}", "DEPTH": depth, "EMBED_DIM": 0, "NUM_HEADS": 0, "POSITION__GRID": (3, 3)}
    ours = build_backbone(config(**more, NUM_TOKENS=1 + distilled)).double()
    converted = {key.removeprefix("backbone."): value for key, value in convert_deit(theirs.state_dict()).items()}
    ours.load_state_dict({key: value for key, value in converted.items() if "_embed." not in key or key.startswith("patch_")})
    images, images_too = (
        torch.randn(2, 3, 48, 48, generator=torch.Generator().manual_seed(1)).double().requires_grad_() for _ in "ab"
    )
    expected = theirs.forward_features(images)
    special, patches, _ = ours.tokens(images_too, torch.zeros(2, 48, 48, dtype=torch.bool))
    found = torch.cat((special, patches), dim=1)
    assert (found - expected).abs().max() < 1e-12
    weights = torch.randn_like(expected)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    assert (images.grad - images_too.grad).abs().max() < 1e-10
    gradients = {key: parameter.grad for key, parameter in theirs.named_parameters() if parameter.grad is not None}
    gradients = {key.removeprefix("backbone."): value for key, value in convert_deit(gradients).items()}
    assert gradients.keys() == {key for key, _ in ours.named_parameters()}
    for key, parameter in ours.named_parameters():
        assert (parameter.grad - gradients[key]).abs().max() < 1e-10, key


OF_DETECTORS = {"peg_query_key", "sine_scrambled"}


@pytest.mark.parametrize("num_tokens", [0, 1, 2])
@pytest.mark.parametrize("encoding", [*sorted(set(POSITION_REGISTRY.names) - OF_DETECTORS), "relative+peg", "rope+peg_plain"])
def test_an_image_s_tokens_are_its_own(encoding, num_tokens):
    """Alone and in a batch of three shapes, on canvases of multiples of a patch and on none; those of the map too."""
    options = {"POSITION__POSITIONS": [-1, 0, 2]} if encoding.startswith("peg") and encoding != "peg_ffn" else {}
    options |= {f"POSITION__{'TABLE__' * ('+' in encoding)}GRID": (3, 4)} if "table" in encoding else {}
    backbone = make(NUM_TOKENS=num_tokens, POSITION__NAME=encoding, **options)
    batch = PaddedBatch.from_images(draw(), 32)
    with torch.no_grad():
        special, patches, mask = backbone.tokens(batch.images, batch.padding_mask)
        (features,) = backbone(batch.images, batch.padding_mask)
        for number, image in enumerate(draw()):
            for divisor in (16, 1):
                alone = PaddedBatch.from_images([image], divisor)
                own, own_patches, own_mask = backbone.tokens(alone.images, alone.padding_mask)
                assert not own_mask.any() and (~mask[number]).sum() == own_patches.shape[1]
                assert (own_patches[0] - patches[number][~mask[number]]).abs().max() < 1e-10
                height, width = (-(-side // 16) for side in image.shape[1:])
                grid = own_patches[0].T.unflatten(1, (height, width))
                assert (grid - features[number, :, :height, :width]).abs().max() < 1e-10
                assert (own is None) == (num_tokens == 0) and (own is None or (own[0] - special[number]).abs().max() < 1e-10)


def test_an_encoding_keeps_to_the_patches():
    """The proof that the test before would see it: a table of the canvas instead of the image changes the tokens."""
    backbone, batch = make(NAME="deit_tiny", POSITION__GRID=(3, 4)), PaddedBatch.from_images(draw(), 32)
    with torch.no_grad():
        _, patches, mask = backbone.tokens(batch.images, batch.padding_mask)
        forward = backbone.position.forward
        backbone.position.forward = lambda features, masks: forward(features, [torch.zeros_like(own) for own in masks])
        _, spoilt, _ = backbone.tokens(batch.images, batch.padding_mask)
    assert (patches - spoilt)[~mask].abs().max() > 1e-2


@pytest.mark.parametrize("encoding", ["peg_plain", "relative", "rope_mixed", "table"])
def test_class_tokens_pass_an_encoding_by(encoding):
    """Bit for bit through what acts on the tokens; and inside the attention they are neither turned nor biased."""
    backbone = make(NUM_TOKENS=2, POSITION__NAME=encoding)
    seen = []
    for layer in backbone.encoder.layers:
        layer.register_forward_hook(lambda _, args, out: seen.append((args, out)))
    images = torch.randn(1, 3, 48, 80).double()
    with torch.no_grad():
        backbone.tokens(images, torch.zeros(1, 48, 80, dtype=torch.bool))
    for (_, out), (args, _) in itertools.pairwise(seen):
        assert torch.equal(out[:, :2], args[0][:, :2])
    place = seen[0][0][3]
    assert (place is None) == (encoding in ("peg_plain", "table"))
    if place is not None:
        queries, keys = (torch.randn(1, 2, 17, 8).double() for _ in range(2))
        turned, also, bias = place(queries, keys)
        assert torch.equal(turned[:, :, :2], queries[:, :, :2]) and torch.equal(also[:, :, :2], keys[:, :, :2])
        assert bias is None or (not bias[:, :, :2].any() and not bias[..., :2].any() and bias[:, :, 2:, 2:].any())


@pytest.mark.parametrize(("encoding", "moves"), [("none", False), ("peg_plain", True)])
def test_without_an_encoding_patches_have_no_order(encoding, moves):
    backbone = make(POSITION__NAME=encoding, NUM_TOKENS=1)
    images = draw([(48, 80)])[0][None]
    patches = images.unfold(2, 16, 16).unfold(3, 16, 16).flatten(2, 3)  # (1, 3, 15, 16, 16)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(2))
    shuffled = patches[:, :, order].unflatten(2, (3, 5)).permute(0, 1, 2, 4, 3, 5).reshape_as(images)
    mask = torch.zeros(1, 48, 80, dtype=torch.bool)
    with torch.no_grad():
        difference = (backbone.tokens(images, mask)[0] - backbone.tokens(shuffled, mask)[0]).abs().max()
    assert (difference > 1e-3) == moves and (moves or difference < 1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_parameter_of_a_step_has_a_gradient_and_recomputing_changes_none(checkpointing):
    gradients = []
    for recomputed in {False, checkpointing}:
        torch.manual_seed(0)
        backbone = vision_transformer("cpvt_tiny", embed_dim=16, depth=3, num_heads=2, drop_path=0.5, checkpointing=recomputed)
        torch.manual_seed(3)
        batch = PaddedBatch.from_images([image.float() for image in draw()], 32)
        maps = backbone.train()(batch.images, batch.padding_mask)
        maps[0].square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in backbone.named_parameters()})
    assert all(gradient.any() for gradient in gradients[0].values())
    assert all(torch.equal(gradients[0][name], gradients[-1][name]) for name in gradients[0])


def test_drop_path_rises_from_layer_to_layer_and_keeps_the_mean():
    backbone = vision_transformer("cpvt_tiny", drop_path=0.1, embed_dim=16, num_heads=2)
    assert isinstance(backbone.encoder.layers[0].drop_path, nn.Identity)
    rates = [layer.drop_path.p for layer in backbone.encoder.layers[1:]]
    assert rates == pytest.approx([0.1 * n / 11 for n in range(1, 12)])
    dropped = backbone.encoder.layers[-1].drop_path.train()
    torch.manual_seed(0)
    parts = dropped(torch.ones(4000, 2, 3))
    assert ((parts == 0) | (parts == 1 / 0.9)).all() and (parts == parts[:, :1, :1]).all()
    assert (parts[:, 0, 0] == 0).float().mean().item() == pytest.approx(0.1, abs=0.015)
    assert torch.equal(dropped.eval()(parts), parts)


@pytest.mark.parametrize("key", ["EMBED_DIM", "DEPTH", "NUM_HEADS"])
def test_sizes_below_zero_are_refused(key):
    with pytest.raises(ConfigError, match="EMBED_DIM, DEPTH and NUM_HEADS must be at least 0, got .*-1"):
        build_detector(random_config(**{**VIT, f"MODEL__BACKBONE__{key}": -1}))


def test_initial_values_are_deit_s():
    backbone = vision_transformer("deit_tiny", depth=2)
    weights = [
        backbone.encoder.layers[0].linear1.weight,
        backbone.encoder.layers[1].self_attn.in_proj_weight,
        backbone.position.table,
    ]
    assert [weight.std().item() for weight in weights] == pytest.approx([0.02] * 3, rel=0.05)
    assert not backbone.encoder.layers[0].linear1.bias.any() and not backbone.encoder.layers[0].self_attn.in_proj_bias.any()
    assert backbone.encoder.layers[0].norm1.eps == backbone.encoder.norm.eps == 1e-6


# In detectors


@pytest.mark.parametrize("kind", ["detr", "deformable", "pyramid"])
def test_detectors_on_a_vision_transformer_answer_alike_in_any_batch(kind):
    more = {} if kind == "detr" else {**DEFORMABLE, "MODEL__DETECTOR__NUM_LEVELS": 3}
    more |= {"MODEL__NECK__NAME": "simple_pyramid"} if kind == "pyramid" else {}
    torch.manual_seed(0)
    detector = build_detector(random_config(**VIT, **more)).double().eval()
    assert detector.strides == {"detr": [16], "deformable": [16, 32, 64], "pyramid": [8, 16, 32]}[kind]
    batch = PaddedBatch.from_images(draw(), detector.size_divisibility)
    with torch.no_grad():
        together = detector(batch.images, batch.padding_mask)
        for number, image in enumerate(draw()):
            for divisor in (detector.size_divisibility, 1):
                alone = PaddedBatch.from_images([image], divisor)
                single = detector(alone.images, alone.padding_mask)
                assert (single.logits[:, 0] - together.logits[:, number]).abs().max() < 1e-10
                assert (single.boxes[:, 0] - together.boxes[:, number]).abs().max() < 1e-10


def test_layer_decay_multiplies_by_what_comes_after():
    """Three layers: the norm once, the last layer 0.5, the PEG after layer 0 as that layer 0.125, patches and tokens 0.0625."""
    cfg = random_config(**VIT, SOLVER__LAYER_DECAY=0.5, SOLVER__BACKBONE_LR=1.0, SOLVER__BASE_LR=7.0)
    detector = build_detector(cfg)
    groups = build_optimizer(cfg, detector).param_groups
    rate_of = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    found = {name: rate_of[id(parameter)] for name, parameter in detector.named_parameters()}
    expected = {
        "backbone.encoder.norm.weight": 1,
        "backbone.encoder.layers.2.linear1.weight": 0.5,
        "backbone.encoder.layers.0.norm1.bias": 0.125,
        "backbone.position.pegs.0.0.conv.weight": 0.125,
        "backbone.patch_embed.weight": 0.0625,
        "backbone.special_tokens": 0.0625,
        "input_proj.weight": 7,
    }
    assert {name: found[name] for name in expected} == expected


# What is refused


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            {"STAGES": (5,)},
            r"patches of 16 pixels has one map, of stride 16: its stages are \(4,\), got \(5,\); set MODEL.BACKBONE",
        ),
        ({"STAGES": (3,)}, r"got \(3,\); .*, and for more levels MODEL.NECK.NAME to simple_pyramid"),
        ({"PATCH_SIZE": 14}, "the side of a patch must be 2, 4, 8, 16, ... pixels, got 14"),
        (
            {"NUM_TOKENS": 3},
            r"the number of tokens besides the patches must be 0, 1 \(class\) or 2 \(class and distillation\), got 3",
        ),
        ({"DROP_PATH": 1.0}, "the probability of dropping a path must be at least 0 and below 1, got 1"),
        ({"POSITION__POSITIONS": [3]}, r"PEG positions must be different layers from -1 \(before the first\) to 2, got \[3\]"),
        ({"POSITION__NAME": "pge"}, r"unknown position encoding 'pge' \(did you mean 'peg'\?\)"),
        ({"POSITION__GRID": (7, 7)}, "unknown option of position encoding 'peg_plain' 'grid'"),
        ({"POSITION__KERNEL": 5}, "unknown option of position encoding 'peg_plain' 'kernel'"),
        (
            {"NAME": "deit_tiny", "POSITION__POSITIONS": [1]},
            "unknown option of position encoding 'table' 'positions'; .* it belongs to peg,",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(more, message):
    with pytest.raises(ConfigError, match=message):
        build_detector(config(**more))


def test_keys_of_a_transformer_are_refused_by_other_backbones():
    for key, value in (("NUM_TOKENS", 2), ("DROP_PATH", 0.1), ("POSITION__NAME", "sine")):
        with pytest.raises(
            ConfigError, match="unknown option of backbone 'resnet10'|the backbone 'resnet10' does not accept a position encoding"
        ):
            build_detector(random_config(**{f"MODEL__BACKBONE__{key}": value}))
    cfg = random_config(SOLVER__LAYER_DECAY=0.7)
    detector = build_detector(cfg)
    detector.backbone = nn.Sequential(detector.backbone)
    with pytest.raises(ConfigError, match="LAYER_DECAY is 0.7, but the backbone does not define its layers"):
        build_optimizer(cfg, detector)


def test_layer_decay_of_a_resnet_counts_stages():
    """Up to stage 3: layer2 is the last one, layer1 and the stem come before."""
    cfg = random_config(SOLVER__LAYER_DECAY=0.5, SOLVER__BACKBONE_LR=1.0, SOLVER__BASE_LR=7.0)
    detector = build_detector(cfg)
    groups = build_optimizer(cfg, detector).param_groups
    rate_of = {id(parameter): group["lr"] for group in groups for parameter in group["params"]}
    found = {name: rate_of[id(parameter)] for name, parameter in detector.named_parameters()}
    expected = {"layer2.0.conv1.weight": 1, "layer1.0.bn2.bias": 0.5, "conv1.weight": 0.25, "bn1.weight": 0.25}
    assert {name: found[f"backbone.body.{name}"] for name in expected} == expected
    assert found["input_proj.weight"] == 7


@pytest.mark.parametrize(("key", "value"), [("MIN_SIZE_TRAIN", (32, 8)), ("MIN_SIZE_TEST", 15), ("MAX_SIZE_TRAIN", 12)])
def test_images_smaller_than_a_patch_are_refused_before_the_first(key, value):
    smallest = min(value) if isinstance(value, tuple) else value
    with pytest.raises(
        ConfigError, match=f"INPUT.{key} allows images of {smallest} pixels, which is smaller than a patch .16 pixels."
    ):
        build_detector(random_config(**{**VIT, f"INPUT__{key}": value}))
    build_detector(random_config(**{**VIT, "INPUT__MIN_SIZE_TEST": 0}))  # no resize


def test_a_backbone_is_one_program_at_any_size_and_batch():
    """TNT, which reshapes most, with an encoding inside the attention and one on the tokens; the table's own test is its own."""
    backbone = make(NAME="tnt_small", POSITION__NAME="relative+peg_plain", EMBED_DIM=64, DEPTH=1).float()
    batch, rows, columns = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "rows", "columns"))
    shapes = {"images": {0: batch, 2: 16 * rows, 3: 16 * columns}, "padding_mask": {0: batch, 1: 16 * rows, 2: 16 * columns}}
    inputs = (torch.zeros(3, 3, 48, 64), torch.zeros(3, 48, 64, dtype=torch.bool))
    program = torch.export.export(backbone, inputs, dynamic_shapes=shapes).module()
    batch = PaddedBatch.from_images([image.float() for image in draw()], 16)
    with torch.no_grad():
        (expected,), (found,) = (run(batch.images, batch.padding_mask) for run in (backbone, program))
    assert found.shape == expected.shape == (3, 64, 6, 5) and (found - expected).abs().max() < 1e-5


def test_their_names_are_registered():
    assert {f"{family}_{size}" for family in ("deit", "cpvt") for size in ("tiny", "small", "base")} <= set(BACKBONE_REGISTRY.names)
