# SPDX-License-Identifier: Apache-2.0
"""add_peg, remove_peg, fold_peg, peg_report: what they refuse, and the ways in which a careless hook fails without an error."""

import copy
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from conftest import ROOT
from plug_matrix.checks import close, plugged, recorded
from plug_matrix.examples import EXAMPLES
from plug_matrix.table import main
from torch import nn

from cpvt_det.common.errors import WeightsError
from cpvt_det.plug import PlugError, add_peg, fold_peg, peg_report, remove_peg
from cpvt_det.plug.families import FAMILIES
from cpvt_det.plug.hooks import apply_levels
from cpvt_det.position import PEGDetection
from cpvt_det.position.encoding import build_position

BY_NAME = {example.name: example for example in EXAMPLES}
GRID = (2, 4)
MASK = torch.tensor([[False] * 8, [False, False, False, True] * 2])


def make_encoder(**options):
    """nn.TransformerEncoder, the one family that every torch brings, in evaluation."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 3).eval()


def example_of(name):
    example = BY_NAME[name]
    if not example.installed():
        pytest.skip(f"{example.needs} is not installed")
    return example


TOKENS = torch.randn(2, 8, 32, generator=torch.Generator().manual_seed(0))


# What is refused


def test_unknown_model_lists_the_known():
    with pytest.raises(PlugError, match="no place for PEG is known in Sequential") as caught:
        add_peg(nn.Sequential(nn.Conv2d(3, 3, 1)))
    for family in FAMILIES:
        assert family.name in str(caught.value) and family.classes[0] in str(caught.value)


def test_several_places_side_by_side_are_named():
    with pytest.raises(PlugError, match=r"several places for PEG; pass one of these modules: 0, 1"):
        add_peg(nn.Sequential(make_encoder(), make_encoder()), grid=GRID)


@pytest.mark.parametrize("how", ["wrapper", "in place", "inside"])
def test_compiled_models_are_refused(how):
    model = make_encoder()
    if how == "wrapper":
        model = torch.compile(model, backend="eager")
    elif how == "in place":
        model.compile(backend="eager")
    else:
        model = nn.Sequential(torch.compile(model, backend="eager"))
    with pytest.raises(PlugError, match="is compiled.*add it before torch.compile"):
        add_peg(model, grid=GRID)


def test_models_wrapped_for_several_processes_are_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(make_encoder())
        with pytest.raises(PlugError, match="DistributedDataParallel.*add the PEG to the model inside"):
            add_peg(wrapped, grid=GRID)
    finally:
        dist.destroy_process_group()
    with pytest.raises(PlugError, match="would not synchronise the PEG's gradients"):
        add_peg(nn.DataParallel(make_encoder()), grid=GRID)
    with pytest.raises(PlugError, match="would not synchronise the PEG's gradients"):
        add_peg(type("FSDPModule", (nn.TransformerEncoder,), {})(make_encoder().layers[0], 2), grid=GRID)


def test_added_twice_is_an_error():
    model = add_peg(make_encoder(), grid=GRID)
    with pytest.raises(PlugError, match="already has a PEG"):
        add_peg(model, after=1, grid=GRID)
    with pytest.raises(PlugError, match="has no PEG"):
        remove_peg(remove_peg(model))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": 3}, r"no layer 3; known: 0 to 2, or layers.0, layers.1, layers.2"),
        ({"after": -1}, "no layer -1"),
        ({"after": [0, 7]}, "no layer 7"),
        ({"after": "layers.9"}, "no layer 'layers.9'"),
        ({"after": []}, "at least one"),
        ({"after": [1, "layers.1"]}, "each only once"),
        ({"position": "swap"}, "'keep' or 'replace', got 'swap'"),
        ({"position": "replace"}, "nothing to replace"),
        ({"grid": None}, r"needs grid=\(H, W\)"),
        ({"kernel": 5}, "unexpected keyword argument 'kernel'"),
        ({"norm": "LN"}, "unknown norm 'LN'"),
        ({"kernel_size": 2}, "odd"),
    ],
)
def test_impossible_arguments_leave_the_model_alone(options, message):
    model = make_encoder()
    expected, keys = model(TOKENS), set(model.state_dict())
    with pytest.raises((ValueError, TypeError), match=message):
        add_peg(model, **{"grid": GRID, **options})
    assert set(model.state_dict()) == keys
    assert torch.equal(model(TOKENS), expected)
    add_peg(model, grid=GRID)


def test_a_grid_is_refused_where_the_model_knows_its_own():
    with pytest.raises(PlugError, match=r"has its own grid; remove grid=\(H, W\)"):
        add_peg(example_of("torchvision VisionTransformer").model(), grid=GRID)


def test_an_attribute_of_the_same_name_is_left_alone():
    model = make_encoder()
    model.layers[0].peg = nn.Identity()
    with pytest.raises(PlugError, match="layers.0 already has an attribute 'peg', which is not from add_peg"):
        add_peg(model, grid=GRID)


# Grid and mask


def test_a_grid_that_is_not_the_tokens_is_refused():
    model = add_peg(make_encoder(), grid=(3, 3))
    with pytest.raises(PlugError, match=r"a grid of 3 x 3 has 9 tokens, but the layer returned 8"):
        model(TOKENS)
    model.peg_grid = GRID
    model(TOKENS)


def test_dropped_tokens_have_no_grid():
    pytest.importorskip("timm")
    from timm.models.vision_transformer import VisionTransformer

    model = VisionTransformer(img_size=(32, 64), embed_dim=32, depth=1, num_heads=2, patch_drop_rate=0.5)
    add_peg(model)
    with pytest.raises(
        PlugError, match="a grid of 2 x 4 has 8 tokens, but the layer, after 1 class and register tokens, returned 4"
    ):
        model(torch.randn(1, 3, 32, 64))
    model.eval()(torch.randn(1, 3, 32, 64))


def test_a_mask_of_the_other_meaning_is_refused():
    model = add_peg(make_encoder(), grid=GRID)
    message = "the top left token of an image is padded; src_key_padding_mask must be True on the padding"
    with pytest.raises(PlugError, match=message):
        model(TOKENS, src_key_padding_mask=~MASK)


def test_a_mask_of_the_other_meaning_is_refused_in_transformers():
    example = example_of("transformers DETR")
    _, inputs = example.inputs(example.sizes[0])
    inputs["pixel_mask"] = 1 - inputs["pixel_mask"]
    with pytest.raises(PlugError, match="pixel_mask must be 1 on the image"):
        add_peg(example.model())(**inputs)


def test_a_mask_that_is_not_bool_is_refused():
    model = add_peg(make_encoder(), grid=GRID)
    with pytest.raises(PlugError, match=r"must be bool, got torch.float32"):
        model(TOKENS, src_key_padding_mask=MASK.float())


def test_a_layer_that_runs_alone_does_not_use_the_last_images_grid():
    example = example_of("timm VisionTransformer")
    model = add_peg(example.model())
    example.run(model, example.sizes[0])
    with pytest.raises(PlugError, match="the layer was called alone"):
        model.blocks[0](torch.randn(1, 35, 32))


def test_replicas_of_data_parallel_are_refused():
    model = add_peg(make_encoder(), grid=GRID)
    model._is_replica = True  # what torch.nn.parallel.replicate sets
    with pytest.raises(PlugError, match="use DistributedDataParallel"):
        model(TOKENS)


@pytest.mark.parametrize(("name", "prefix"), [("timm VisionTransformer", 3), ("torchvision VisionTransformer", 1), ("timm TNT", 1)])
def test_class_and_register_tokens_are_untouched(name, prefix):
    example = example_of(name)
    model, bare = plugged(example), example.model()
    outputs = {}
    for one in (model, bare):
        layer = (one.blocks if hasattr(one, "blocks") else one.encoder.layers)[0]
        layer.register_forward_hook(lambda _, args, output, one=one: outputs.update({one: output}))
        example.run(one, example.sizes[0])
    first, second = (output[1] if isinstance(output, tuple) else output for output in (outputs[model], outputs[bare]))
    assert torch.equal(first[:, :prefix], second[:, :prefix])
    assert (first[:, prefix:] != second[:, prefix:]).any(-1).all()


# Levels


@pytest.mark.parametrize("share", [False, True])
def test_levels_are_those_of_our_own_encoding(share):
    """The same weights in PEGEncoding: each level on its own grid, with its own mask."""
    example = example_of("transformers Deformable-DETR")
    model = plugged(example, share_levels=share)
    pegs = model.model.encoder.layers[0].peg
    assert len(pegs) == (1 if share else 3)
    ours = build_position("peg", 32, num_levels=3, num_layers=1, share_levels=share, zero_init=True).eval()
    ours.load_state_dict({f"pegs.0.{name}": value for name, value in pegs.state_dict().items()})
    given = plugged(example)
    with recorded(given) as calls:
        example.run(given, example.sizes[0])
    tokens, masks = (torch.cat([call[part] for call in calls], 1) for part in (0, 1))
    shapes = [tuple(call[2]) for call in calls]
    assert shapes == [(16, 32), (8, 16), (4, 8)]
    after = []
    model.model.encoder.layers[0].register_forward_hook(lambda _, args, output: after.append(output))
    example.run(model, example.sizes[0])
    assert torch.equal(after[0], ours.inject(tokens, masks, shapes, 0))
    found = apply_levels(pegs.train(), tokens, masks, shapes)  # with the statistics of a batch
    assert torch.equal(found, ours.train().inject(tokens, masks, shapes, 0))


def test_other_numbers_of_levels_are_refused():
    pegs = nn.ModuleList(PEGDetection(4) for _ in range(2))
    with pytest.raises(PlugError, match="2 PEGs, but 3 levels"):
        apply_levels(pegs, torch.zeros(1, 3, 4), torch.zeros(1, 3, dtype=torch.bool), [(1, 1)] * 3)


def test_replacing_keeps_the_level_embedding():
    example = example_of("transformers Deformable-DETR")
    seen = []
    for replace in (False, True):
        model = example.model()
        if replace:
            add_peg(model, position="replace")
        encoder = model.model.encoder
        encoder.register_forward_pre_hook(lambda _, a, kwargs: seen.append(kwargs["spatial_position_embeddings"]), with_kwargs=True)
        example.run(model, example.sizes[0])
    assert not torch.equal(seen[0][:, :512], model.model.level_embed[0].expand(2, 512, -1))
    assert torch.equal(seen[1][:, :512], model.model.level_embed[0].expand(2, 512, -1))
    assert torch.equal(seen[1][:, -32:], model.model.level_embed[2].expand(2, 32, -1))


# Tables


@pytest.mark.parametrize(
    ("name", "table"),
    [
        ("timm VisionTransformer", "pos_embed"),
        ("torchvision VisionTransformer", "encoder.pos_embedding"),
        ("timm TNT", "patch_pos"),
    ],
)
def test_a_replaced_table_leaves_and_comes_back(name, table):
    """As with a table of zeros; its key comes back at its place, the parameter itself too, also in a copy."""
    example = example_of(name)
    zero = example.model()
    nn.init.zeros_(zero.get_parameter(table))
    model = example.model()
    parameter, state = model.get_parameter(table), copy.deepcopy(model.state_dict())
    add_peg(model, position="replace")
    assert table not in model.state_dict() and table in state
    assert torch.equal(example.run(model, example.sizes[0])[0], example.run(zero, example.sizes[0])[0])
    other = remove_peg(copy.deepcopy(model))
    remove_peg(model)
    assert model.get_parameter(table) is parameter and other.get_parameter(table) is not parameter
    for one in (model, other):
        assert list(one.state_dict()) == list(state)
        assert all(torch.equal(value, state[key]) for key, value in one.state_dict().items())


def test_a_distilled_transformer_without_its_table_runs():
    """timm's adds the table whether there is one or not."""
    timm = pytest.importorskip("timm")
    model = timm.create_model("deit_tiny_distilled_patch16_224", img_size=64, depth=2).eval()
    image = torch.rand(1, 3, 64, 64)
    with torch.no_grad():
        before = model(image)
        add_peg(model, position="replace")
        assert not torch.equal(model(image), before)
        remove_peg(model)
        assert torch.equal(model(image), before)


def test_a_replaced_table_follows_the_models_dtype():
    example = example_of("torchvision VisionTransformer")
    model = remove_peg(add_peg(example.model(), position="replace").double())
    assert model.encoder.pos_embedding.dtype == torch.float64


# Where hooks go wrong


def test_code_that_was_compiled_before_sees_the_peg():
    """``add_peg`` cannot see that another object holds compiled code of the model; that code must not ignore the PEG."""
    model = make_encoder()
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        before = compiled(TOKENS)
        add_peg(model, grid=GRID)
        nn.init.ones_(model.layers[0].peg.scale)
        after = compiled(TOKENS)
        assert (before - after).abs().max() > 0.1 and torch.allclose(after, model(TOKENS), atol=1e-5)
        remove_peg(model)
        assert torch.allclose(compiled(TOKENS), before, atol=1e-6)


def test_gradient_checkpointing_has_the_same_gradients():
    """The layer is computed again in the backward pass, after the forward pass has ended."""
    example = example_of("timm VisionTransformer")
    gradients = []
    for checkpointing in (False, True):
        model = plugged(example).train()
        model.set_grad_checkpointing(checkpointing)
        example.run(model, example.sizes[0])[0].square().sum().backward()
        gradients.append([parameter.grad for parameter in model.blocks[0].peg.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*gradients, strict=True))


def test_several_layers_have_their_own():
    model = add_peg(make_encoder(), after=[0, "layers.2"], grid=GRID, norm="GN", zero_init=False)
    assert [hasattr(layer, "peg") for layer in model.layers] == [True, False, True]
    assert model.layers[0].peg is not model.layers[2].peg
    with recorded(model) as calls:
        model(TOKENS, src_key_padding_mask=MASK)
    assert [call[2] for call in calls] == [GRID, GRID]
    assert all(torch.equal(call[1], MASK) for call in calls)


@pytest.mark.parametrize("batch_first", [True, False])
def test_both_layouts_of_the_encoder_of_torch(batch_first):
    layer = nn.TransformerEncoderLayer(32, 2, 32, dropout=0.0, batch_first=batch_first)
    model = add_peg(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False).eval(), grid=GRID)
    nn.init.ones_(model.layers[0].peg.scale)
    with recorded(model) as calls:
        output = model(TOKENS if batch_first else TOKENS.transpose(0, 1), src_key_padding_mask=MASK)
    assert torch.equal(output if batch_first else output.transpose(0, 1), calls[0][3])


def test_peg_has_the_models_dtype_and_mode():
    peg = add_peg(make_encoder().double().train(), grid=GRID).layers[0].peg
    assert peg.conv.weight.dtype == torch.float64 and peg.training


@pytest.mark.parametrize("name", ["torch.nn.TransformerEncoder", "timm VisionTransformer", "transformers RT-DETR"])
def test_autocast_changes_neither_bits_nor_dtypes(name):
    example = example_of(name)
    results = []
    for model in (example.model(), add_peg(example.model(), **example.options)):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(example.run(model, example.sizes[0]))
    for first, second in zip(*results, strict=True):
        assert first.dtype == second.dtype and torch.equal(first, second)


# Weights


@pytest.mark.parametrize("name", ["transformers DETR", "transformers Deformable-DETR"])
def test_save_pretrained_keeps_the_peg_and_weights_bring_it_back(name, tmp_path):
    example = example_of(name)
    model = plugged(example)
    model.save_pretrained(tmp_path, max_shard_size="30KB")  # in several files
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    bare = type(model).from_pretrained(tmp_path).eval()
    assert not hasattr(bare.model.encoder.layers[0], "peg")
    back = add_peg(bare, weights=tmp_path)
    first, second = (example.run(one, example.sizes[0]) for one in (model, back))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_weights_are_a_file_or_a_dict_too(tmp_path):
    model = add_peg(make_encoder(), grid=GRID)
    nn.init.uniform_(model.layers[0].peg.scale)
    torch.save(model.state_dict(), tmp_path / "model.pth")
    for weights in (model.state_dict(), {"model": model.state_dict()}, tmp_path / "model.pth"):
        back = add_peg(make_encoder(), grid=GRID, weights=weights)
        assert torch.equal(back.layers[0].peg.scale, model.layers[0].peg.scale)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"after": 1}, r"lacks layers\.1\.peg.*also has layers\.0\.peg"),
        ({"after": [0, 1]}, r"lacks layers\.1\.peg"),
        ({"norm": "none"}, r"also has layers\.0\.peg\.norm"),
        ({"kernel_size": 5}, r"with a different shape layers\.0\.peg\.conv\.weight"),
    ],
)
def test_weights_that_do_not_fit_leave_the_model_without_a_peg(options, message):
    weights = add_peg(make_encoder(), grid=GRID).state_dict()
    model = make_encoder()
    with pytest.raises(WeightsError, match=message):
        add_peg(model, grid=GRID, weights=weights, **options)
    add_peg(model, grid=GRID, weights=weights)


def test_folders_without_weights_are_refused(tmp_path):
    with pytest.raises(WeightsError, match="contains no .safetensors"):
        add_peg(make_encoder(), grid=GRID, weights=tmp_path)


# Fold and report


def test_fold_keeps_the_outputs_and_the_report_shows_it():
    example = example_of("transformers Deformable-DETR")
    model = plugged(example)
    for module in model.modules():
        if isinstance(module, PEGDetection):
            nn.init.uniform_(module.norm.running_var, 0.5, 1.5)
    before = example.run(model, example.sizes[0])
    report = peg_report(model).splitlines()
    assert [line.split()[0] for line in report[2:]] == [f"model.encoder.layers.0.peg.{level}" for level in range(3)]
    assert report[2].split()[1:3] == ["384", "MaskedBatchNorm2d"]  # 9 * 32 of the kernel, 2 * 32 of the norm, 32 of the scale
    fold_peg(model)
    assert close(before, example.run(model, example.sizes[0]))
    assert peg_report(model).count("NoNorm") == 3
    remove_peg(model)


def test_fold_and_report_need_a_peg():
    for function in (fold_peg, peg_report):
        with pytest.raises(PlugError, match="has no PEG"):
            function(make_encoder())
    with pytest.raises(ValueError, match="evaluation mode"):
        fold_peg(add_peg(make_encoder(), grid=GRID).train())


# The package and the command


def test_importing_it_imports_no_family():
    code = "import sys, cpvt_det.plug; print([m for m in ('transformers', 'timm', 'detectron2') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--peer", "yolo=x"], "not NAME=PATH with a name of detr, deformable-detr, detrex"),
        (["--peer", "detr"], "not NAME=PATH"),
        (["--only", "no such family"], "nothing to try"),
    ],
)
def test_plug_matrix_refuses(arguments, message):
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 2 and message in result.output


def test_plug_matrix_makes_a_row():
    result = CliRunner().invoke(main, ["--only", "nn.TransformerEncoder"])
    assert result.exit_code == 0
    cells = [cell.strip() for cell in result.stdout.splitlines()[-1].split("|")[1:-1]]
    assert cells == ["torch.nn.TransformerEncoder", *["yes"] * 10]


def test_a_folder_that_is_no_checkout_is_told_in_the_row(tmp_path):
    result = CliRunner().invoke(main, ["--peer", f"detr={tmp_path}", "--only", "facebook"])
    assert result.exit_code == 2 and "is no checkout of facebookresearch/detr" in result.output


def test_docs_have_every_family():
    text = (ROOT / "docs" / "plug.md").read_text(encoding="utf-8")
    for family in FAMILIES:
        assert all(f"`{ending}`" in text for ending in family.classes)
    for example in EXAMPLES:
        assert f"{example.name} |" in text


def test_two_threads_in_one_model_are_an_error_and_never_a_wrong_answer():
    """One after the other they may; a pass that another one broke into must not go on with its grid."""
    import threading

    from cpvt_det.plug.hooks import ForwardContext

    context = ForwardContext()
    context.record(([(2, 3)], None))
    assert context.read() == ([(2, 3)], None)
    other = threading.Thread(target=context.record, args=(([(4, 5)], None),))
    other.start()
    other.join()
    with pytest.raises(PlugError, match="two threads"):
        context.read()
    context.record(([(6, 7)], None))
    assert context.read() == ([(6, 7)], None)


@pytest.mark.parametrize("grid", [8, (2,), (-2, -4), ("a", "b"), (2.0, 4.0), (2, 4, 1), (0, 8), (True, 8)])
def test_a_grid_that_is_none_is_refused_and_nothing_changes(grid):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    before = encoder.use_nested_tensor
    with pytest.raises(PlugError, match="two whole numbers above 0"):
        add_peg(encoder, grid=grid)
    assert encoder.use_nested_tensor == before and not hasattr(encoder.layers[0], "peg")


@pytest.mark.parametrize("after", [None, 0.0, [[0]], True, [], 5, -1])
def test_a_place_that_is_none_is_refused(after):
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    with pytest.raises(PlugError, match=r"has no layer|at least one layer, and each only once"):
        add_peg(encoder, after=after, grid=(2, 4))


def test_an_encoding_that_is_not_handed_over_cannot_be_replaced_in_silence():
    from cpvt_det.plug.hooks import ZeroArgument

    hook = ZeroArgument("pos", 3)
    assert hook(nn.Identity(), (1, 2, 3, torch.ones(2)), {})[0][3].sum() == 0
    with pytest.raises(PlugError, match="without 'pos'"):
        hook(nn.Identity(), (1, 2, 3), {"position": torch.ones(2)})


def test_fold_checks_every_peg_before_the_first_changes():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    add_peg(encoder, after=[0, 1], grid=(2, 4)).eval()
    encoder.layers[1].train()
    with pytest.raises(ValueError, match="can be folded"):
        fold_peg(encoder)
    assert not isinstance(encoder.layers[0].peg.norm, nn.Identity)
