# SPDX-License-Identifier: Apache-2.0
"""The CPU kernels around Winograd's products in ``fast/convolution.py``: transforms of maps, filters and gradients to Winograd's
domain and back.

A map is (B, H, W * C), channels last. A row of tiles covers two rows of the map, and a tile covers two by two cells. Tiles are
(16, tiles, C) and filters are (16, C', C), where the first dimension holds the 16 numbers of Winograd's domain. Each loop runs
along channels or whole rows and writes only one array, so that the compiler can vectorise it.
"""

import functools

import numpy as np
import torch
from torch import Tensor

from cpvt_det.ops.numba_threads import Kernel, cut, inlined, run

MOST_SUMS = 1 << 26  # numbers that all threads together may hold as sums of gradients; each thread has its own
BLOCK = 1 << 20  # numbers in a block's tiles, before and after the products; they stay in the cache in between


def convolve(x: Tensor, weight: Tensor, bias: Tensor | None, turned: bool = False) -> Tensor:
    """The convolution of (B, C, H, W) by (C', C, 3, 3) -> (B, C', H, W), both channels last.

    With ``turned``, the kernels are rotated by half a turn and lead from C' to C channels. Of the output's gradient, this gives the
    gradient of the input.
    """
    batch, _, height, width = x.shape
    weight = weight.detach().permute(0, 2, 3, 1).contiguous()  # (C', C, 3, 3) -> (C', 3, 3, C)
    filters = weight.new_empty(16, weight.shape[0], weight.shape[3])
    run(_filters_to_tiles, (weight.numpy(), filters.numpy(), turned), cut(len(weight), filters.numel()))
    filters = filters if turned else filters.transpose(1, 2)  # (16, C', C) -> (16, C, C')
    channels = filters.shape[2]
    bias = x.new_zeros(channels) if bias is None else bias.detach()
    out = torch.empty((batch, channels, height, width), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    run(_convolve_rows, (_rows(x), filters, bias.numpy(), _rows(out)), _pieces(x, channels))
    return out


def weight_gradient(x: Tensor, grad: Tensor) -> Tensor:
    """The gradient of the kernels (C', C, 3, 3) from input (B, C, H, W) and output gradient (B, C', H, W), channels last."""
    channels, out_channels = x.shape[1], grad.shape[1]
    most = max(1, MOST_SUMS // (16 * channels * out_channels))
    sums = run(_correlate_rows, (_rows(x), _rows(grad), channels, out_channels), _pieces(x, out_channels, most))
    total = functools.reduce(Tensor.add_, sums)
    weight = x.new_empty(out_channels, 3, 3, channels)
    run(_tiles_to_filters, (total.numpy(), weight.numpy()), cut(out_channels, total.numel()))
    return weight.permute(0, 3, 1, 2)


def _convolve_rows(x: Tensor, filters: Tensor, bias, out: Tensor, start: int, stop: int) -> None:
    _, channels, out_channels = filters.shape
    columns = -(-x.shape[2] // channels // 2)
    step, before, after = _buffers(columns, channels, out_channels, stop - start)
    source, target = x.numpy(), out.numpy()
    for first in range(start, stop, step):
        last = min(first + step, stop)
        count = (last - first) * columns
        tiles = before[: 16 * count * channels].view(16, count, channels)
        products = after[: 16 * count * out_channels].view(16, count, out_channels)
        _map_to_tiles(source, tiles.numpy(), channels, first, last)
        torch.bmm(tiles, filters, out=products)
        _tiles_to_map(products.numpy(), bias, target, first, last)


def _correlate_rows(x: Tensor, grad: Tensor, channels: int, out_channels: int, start: int, stop: int) -> Tensor:
    """(16, C', C): the sum over tiles of gradients times inputs."""
    columns = -(-x.shape[2] // channels // 2)
    step, before, after = _buffers(columns, channels, out_channels, stop - start)
    total = x.new_zeros(16, out_channels, channels)
    of_x, of_grad = x.numpy(), grad.numpy()
    for first in range(start, stop, step):
        last = min(first + step, stop)
        count = (last - first) * columns
        tiles = before[: 16 * count * channels].view(16, count, channels)
        gradients = after[: 16 * count * out_channels].view(16, count, out_channels)
        _map_to_tiles(of_x, tiles.numpy(), channels, first, last)
        _gradient_to_tiles(of_grad, gradients.numpy(), out_channels, first, last)
        total.baddbmm_(gradients.transpose(1, 2), tiles)
    return total


def _buffers(columns: int, channels: int, out_channels: int, rows: int) -> tuple[int, Tensor, Tensor]:
    """The number of tile rows in a block, and memory for its tiles before and after the products."""
    step = max(1, min(BLOCK // (16 * (channels + out_channels) * columns), rows))
    before, after = (
        torch.empty(16 * step * columns * count, dtype=torch.float32, device="cpu") for count in (channels, out_channels)
    )
    return step, before, after


def _rows(x: Tensor) -> Tensor:
    """(B, C, H, W), channels last -> (B, H, W * C), in the same memory."""
    return x.detach().permute(0, 2, 3, 1).flatten(2)


def _pieces(x: Tensor, out_channels: int, most: int = 1 << 30) -> list[tuple[int, int]]:
    """The rows of tiles, cut into at most ``most`` pieces for threads."""
    rows = x.shape[0] * -(-x.shape[2] // 2)
    pieces = cut(rows, 4 * x.numel() * out_channels)
    return pieces if len(pieces) <= most else [(rows * i // most, rows * (i + 1) // most) for i in range(most)]


@Kernel
def _map_to_tiles(x, tiles, channels, start, stop):
    """Rows of tiles from start to stop: B^T d B of every tile's 4 x 4 cells d, zero outside the map."""
    height, length = x.shape[1:]
    width = length // channels
    rows, columns = (height + 1) // 2, (width + 1) // 2
    part = np.empty((4, length), x.dtype)
    zeros = np.zeros(length, x.dtype)
    for row in range(start, stop):
        image, y = row // rows, 2 * (row % rows)
        d0 = x[image, y - 1] if y > 0 else zeros
        d1 = x[image, y]
        d2 = x[image, y + 1] if y + 1 < height else zeros
        d3 = x[image, y + 2] if y + 2 < height else zeros
        for k in range(length):
            part[0, k] = d0[k] - d2[k]
        for k in range(length):
            part[1, k] = d1[k] + d2[k]
        for k in range(length):
            part[2, k] = d2[k] - d1[k]
        for k in range(length):
            part[3, k] = d1[k] - d3[k]
        for i in range(4):
            line = part[i]
            for column in range(columns):
                t, b = (row - start) * columns + column, 2 * column * channels
                a, c, d = b - channels, b + channels, b + 2 * channels
                has_c, has_d = 2 * column + 1 < width, 2 * column + 2 < width
                if column > 0 and has_d:
                    for k in range(channels):
                        tiles[4 * i, t, k] = line[a + k] - line[c + k]
                    for k in range(channels):
                        tiles[4 * i + 1, t, k] = line[b + k] + line[c + k]
                    for k in range(channels):
                        tiles[4 * i + 2, t, k] = line[c + k] - line[b + k]
                    for k in range(channels):
                        tiles[4 * i + 3, t, k] = line[b + k] - line[d + k]
                else:
                    for k in range(channels):
                        at_a = line[a + k] if column > 0 else np.float32(0)
                        at_b = line[b + k]
                        at_c = line[c + k] if has_c else np.float32(0)
                        at_d = line[d + k] if has_d else np.float32(0)
                        tiles[4 * i, t, k] = at_a - at_c
                        tiles[4 * i + 1, t, k] = at_b + at_c
                        tiles[4 * i + 2, t, k] = at_c - at_b
                        tiles[4 * i + 3, t, k] = at_b - at_d


@Kernel
def _tiles_to_map(tiles, bias, out, start, stop):
    """Rows of tiles from start to stop: A^T m A of every tile's 16 numbers m, and the bias."""
    channels = tiles.shape[2]
    height, length = out.shape[1:]
    width = length // channels
    rows, columns = (height + 1) // 2, (width + 1) // 2
    wide = columns * channels
    part = np.empty((4, wide), out.dtype)
    flat = tiles.reshape(16, -1)
    for row in range(start, stop):
        image, y, first = row // rows, 2 * (row % rows), (row - start) * wide
        for below in range(min(2, height - y)):
            for j in range(4):
                a, b = flat[4 * below + j, first : first + wide], flat[4 + 4 * below + j, first : first + wide]
                c, line = flat[8 + 4 * below + j, first : first + wide], part[j]
                if below == 0:
                    for k in range(wide):
                        line[k] = a[k] + b[k] + c[k]
                else:
                    for k in range(wide):
                        line[k] = a[k] - b[k] - c[k]
            target = out[image, y + below]
            p0, p1, p2, p3 = part[0], part[1], part[2], part[3]
            for column in range(columns):
                source, place = column * channels, 2 * column * channels
                for k in range(channels):
                    target[place + k] = p0[source + k] + p1[source + k] + p2[source + k] + bias[k]
                if 2 * column + 1 < width:
                    place += channels
                    for k in range(channels):
                        target[place + k] = p1[source + k] - p2[source + k] - p3[source + k] + bias[k]


@Kernel
def _gradient_to_tiles(grad, tiles, channels, start, stop):
    """Rows of tiles from start to stop: A g A^T of every tile's 2 x 2 gradients g, zero outside the map."""
    height, length = grad.shape[1:]
    width = length // channels
    rows, columns = (height + 1) // 2, (width + 1) // 2
    part = np.empty((4, length), grad.dtype)
    zeros = np.zeros(length, grad.dtype)
    for row in range(start, stop):
        image, y = row // rows, 2 * (row % rows)
        g0 = grad[image, y]
        g1 = grad[image, y + 1] if y + 1 < height else zeros
        for k in range(length):
            part[0, k] = g0[k]
        for k in range(length):
            part[1, k] = g0[k] + g1[k]
        for k in range(length):
            part[2, k] = g0[k] - g1[k]
        for k in range(length):
            part[3, k] = -g1[k]
        for i in range(4):
            line = part[i]
            for column in range(columns):
                t, a = (row - start) * columns + column, 2 * column * channels
                b = a + channels
                if 2 * column + 1 < width:
                    for k in range(channels):
                        tiles[4 * i, t, k] = line[a + k]
                    for k in range(channels):
                        tiles[4 * i + 1, t, k] = line[a + k] + line[b + k]
                    for k in range(channels):
                        tiles[4 * i + 2, t, k] = line[a + k] - line[b + k]
                    for k in range(channels):
                        tiles[4 * i + 3, t, k] = -line[b + k]
                else:
                    for k in range(channels):
                        tiles[4 * i, t, k] = line[a + k]
                        tiles[4 * i + 1, t, k] = line[a + k]
                        tiles[4 * i + 2, t, k] = line[a + k]
                        tiles[4 * i + 3, t, k] = np.float32(0)


@Kernel
def _filters_to_tiles(weight, tiles, turned, start, stop):
    """Output channels from start to stop: G w G^T of the 3 x 3 weights w; weight is (C', 3, 3, C)."""
    channels, half = weight.shape[3], np.float32(0.5)
    part = np.empty((4, 3, channels), weight.dtype)
    for o in range(start, stop):
        for j in range(3):
            a, b, c = weight[o, 0, j], weight[o, 1, j], weight[o, 2, j]
            _filter_line(a, b, c, part[0, j], part[1, j], part[2, j], part[3, j], half)
        for i in range(4):
            p, k = part[i], 4 * i
            if turned:  # of the four numbers on an axis, the first and the last swap places
                k = 12 - k if i in (0, 3) else k
                _filter_line(p[0], p[1], p[2], tiles[k + 3, o], tiles[k + 1, o], tiles[k + 2, o], tiles[k, o], half)
            else:
                _filter_line(p[0], p[1], p[2], tiles[k, o], tiles[k + 1, o], tiles[k + 2, o], tiles[k + 3, o], half)


@inlined
def _filter_line(a, b, c, out0, out1, out2, out3, half):
    for k in range(a.size):
        out0[k] = a[k]
    for k in range(a.size):
        out1[k] = half * (a[k] + b[k] + c[k])
    for k in range(a.size):
        out2[k] = half * (a[k] - b[k] + c[k])
    for k in range(a.size):
        out3[k] = c[k]


@Kernel
def _tiles_to_filters(tiles, weight, start, stop):
    """Output channels from start to stop: G^T u G of the 16 numbers u; weight is (C', 3, 3, C)."""
    channels, half = weight.shape[3], np.float32(0.5)
    part = np.empty((3, 4, channels), weight.dtype)
    for o in range(start, stop):
        for j in range(4):
            _adjoint_line(tiles[j, o], tiles[4 + j, o], tiles[8 + j, o], tiles[12 + j, o], part[0, j], part[1, j], part[2, j], half)
        for i in range(3):
            p = part[i]
            _adjoint_line(p[0], p[1], p[2], p[3], weight[o, i, 0], weight[o, i, 1], weight[o, i, 2], half)


@inlined
def _adjoint_line(a, b, c, d, out0, out1, out2, half):
    for k in range(a.size):
        out0[k] = a[k] + half * (b[k] + c[k])
    for k in range(a.size):
        out1[k] = half * (b[k] - c[k])
    for k in range(a.size):
        out2[k] = half * (b[k] + c[k]) + d[k]
