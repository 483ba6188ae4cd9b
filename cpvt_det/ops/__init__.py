# SPDX-License-Identifier: Apache-2.0
"""Kernels, and the choice between them: deformable attention, convolutions, matrix products, dropout, non-maximum suppression."""

from cpvt_det.ops.deformable_attention import ms_deform_attn
from cpvt_det.ops.forks import end_threads_at_forks

__all__ = ["ms_deform_attn"]

end_threads_at_forks()
