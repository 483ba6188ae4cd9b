# SPDX-License-Identifier: Apache-2.0
"""What is noted from outside is what the layers did, and noting it changes nothing."""

import pytest
import torch
from tiny import DETECTORS, ENCODED, INSIDE_LAYERS, random_config
from torch import nn

from cpvt_det.builders import build_detector
from cpvt_det.ops import routes
from cpvt_det.ops.deformable_attention import ms_deform_attn
from cpvt_det.position.peg import PEGEncoding
from cpvt_det.visualize.position import record_added
from cpvt_det.visualize.recording import attention_layers, attention_weights, record_inputs

SIZES = [(61, 90), (40, 50), (64, 33)]  # none a multiple of a stride, each padded
ENCODINGS = ["none", "sine", "learned", "peg", "sine+peg", "relative", "rope_mixed"]


def make(kind="detr", encoding="peg", **more):
    """A detector with weights that tell queries, heads and places apart, and a padded batch for it."""
    cfg = random_config(**{**DETECTORS[kind], "MODEL__POSITION__NAME": encoding, "MODEL__DETR__ENC_LAYERS": 2, **more})
    torch.manual_seed(0)
    detector = build_detector(cfg).eval()
    for parameter in detector.transformer.parameters():
        nn.init.normal_(parameter, std=0.3)
    generator = torch.Generator().manual_seed(1)
    images = [torch.randint(256, (3, *size), dtype=torch.uint8, generator=generator) for size in SIZES]
    return detector, detector.preprocess(images)


def run(detector, batch):
    with torch.no_grad():
        return detector(batch.images, batch.padding_mask)


def noted(detector, batch):
    """Every attention layer to the image with its inputs and its own output."""
    layers = {(part, n): layer for part, found in attention_layers(detector).items() for n, layer in enumerate(found)}
    outputs, handles = {}, []
    for key, layer in layers.items():
        handles.append(layer.register_forward_hook(lambda _, args, out, key=key: outputs.__setitem__(key, out)))
    with record_inputs(layers) as inputs:
        run(detector, batch)
    for handle in handles:
        handle.remove()
    assert len(layers) == 4 and inputs.keys() == outputs.keys() == layers.keys()
    return [(layers[key], inputs[key], outputs[key]) for key in layers]


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_times_values_are_the_output_of_attention(encoding):
    """On padded batches, whatever queries, keys and values share."""
    detector, batch = make(encoding=encoding)
    for attention, (queries, keys, values, mask, *place), output in noted(detector, batch):
        with torch.no_grad():
            weights = attention_weights(attention, queries, keys, values, mask, *place)
            channels = queries.shape[-1]
            v = values @ attention.in_proj_weight[2 * channels :].T + attention.in_proj_bias[2 * channels :]
            v = v.unflatten(-1, (attention.num_heads, -1)).transpose(1, 2)
            expected = attention.out_proj((weights @ v).transpose(1, 2).flatten(2))
        assert mask.any() and not weights.masked_select(mask[:, None, None].expand_as(weights)).any()
        assert (expected - output).abs().max() < 1e-5
        assert output.abs().max() > 0.1


def test_weights_are_those_that_torch_returns():
    detector, batch = make(encoding="sine")
    for attention, (queries, keys, values, mask, *_), _ in noted(detector, batch):
        reference = nn.MultiheadAttention(queries.shape[-1], attention.num_heads, batch_first=True)
        reference.load_state_dict(attention.state_dict())
        with torch.no_grad():
            options = {"key_padding_mask": mask, "average_attn_weights": False}
            _, expected = reference(queries, keys, values, **options)
            found = attention_weights(attention, queries, keys, padding_mask=mask, chosen=[3, 1])
        assert (found - expected[:, :, [3, 1]]).abs().max() < 1e-6


def sampling_points(attention, queries, reference_points, levels):
    """arXiv 2010.04159, equation 3 and section A.4 (offsets from boxes)."""
    heads, num_levels, points = attention.samples
    offsets = attention.sampling_offsets(queries).unflatten(-1, (heads, num_levels, points, 2))
    weights = attention.attention_weights(queries).unflatten(-1, (heads, -1)).softmax(-1).unflatten(-1, (num_levels, points))
    centers, sizes = reference_points[:, :, None, :, None, :2], reference_points[:, :, None, :, None, 2:]
    return centers + (offsets / points * sizes / 2 if sizes.numel() else offsets / levels.sizes[:, None]), weights


@pytest.mark.parametrize("two_stage", [True, False])
def test_sampling_points_give_the_output_of_deformable_attention(two_stage):
    """References are points in the encoder, and in the decoder boxes or, without refinement, points."""
    more = {"MODEL__DETECTOR__TWO_STAGE": two_stage, "MODEL__DETECTOR__BOX_REFINEMENT": two_stage}
    detector, batch = make("deformable", "sine_offset+peg", **more)
    kinds = set()
    for attention, (queries, references, tokens, levels), output in noted(detector, batch):
        kinds.add(references.shape[-1])
        with torch.no_grad():
            locations, weights = sampling_points(attention, queries, references, levels)
            found = attention.sample(queries, references, levels)
            assert (found[0] - locations).abs().max() < 1e-5 and (found[1] - weights).abs().max() < 1e-6
            values = attention.value_proj(tokens).masked_fill(levels.padding_mask[..., None], 0)
            values = values.unflatten(-1, (attention.samples[0], -1))
            attended = ms_deform_attn(values, levels.shapes, locations, weights, "eager")
            expected = attention.output_proj(attended)
        assert (weights.sum((-1, -2)) - 1).abs().max() < 1e-6
        assert (expected - output).abs().max() < 1e-5
        assert output.abs().max() > 0.1
    assert kinds == ({2, 4} if two_stage else {2})


@pytest.mark.parametrize("kind", DETECTORS)
def test_recording_changes_nothing_and_leaves_nothing(kind, monkeypatch):
    """Bit for bit without packing; a recorded layer gets the whole batch, so with it only up to rounding."""
    detector, batch = make(kind, "sine+peg")
    packed = run(detector, batch)
    monkeypatch.setattr(routes, "is_on", lambda route, is_on=routes.is_on: route != "packing" and is_on(route))
    before = run(detector, batch)
    with record_inputs({"layer": attention_layers(detector)["encoder"][0]}), record_added(detector.position) as added:
        during = run(detector, batch)
    assert added
    assert torch.equal(before.logits, during.logits) and torch.equal(before.boxes, during.boxes)
    torch.testing.assert_close(packed.logits, during.logits, rtol=0, atol=1e-5)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in detector.modules())
    assert "inject" not in vars(detector.position)


def test_a_failing_model_is_left_without_hooks_too():
    detector, _ = make()
    with pytest.raises(ZeroDivisionError), record_added(detector.position):
        raise ZeroDivisionError
    assert "inject" not in vars(detector.position) and not detector.position._forward_hooks


@pytest.mark.parametrize(("kind", "encoding"), ENCODED)
def test_what_is_added_is_what_the_encoding_gives(kind, encoding):
    """The additive part is its own answer; with PEG, tokens before plus what was added are the next layer's input."""
    detector, batch = make(kind, encoding)
    norms = detector.transformer.encoder.layers
    with record_inputs({"next": norms[1]}) as inputs, record_added(detector.position) as added:
        outputs = []
        handle = norms[0].register_forward_hook(lambda _, args, out: outputs.append(out))
        run(detector, batch)
        handle.remove()
    wheres = [part.where for part in added]
    acts = isinstance(detector.position, PEGEncoding)
    is_added = detector.position.additive is not None if acts else encoding not in ("none", *INSIDE_LAYERS)
    assert wheres == ["to queries and keys"] * is_added + ["after layer 0"] * acts
    assert [part.seen_by for part in added] == [0 if part.layer is None else 1 for part in added]
    tokens, injected = inputs["next"][0], outputs[0]
    for part in added:
        flat = torch.cat([level.flatten(2).transpose(1, 2) for level in part.maps], 1)
        assert flat.shape == tokens.shape and flat.abs().max() > 0.01
        if part.layer == 0:
            assert (injected + flat - tokens).abs().max() < 1e-5
            injected = tokens
    assert torch.equal(injected, tokens)
