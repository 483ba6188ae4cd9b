# SPDX-License-Identifier: Apache-2.0
from detectron2.config import LazyCall as L

from cpvt_det.models import AnchorQueries

from .deformable_detr_r50_sine_offset_50ep import dataloader, lr_multiplier, model, optimizer, train

model.transformer.ffn_channels = 2048
model.transformer.dropout = 0.0
model.box_refinement = True
model.queries = L(AnchorQueries)(channels="${..channels}", num_queries="${..num_queries}", scaled_positions=True)
model.criterion.class_weight = 1.0
dataloader.train.total_batch_size = 16
optimizer.params.backbone_lr = 1e-5
optimizer.params.points_lr_multiplier = 1.0
lr_multiplier.scheduler.milestones = [295718, 369647]
train.max_iter = 369647
train.eval_period = 36965
train.output_dir = "output/lazy/dab_deformable_detr_r50_sine_offset"
