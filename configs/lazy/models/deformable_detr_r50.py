# SPDX-License-Identifier: Apache-2.0
"""Deformable-DETR-R50 with four levels; the encoder's encoding is ``model.position.name``."""

from detectron2.config import LazyCall as L

from cpvt_det.d2 import CPVTDeformableDetr
from cpvt_det.d2.lazy import pretrained_resnet
from cpvt_det.losses import HungarianMatcher, SetCriterion, make_classification
from cpvt_det.models import DeformableTransformer
from cpvt_det.position.registry import build_position

model = L(CPVTDeformableDetr)(
    backbone=L(pretrained_resnet)(name="resnet50", weights="IMAGENET1K_V1", norm="FrozenBN", stages=[3, 4, 5], freeze_at=2),
    position=L(build_position)(
        name="peg",
        channels="${..channels}",
        num_levels="${..num_levels}",
        num_layers="${..transformer.encoder_layers}",
    ),
    transformer=L(DeformableTransformer)(
        encoder_layers=6,
        decoder_layers=6,
        channels="${..channels}",
        num_heads=8,
        ffn_channels=1024,
        dropout=0.1,
        num_levels="${..num_levels}",
        encoder_points=4,
        decoder_points=4,
    ),
    channels=256,
    num_queries=300,
    num_levels=4,
    box_refinement=False,
    two_stage=False,
    criterion=L(SetCriterion)(
        matcher=L(HungarianMatcher)(
            classification=L(make_classification)(name="focal", num_classes=80, alpha=0.25, gamma=2.0),
            class_cost=2.0,
            l1_cost=5.0,
            giou_cost=2.0,
        ),
        class_weight=2.0,
        l1_weight=5.0,
        giou_weight=2.0,
    ),
)
