# SPDX-License-Identifier: Apache-2.0
"""DETR-R50; the encoder's encoding is ``model.position.name``."""

from detectron2.config import LazyCall as L

from cpvt_det.d2 import CPVTDetr
from cpvt_det.d2.lazy import pretrained_resnet
from cpvt_det.losses import HungarianMatcher, SetCriterion, make_classification
from cpvt_det.models import Transformer
from cpvt_det.position.registry import build_position

model = L(CPVTDetr)(
    backbone=L(pretrained_resnet)(name="resnet50", weights="IMAGENET1K_V1", norm="FrozenBN", stages=[5], freeze_at=2),
    position=L(build_position)(
        name="peg",
        channels="${..channels}",
        num_layers="${..transformer.encoder_layers}",
    ),
    transformer=L(Transformer)(
        encoder_layers=6,
        decoder_layers=6,
        channels="${..channels}",
        num_heads=8,
        ffn_channels=2048,
        dropout=0.1,
        pre_norm=False,
    ),
    decoder_position=L(build_position)(name="sine", channels="${..channels}"),
    channels=256,
    num_queries=100,
    criterion=L(SetCriterion)(
        matcher=L(HungarianMatcher)(
            classification=L(make_classification)(name="softmax", num_classes=80, background_weight=0.1),
            class_cost=1.0,
            l1_cost=5.0,
            giou_cost=2.0,
        ),
        class_weight=1.0,
        l1_weight=5.0,
        giou_weight=2.0,
    ),
)
