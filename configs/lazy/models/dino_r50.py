# SPDX-License-Identifier: Apache-2.0
"""DINO-R50 with four levels: Deformable-DETR++ with classes of proposals, positions that follow the boxes, and denoising."""

from detectron2.config import LazyCall as L

from cpvt_det.models.denoising import ContrastiveDenoising

from .deformable_detr_r50_pp import model

model.num_queries = 900
model.transformer.final_norm = True
model.queries.class_proposals = True
model.queries.refined_positions = True
model.queries.denoising = L(ContrastiveDenoising)(
    channels="${...channels}", num_classes="${..num_logits}", pairs=100, label_noise=0.5, box_noise=1.0
)
model.criterion.class_weight = 1.0
