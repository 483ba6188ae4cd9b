# SPDX-License-Identifier: Apache-2.0
"""AdamW, learning rate 2e-5 for the backbone and 1e-4 for the rest, x0.1 at epoch 40 of 50, gradients clipped to a norm of 0.1."""

from detectron2.config import LazyCall as L
from detectron2.solver import WarmupParamScheduler
from fvcore.common.param_scheduler import MultiStepParamScheduler

from cpvt_det.d2.lazy import ClippedAdamW
from cpvt_det.solver.optimizer import parameter_groups

optimizer = L(ClippedAdamW)(
    # params.model is set by the script.
    params=L(parameter_groups)(lr="${..lr}", backbone_lr=2e-5, weight_decay="${..weight_decay}"),
    lr=1e-4,
    weight_decay=1e-4,
    clip_norm=0.1,
)

lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(MultiStepParamScheduler)(values=[1.0, 0.1], milestones=[147859, 184823]),
    warmup_length=0.0,
    warmup_method="linear",
    warmup_factor=0.001,
)
