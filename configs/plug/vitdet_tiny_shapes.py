# SPDX-License-Identifier: Apache-2.0
"""A tiny ViTDet on the shapes data set, from random weights: RetinaNet on a ViT whose only encoding is a position table."""

import detectron2.data.transforms as T
import torch
from detectron2.config import LazyCall as L
from detectron2.data import (
    DatasetMapper,
    build_detection_test_loader,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.evaluation import COCOEvaluator
from detectron2.layers import ShapeSpec
from detectron2.modeling import RetinaNet, SimpleFeaturePyramid, ViT
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead
from detectron2.solver import WarmupParamScheduler
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import CosineParamScheduler
from omegaconf import OmegaConf

SIDE, LONG_SIDE = 128, 192  # pixels of an image's short side, and of the square canvas that ViTDet pads it to

model = L(RetinaNet)(
    backbone=L(SimpleFeaturePyramid)(
        net=L(ViT)(
            img_size=LONG_SIDE,
            pretrain_img_size=LONG_SIDE,
            pretrain_use_cls_token=False,
            patch_size=8,
            embed_dim=96,
            depth=4,
            num_heads=3,
            use_rel_pos=False,
        ),
        in_feature="last_feat",
        out_channels=64,
        scale_factors=(2.0, 1.0, 0.5),
        norm="LN",
        square_pad=LONG_SIDE,
    ),
    head=L(RetinaNetHead)(
        input_shape=[ShapeSpec(channels=64)] * 3,
        num_classes="${..num_classes}",
        conv_dims=[64, 64],
        norm="GN",
        num_anchors=2,
    ),
    anchor_generator=L(DefaultAnchorGenerator)(
        sizes=[[12, 17], [24, 34], [48, 68]], aspect_ratios=[1.0], strides=[4, 8, 16], offset=0.5
    ),
    box2box_transform=L(Box2BoxTransform)(weights=[1.0, 1.0, 1.0, 1.0]),
    anchor_matcher=L(Matcher)(thresholds=[0.4, 0.5], labels=[0, -1, 1], allow_low_quality_matches=True),
    num_classes=8,
    head_in_features=["p2", "p3", "p4"],
    pixel_mean=[123.675, 116.28, 103.53],
    pixel_std=[58.395, 57.12, 57.375],
    input_format="RGB",
)

dataloader = OmegaConf.create()
dataloader.train = L(build_detection_train_loader)(
    dataset=L(get_detection_dataset_dicts)(names="shapes_train"),
    mapper=L(DatasetMapper)(
        is_train=True,
        augmentations=[
            L(T.ResizeShortestEdge)(short_edge_length=SIDE, max_size=LONG_SIDE),
            L(T.RandomFlip)(horizontal=True),
        ],
        image_format="RGB",
    ),
    total_batch_size=8,
    num_workers=0,
)
dataloader.test = L(build_detection_test_loader)(
    dataset=L(get_detection_dataset_dicts)(names="shapes_val", filter_empty=False),
    mapper=L(DatasetMapper)(
        is_train=False,
        augmentations=[L(T.ResizeShortestEdge)(short_edge_length=SIDE, max_size=LONG_SIDE)],
        image_format="RGB",
    ),
    num_workers=0,
)
dataloader.evaluator = L(COCOEvaluator)(dataset_name="${..test.dataset.names}")

optimizer = L(torch.optim.AdamW)(
    params=L(get_default_optimizer_params)(base_lr="${..lr}", weight_decay_norm=0.0), lr=1e-3, weight_decay=0.05
)
lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(CosineParamScheduler)(start_value=1.0, end_value=0.0),
    warmup_length=0.05,
    warmup_method="linear",
    warmup_factor=0.01,
)

train = dict(
    output_dir="output/plug/vitdet_tiny",
    init_checkpoint="",
    seed=0,
    max_iter=1200,
    amp=dict(enabled=False),
    ddp=dict(broadcast_buffers=False),
    checkpointer=dict(period=10000, max_to_keep=1),
    eval_period=1200,
    log_period=20,
    device="cpu",
)
