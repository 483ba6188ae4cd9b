# SPDX-License-Identifier: Apache-2.0
"""Every check of ``plug_matrix`` on every family; stand-ins of the same names and calls where a checkout is needed."""

import logging
import sys
import types

import pytest
import torch
from plug_matrix.checks import CHECKS, check, compiles, exports, plugged, recorded
from plug_matrix.examples import EXAMPLES, PEERS
from torch import nn

from cpvt_det.plug import add_peg
from cpvt_det.plug.families import FAMILIES, find_owner

STAND_INS = {
    "models.transformer": ("Transformer",),
    "models.deformable_transformer": ("DeformableTransformer",),
    "projects.detr.modeling.transformer": ("DetrTransformer", "DetrTransformerEncoder", "DetrTransformerDecoder"),
    "projects.dab_detr.modeling.dab_transformer": (
        "DabDetrTransformer",
        "DabDetrTransformerEncoder",
        "DabDetrTransformerDecoder",
    ),
    "projects.deformable_detr.modeling.deformable_transformer": (
        "DeformableDetrTransformer",
        "DeformableDetrTransformerEncoder",
        "DeformableDetrTransformerDecoder",
    ),
    "projects.dino.modeling.dino_transformer": ("DINOTransformer", "DINOTransformerEncoder", "DINOTransformerDecoder"),
}


class Layer(nn.Module):
    """Attention with an additive encoding and a padding mask, and a norm; each kind of encoder calls it in its own way."""

    def __init__(self, width, batch_first):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=batch_first)
        self.norm = nn.LayerNorm(width)

    def attend(self, x, pos, mask):
        query = x + pos
        return self.norm(x + self.attention(query, query, x, key_padding_mask=mask, need_weights=False)[0])


class DETRLayer(Layer):
    def forward(self, src, src_mask=None, src_key_padding_mask=None, pos=None):
        return self.attend(src, pos, src_key_padding_mask)


class DeformableLayer(Layer):
    def forward(self, src, pos, reference_points, spatial_shapes, level_start_index, padding_mask=None):
        return self.attend(src, pos, padding_mask)


class DetrexLayer(Layer):
    def forward(self, query, key, value, query_pos=None, query_key_padding_mask=None, **kwargs):
        return self.attend(query, query_pos, query_key_padding_mask)


class Encoder(nn.Module):
    """Two layers, called as theirs are."""

    def __init__(self, layer, width, batch_first):
        super().__init__()
        self.embed_dim = width
        self.layers = nn.ModuleList(layer(width, batch_first) for _ in range(2))

    def forward(self, *args, **kwargs):
        x, args = (args[0], args[1:]) if args else (kwargs.pop("query"), ())
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return x


class DETRTransformer(nn.Module):
    """Called with a map, a mask, queries and an encoding; the memory is also the answer."""

    def __init__(self, width=32, *args, **kwargs):
        super().__init__()
        self.d_model = width
        self.encoder = Encoder(DETRLayer, width, batch_first=False)

    def forward(self, src, mask, query_embed, pos_embed):
        x, pos = (value.flatten(2).permute(2, 0, 1) for value in (src, pos_embed))
        return self.encoder(x, src_key_padding_mask=mask.flatten(1), pos=pos) + pos


class DetrexDETRTransformer(nn.Module):
    def __init__(self, encoder, decoder):
        super().__init__()
        self.encoder, self.embed_dim = encoder, encoder.embed_dim

    def forward(self, x, mask, query_embed, pos_embed):
        x, pos = (value.flatten(2).permute(2, 0, 1) for value in (x, pos_embed))
        return self.encoder(query=x, key=None, value=None, query_pos=pos, query_key_padding_mask=mask.flatten(1))


class DeformableTransformer(nn.Module):
    """Called with lists over levels of maps, masks and encodings."""

    def __init__(self, width=32, *args, num_feature_levels=3, **kwargs):
        super().__init__()
        self.encoder = Encoder(DeformableLayer, width, batch_first=True)
        self.level_embed = nn.Parameter(torch.randn(num_feature_levels, width))

    def flat(self, srcs, masks, pos_embeds, level_embed):
        x = torch.cat([src.flatten(2).transpose(1, 2) for src in srcs], 1)
        pos = [pos.flatten(2).transpose(1, 2) + level for pos, level in zip(pos_embeds, level_embed, strict=True)]
        return x, torch.cat([mask.flatten(1) for mask in masks], 1), torch.cat(pos, 1)

    def forward(self, srcs, masks, pos_embeds, query_embed=None):
        x, mask, pos = self.flat(srcs, masks, pos_embeds, self.level_embed)
        return self.encoder(x, pos, None, None, None, mask)


class DetrexDeformableTransformer(DeformableTransformer):
    def __init__(self, encoder, decoder, num_feature_levels=3, **kwargs):
        super().__init__()
        del self.level_embed
        self.encoder = encoder
        self.level_embeds = nn.Parameter(torch.randn(num_feature_levels, encoder.embed_dim))

    def forward(self, multi_level_feats, multi_level_masks, multi_level_pos_embeds, query_embed, *args):
        x, mask, pos = self.flat(multi_level_feats, multi_level_masks, multi_level_pos_embeds, self.level_embeds)
        return self.encoder(query=x, key=None, value=None, query_pos=pos, query_key_padding_mask=mask)


class Decoder(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__()


class DetrexEncoder(Encoder):
    def __init__(self, width, *args, **kwargs):
        super().__init__(DetrexLayer, width, batch_first="num_feature_levels" in kwargs)


def stand_in(name):
    """The class that stands for theirs of this name."""
    if name.endswith("Encoder"):
        return DetrexEncoder
    if name.endswith("Decoder"):
        return Decoder
    named = {"Transformer": DETRTransformer, "DeformableTransformer": DeformableTransformer}
    several = name.startswith(("Deformable", "DINO"))
    return named.get(name, DetrexDeformableTransformer if several else DetrexDETRTransformer)


def module_of(path, monkeypatch):
    """The module of this name, made with those that hold it where there is none."""
    if path not in sys.modules:
        monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
        above, _, name = path.rpartition(".")
        if above:
            monkeypatch.setattr(module_of(above, monkeypatch), name, sys.modules[path], raising=False)
    return sys.modules[path]


@pytest.fixture
def example(request, monkeypatch):
    """The example, with stand-ins in the place of a checkout; skipped where its library is not installed."""
    example = request.param
    if not example.installed():
        pytest.skip(f"{example.needs} is not installed")
    if example.needs in PEERS:
        for path, names in STAND_INS.items():
            module = module_of(path, monkeypatch)
            for name in names:
                cls = type(name, (stand_in(name),), {"__module__": path, "__qualname__": name})
                monkeypatch.setattr(module, name, cls, raising=False)
    logging.getLogger("torch").setLevel(logging.ERROR)
    return example


def cases(*wanted):
    marks = {example.name: [pytest.mark.detectron2] if example.needs == "detectron2" else [] for example in EXAMPLES}
    return [pytest.param(e, id=e.name, marks=marks[e.name]) for e in EXAMPLES if not wanted or e.name in wanted]


HAS_MASK = {family.name for family in FAMILIES if family.mask_meaning}
CHEAP = [name for name in CHECKS if name not in ("compile", "export", "trained 20 steps")]


@pytest.mark.parametrize("example", cases(), indirect=True)
@pytest.mark.parametrize("name", CHEAP)
def test_check_holds(example, name):
    expected = "yes"
    if name == "padding" and find_owner(example.model())[2].name not in HAS_MASK:
        expected = "-"
    assert check(example, name) == expected


@pytest.mark.parametrize("example", cases(), indirect=True)
def test_peg_trains(example):
    assert CHECKS["trained 20 steps"](example, steps=5)


@pytest.mark.parametrize("example", cases(), indirect=True)
def test_plugged_model_compiles_in_one_graph(example):
    assert compiles(example, bare=False, backend="eager")


@pytest.mark.parametrize("example", cases(), indirect=True)
def test_plugged_model_exports(example):
    assert exports(example, bare=False)


@pytest.mark.parametrize("example", [case for case in cases() if case.values[0].needs in PEERS], indirect=True)
def test_peg_does_not_see_under_the_padding(example):
    """Other content under the padding of the transformer's input: valid tokens leave the PEG with the same bits."""
    results = []
    for content in (0.0, 1e3):
        (features, masks, *others), _ = example.inputs(example.sizes[0])
        if isinstance(features, list):
            features = [f.masked_fill(m[:, None], content) for f, m in zip(features, masks, strict=True)]
        else:
            features = features.masked_fill(masks[:, None], content)
        model = plugged(example)
        with recorded(model) as calls, torch.no_grad():
            model(features, masks, *others)
        results.append([result[~mask] for _, mask, _, result in calls])
    assert len(results[0]) == (3 if isinstance(features, list) else 1)
    for first, second in zip(*results, strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("example", [case for case in cases() if case.values[0].needs in PEERS], indirect=True)
def test_replaced_encoding_is_a_zero_encoding_of_the_encoder(example):
    args, _ = example.inputs(example.sizes[0])
    where = 2 if isinstance(args[0], list) else 3
    encoding = args[where]
    zeros = [torch.zeros_like(e) for e in encoding] if where == 2 else torch.zeros_like(encoding)
    model = example.model()
    expected = model(*(zeros if i == where else arg for i, arg in enumerate(args)))
    if hasattr(model, "d_model"):  # in this stand-in the "decoder" adds the encoding, which must have stayed
        expected = expected + encoding.flatten(2).permute(2, 0, 1)
    add_peg(model, position="replace")
    assert torch.equal(model(*args), expected)


def _windowed(name):
    pytest.importorskip("transformers")
    return next(example for example in EXAMPLES if example.name == f"transformers {name}")


@pytest.mark.parametrize(("name", "size"), [("LW-DETR", (64, 64)), ("LW-DETR", (96, 160)), ("RF-DETR", (64, 64))])
def test_across_windows_a_peg_gives_what_it_gives_on_the_whole_map(name, size):
    example = _windowed(name)
    model = example.model()
    with torch.no_grad():
        before = model(*example.inputs(size)[0]).feature_maps[0]  # the first layer's; transformers' hooks are now installed
        add_peg(model, after=0, norm="none")
        peg = model.encoder.layer[0].peg
        nn.init.uniform_(peg.scale, 0.2, 1.0)
        after = model(*example.inputs(size)[0]).feature_maps[0]
        tokens = before.flatten(2).transpose(1, 2)
        expected = peg(tokens, torch.zeros(tokens.shape[:2], dtype=torch.bool), before.shape[-2:])
    if name == "LW-DETR":  # RF-DETR's maps are after a norm
        torch.testing.assert_close(after.flatten(2).transpose(1, 2), expected)
    assert not torch.equal(before, after)


@pytest.mark.parametrize("size", [(64, 64), (96, 160), (160, 96)])
def test_a_peg_receives_rf_detrs_tokens_row_by_row_and_leaves_its_class_tokens(size):
    example = _windowed("RF-DETR")
    model = add_peg(example.model(), after=0)
    images = example.inputs(size)[0][0]
    layer = model.encoder.layer[0]
    layer.forward = lambda hidden_states, *args, **kwargs: hidden_states
    with torch.no_grad(), recorded(model) as calls:
        windowed = model.embeddings(images)
        found = []
        hook = layer.register_forward_hook(lambda _, args, output: found.append(output))
        nn.init.uniform_(layer.peg.scale, 0.2, 1.0)
        model(images)
        hook.remove()
        model.config.num_windows = 1
        rows = model.embeddings(images)[:, 1:]
    ((tokens, mask, shape, _),) = calls
    assert tuple(shape) == (size[0] // 16, size[1] // 16) and not mask.any()
    assert torch.equal(tokens, rows)
    assert torch.equal(found[0][:, 0], windowed[:, 0]) and not torch.equal(found[0][:, 1:], windowed[:, 1:])
