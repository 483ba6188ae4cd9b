# SPDX-License-Identifier: Apache-2.0
"""Masked batch norm: its gradient in every memory layout against differences, and all of it against torch on the valid cells."""

import pytest
import torch

from cpvt_det.layers.norm import MaskedBatchNorm2d

LAYOUTS = {
    "contiguous": lambda x: x.contiguous(),
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "tokens": lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2)[..., None],  # (B, C, N, 1) of strides 1 and 1
    "row of tokens": lambda x: x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2)[:, :, None],
}


def make_norm(channels=3):
    torch.manual_seed(0)
    norm = MaskedBatchNorm2d(channels).double()
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    torch.nn.init.normal_(norm.bias)
    return norm


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [True, False])
def test_the_gradient_is_that_of_differences(layout, masked):
    """With an in-place ReLU behind it, as in the backbone; torch's own gradient is wrong for a view of tokens of width 1."""
    norm = make_norm()

    def run(x, weight, bias):
        maps = LAYOUTS[layout](x)
        valid = torch.arange(maps[:, :1].numel()).view(maps[:, :1].shape) % 3 > 0 if masked else None
        return torch.func.functional_call(norm, {"weight": weight, "bias": bias}, (maps, valid)).relu_()

    x = torch.randn(2, 3, 4, 3, dtype=torch.float64, requires_grad=True)
    weight, bias = norm.weight.detach().requires_grad_(), norm.bias.detach().requires_grad_()
    assert torch.autograd.gradcheck(run, (x, weight, bias))


def test_a_mask_leaves_what_torch_makes_of_the_valid_cells_alone():
    """Outputs, gradients and running statistics, by gathering the valid cells into a list."""
    ours, theirs = make_norm(), torch.nn.BatchNorm1d(3).double()
    theirs.load_state_dict(ours.state_dict())
    x = torch.randn(2, 3, 5, 4, dtype=torch.float64)
    valid = torch.rand(2, 1, 5, 4) > 0.4
    first, second = (x.clone().requires_grad_() for _ in range(2))
    found = ours(first, valid).movedim(1, -1)[valid[:, 0]]
    expected = theirs(second.movedim(1, -1)[valid[:, 0]])
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    weights = torch.randn_like(expected)
    for out in (found, expected):
        (out * weights).sum().backward()
    torch.testing.assert_close(first.grad, second.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close([*ours.state_dict().values()], [*theirs.state_dict().values()], rtol=1e-12, atol=1e-12)
    for mine, parameter in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, parameter.grad, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    """A mean of 100: its square does not fit float16, and bfloat16 has three digits."""
    norm = MaskedBatchNorm2d(2)
    x = (torch.randn(2, 2, 40, 30) + 100).to(dtype)
    valid = torch.ones(2, 1, 40, 30, dtype=torch.bool)
    out = norm(x, valid)
    assert out.dtype == dtype
    expected = (x.float() - x.float().mean((0, 2, 3), keepdim=True)) / x.float().std((0, 2, 3), keepdim=True, unbiased=False)
    torch.testing.assert_close(out.float(), expected, rtol=0.01, atol=0.01)
