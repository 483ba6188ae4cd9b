# SPDX-License-Identifier: Apache-2.0
"""DeiT's table against torch's interpolation, on each image's own grid."""

import pytest
import torch
import torch.nn.functional as F

from cpvt_det.common.structures import padding_mask_of
from cpvt_det.position import build_position

CANVAS = (50, 76)
SIZES = [(14, 14), (24, 24), (30, 38), (50, 76), (7, 9), (1, 3), (14, 20), (13, 14)]


def encode(grid=(14, 14), sizes=SIZES, dtype=torch.float64, **options):
    torch.manual_seed(0)
    encoding = build_position("table", 6, grid=grid, **options).to(dtype)
    torch.nn.init.normal_(encoding.table)
    features = torch.zeros(len(sizes), 6, *CANVAS, dtype=dtype)
    (found,) = encoding([features], [padding_mask_of(sizes, CANVAS)])
    return encoding.table, found


@pytest.mark.parametrize("antialias", [False, True])
@pytest.mark.parametrize("grid", [(14, 14), (5, 9)])
def test_table_is_torch_s_bicubic_interpolation_to_the_valid_cells_of_each_image(grid, antialias):
    table, found = encode(grid, antialias=antialias)
    for image, (height, width) in enumerate(SIZES):
        expected = F.interpolate(table[None], (height, width), mode="bicubic", antialias=antialias)[0]
        assert (found[image, :, :height, :width] - expected).abs().max() < 1e-12, (height, width)


def test_the_two_interpolations_differ_in_enlarging_too():
    """So that a checkpoint of one is not evaluated with the other in silence: 14 to 24 cells, a unit-normal table."""
    plain, smooth = (encode(antialias=antialias)[1] for antialias in (False, True))
    assert plain.isfinite().all() and smooth.isfinite().all()  # under the padding too
    assert (plain - smooth)[1, :, :24, :24].abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_an_image_of_the_table_s_size_gets_it_bit_for_bit(dtype):
    table, found = encode(dtype=dtype)
    assert torch.equal(found[0, :, :14, :14], table) and found.dtype == dtype


def test_half_precision_features_get_the_rounded_float32():
    torch.manual_seed(0)
    encoding = build_position("table", 6)
    mask = padding_mask_of([(9, 20)], CANVAS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        (half,) = encoding([torch.zeros(1, 6, *CANVAS, dtype=torch.bfloat16)], [mask])
    (exact,) = encoding([torch.zeros(1, 6, *CANVAS)], [mask])
    assert half.dtype == torch.bfloat16 and torch.equal(half, exact.bfloat16())


def test_table_is_the_same_program_at_any_size():
    """Exported once, it is what it was; no loop over images, no size in the program."""
    encoding = build_position("table", 6)

    class Program(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.encoding = encoding

        def forward(self, feature, mask):
            return self.encoding([feature], [mask])[0]

    batch, height, width = (torch.export.Dim(name, min=2, max=64) for name in ("batch", "height", "width"))
    shapes = {"feature": {0: batch, 2: height, 3: width}, "mask": {0: batch, 1: height, 2: width}}
    program = torch.export.export(
        Program(), (torch.zeros(3, 6, 9, 8), padding_mask_of([(9, 8), (2, 5), (3, 3)], (9, 8))), dynamic_shapes=shapes
    )
    inputs = torch.zeros(2, 6, 17, 30), padding_mask_of([(17, 12), (5, 30)], (17, 30))
    assert torch.equal(program.module()(*inputs), encoding([inputs[0]], [inputs[1]])[0])


@pytest.mark.parametrize("grid", [(0, 3), (14,)])
def test_a_grid_without_cells_is_refused(grid):
    with pytest.raises(ValueError, match="the grid of a table has a height and a width of at least 1, got"):
        build_position("table", 6, grid=grid)


def test_a_mask_that_is_not_bool_is_refused():
    with pytest.raises(TypeError, match="must be bool"):
        build_position("table", 6)([torch.zeros(1, 6, 2, 3)], [torch.zeros(1, 2, 3)])
