# SPDX-License-Identifier: Apache-2.0
"""The convolution inside feed-forward networks: against a plain loop, off the square, with padding."""

import pytest
import torch
from test_real_time_detr import images_of, make, run
from tiny import DEFORMABLE, random_config

from cpvt_det.builders import build_detector
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import padding_mask_of
from cpvt_det.models.encoder import Encoder
from cpvt_det.position import build_position

CHANNELS, LAYERS, HIDDEN, SHAPE = 8, 2, 12, (3, 5)
SIZES = [(3, 5), (2, 4)]


def encoding_of(**options):
    torch.manual_seed(0)
    return build_position("peg_ffn", CHANNELS, 1, LAYERS, 2, HIDDEN, **options).double()


@pytest.mark.parametrize("layer", range(LAYERS))
@pytest.mark.parametrize("kernel_size", [1, 3, 5])
def test_it_is_the_sum_over_neighbours_that_are_not_padded(layer, kernel_size):
    encoding, mask = encoding_of(kernel_size=kernel_size), padding_mask_of(SIZES, SHAPE)
    hidden = torch.randn(2, *SHAPE, HIDDEN).double()
    filled = hidden.masked_fill(mask[..., None], 1e6)
    found = encoding.feed(filled.flatten(1, 2), mask.flatten(1), [SHAPE], layer).unflatten(1, SHAPE)
    weight, bias, reach = encoding.pegs[layer].weight[:, 0], encoding.pegs[layer].bias, kernel_size // 2
    for image, (height, width) in enumerate(SIZES):
        for row in range(height):
            for column in range(width):
                expected = bias.clone()
                for i in range(max(0, row - reach), min(height, row + reach + 1)):
                    for j in range(max(0, column - reach), min(width, column + reach + 1)):
                        expected += weight[:, i - row + reach, j - column + reach] * hidden[image, i, j]
                assert (found[image, row, column] - expected).abs().max() < 1e-12


def test_in_an_encoder_it_stands_before_the_activation_of_every_network():
    """Against a layer written out; of tokens without positions."""
    encoding, mask = encoding_of(), padding_mask_of(SIZES, SHAPE).flatten(1)
    torch.manual_seed(1)
    encoder = Encoder(LAYERS, CHANNELS, 2, HIDDEN, 0.0, False, activation="gelu").double().eval()
    x = tokens = torch.randn(2, SHAPE[0] * SHAPE[1], CHANNELS).double()
    for index, layer in enumerate(encoder.layers):
        x = layer.norm1(x + layer.self_attn(x, x, x, mask))
        hidden = encoding.feed(layer.linear1(x), mask, [SHAPE], index)
        x = layer.norm2(x + layer.linear2(torch.nn.functional.gelu(hidden)))
    assert (encoder(tokens, None, mask, [SHAPE], encoding) - x).abs().max() < 1e-12


@pytest.mark.parametrize("position", ["peg_ffn", "peg_ffn+peg"])
def test_trained_weights_start_unchanged(position):
    """The answer of the same detector without it, up to rounding, as padded tokens are not left out; and its weights learn."""
    option = {"PEG_FFN": {"ZERO_INIT": True}, "PEG": {"ZERO_INIT": True}} if "+" in position else {"ZERO_INIT": True}
    more = {f"MODEL__POSITION__{key}": value for key, value in option.items()}
    plain, model = make("dfine", "none").eval(), make("dfine", position, **more).eval()
    missing = model.load_state_dict({**model.state_dict(), **plain.state_dict()})
    assert not missing.missing_keys
    expected, found = run(plain, images_of()), run(model, images_of())
    torch.testing.assert_close(found.logits, expected.logits, rtol=0, atol=1e-12)
    torch.testing.assert_close(found.boxes, expected.boxes, rtol=0, atol=1e-12)
    found.boxes.square().sum().backward()
    learns = [parameter for name, parameter in model.position.named_parameters() if "additive" in name or position == "peg_ffn"]
    assert len(learns) == 2 and all(parameter.grad.abs().max() > 0 for parameter in learns)


def test_what_it_cannot_do_is_refused():
    with pytest.raises(
        ConfigError, match="FeedForwardPEGEncoding acts inside layers, where it needs a single grid, .* or CPVTRealTimeDetr"
    ):
        build_detector(random_config(**DEFORMABLE, MODEL__POSITION__NAME="peg_ffn"))
    with pytest.raises(ValueError, match="an encoding inside layers needs one level, whose cells are one grid, got 2"):
        encoding_of().feed(torch.zeros(1, 30, HIDDEN), torch.zeros(1, 30, dtype=torch.bool), [SHAPE, SHAPE], 0)
    with pytest.raises(
        ValueError, match="kernel_size must be odd and at least 1, so that the kernel can be centred on a token; got 2"
    ):
        encoding_of(kernel_size=2)
