# SPDX-License-Identifier: Apache-2.0
"""Dropout's CPU kernel. Its random bits depend only on a seed and an element's position, so no mask need be stored for the
backward pass.

The bits come from Philox-4x32 with seven rounds, which passes every test of BigCrush (Salmon et al., Parallel random numbers: as
easy as 1, 2, 3, 2011). Sixteen bits decide on each element, so probabilities are rounded to multiples of 2^-16.
"""

import numpy as np
import torch
from torch import Tensor

from cpvt_det.ops.numba_threads import Kernel, cut, run

LANES = 256  # counters processed together, in the processor's vectors
PER_BLOCK = 8 * LANES  # each counter gives 128 bits
STEPS = 1 << 16
ROUNDS = 7
M0, M1 = np.uint64(0xD2511F53), np.uint64(0xCD9E8D57)
W0, W1 = np.uint64(0x9E3779B9), np.uint64(0xBB67AE85)
LOW, HALF = np.uint64(0xFFFFFFFF), np.uint64(32)


@Kernel
def _drop(x, out, threshold, scale, floor, key, start, stop):
    """Compute blocks ``start`` to ``stop``: out = scale * x, or 0 where the element's bits are below the threshold or x is not
    above the floor. A floor of NaN means no floor. A NaN in x stays NaN unless it is dropped.
    """
    zero = scale - scale
    words = np.empty((4, LANES), np.uint32)
    bits = words.reshape(-1).view(np.uint16)
    for block in range(start, stop):
        for lane in range(LANES):
            counter = np.uint64(block * LANES) + np.uint64(lane)
            a, b, c, d = counter & LOW, counter >> HALF, np.uint64(0), np.uint64(0)
            k0, k1 = key & LOW, key >> HALF
            for _ in range(ROUNDS):
                left, right = M0 * a, M1 * c
                a, b, c, d = (right >> HALF) ^ b ^ k0, right & LOW, (left >> HALF) ^ d ^ k1, left & LOW
                k0, k1 = (k0 + W0) & LOW, (k1 + W1) & LOW
            words[0, lane], words[1, lane], words[2, lane], words[3, lane] = a, b, c, d
        first = block * PER_BLOCK
        for i in range(min(PER_BLOCK, x.size - first)):
            value = x[first + i]
            scaled = value * scale
            dropped = (bits[i] < threshold) | (value <= floor)
            out[first + i] = zero if dropped else scaled


def keep_scale(probability: float) -> float:
    """The factor for elements that are not dropped: one over the probability of keeping an element, after rounding."""
    return STEPS / (STEPS - round(probability * STEPS))


def drop(x: Tensor, probability: float, seed: int, rectify: bool) -> Tensor:
    """Dropout of ``x``, or of ``relu(x)``.

    Args:
        x: floating-point tensor on the CPU.
        probability: probability that an element becomes 0.
        seed: 64 bits that decide, together with an element's position, whether it is dropped.
        rectify: whether to apply the ReLU first.

    Returns:
        A new tensor like ``x``, contiguous.
    """
    if x.numel() == 0:
        return torch.empty_like(x)
    x, scale, threshold = x.contiguous(), keep_scale(probability), np.uint16(round(probability * STEPS))
    if x.dtype in (torch.float16, torch.bfloat16):  # numba lacks them: the kernel copies or clears 16 bits, and torch multiplies
        out = x.relu() if rectify else x * 1
        source = target = out.view(torch.int16).view(-1).numpy()
        factor, floor = np.int16(1), np.int16(-(1 << 15))
    else:
        out = torch.empty_like(x)
        source, target = x.view(-1).numpy(), out.view(-1).numpy()
        real = np.float64 if x.dtype == torch.float64 else np.float32
        factor, floor = real(scale), real(0 if rectify else np.nan)
    run(_drop, (source, target, threshold, factor, floor, np.uint64(seed)), cut(-(-x.numel() // PER_BLOCK), x.numel()))
    return out.mul_(scale) if factor.dtype == np.int16 else out
