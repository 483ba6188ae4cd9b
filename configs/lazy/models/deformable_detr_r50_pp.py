# SPDX-License-Identifier: Apache-2.0
"""Deformable-DETR++: two stages with mixed query selection, look forward twice, no dropout."""

from detectron2.config import LazyCall as L

from cpvt_det.models import MixedQueries

from .deformable_detr_r50 import model

model.transformer.ffn_channels = 2048
model.transformer.dropout = 0.0
model.transformer.look_forward_twice = True
model.box_refinement = True
model.two_stage = True
model.queries = L(MixedQueries)(
    channels="${..channels}",
    num_queries="${..num_queries}",
    num_logits="${..criterion.matcher.classification.num_classes}",
    prior_probability=0.01,
)
