# SPDX-License-Identifier: Apache-2.0
"""PEG as in CPVT's classifiers: a convolution with a bias, no norm, no activation."""

import functools
from collections.abc import Callable, Sequence

from torch import nn

from cpvt_det.common import defaults
from cpvt_det.position.encoding import PositionEncoding, register_position
from cpvt_det.position.peg import PEGDetection, PEGEncoding


class PlainPEGEncoding(PEGEncoding):
    """Plain PEGs, as in :class:`PEGDetection`, after chosen encoder layers, alone or with another encoding.

    Args:
        channels, num_levels, num_layers, additive, positions, share_levels, kernel_size, mask_input, zero_init: as in
            :class:`PEGEncoding`.
        peg: function that builds one PEG, as in :class:`PEGEncoding`, and also takes ``plain``.

    Source: arXiv 2102.10882, algorithm 1.
    """

    def __init__(
        self,
        channels: int,
        num_levels: int = 1,
        num_layers: int = defaults.LAYERS,
        additive: Callable[[int], PositionEncoding] | None = None,
        peg: Callable[..., nn.Module] = PEGDetection,
        positions: Sequence[int] = (0,),
        share_levels: bool = False,
        kernel_size: int = 3,
        mask_input: bool = True,
        zero_init: bool = False,
    ):
        peg = functools.partial(peg, plain=True)
        acts = (positions, share_levels, kernel_size, "none", mask_input, zero_init)
        super().__init__(channels, num_levels, num_layers, additive, peg, *acts)


register_position("peg_plain")(PlainPEGEncoding)
