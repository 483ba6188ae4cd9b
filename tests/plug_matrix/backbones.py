# SPDX-License-Identifier: Apache-2.0
"""Tiny random backbones of detectron2, whose tokens or maps have ``width`` channels."""

from detectron2.modeling.backbone.fpn import FPN, LastLevelMaxPool
from detectron2.modeling.backbone.mvit import MViT
from detectron2.modeling.backbone.resnet import BasicBlock, BasicStem, ResNet
from detectron2.modeling.backbone.swin import SwinTransformer
from detectron2.modeling.backbone.vit import ViT
from torch import nn


def vit(width: int) -> nn.Module:
    return ViT(img_size=128, patch_size=16, embed_dim=width, depth=2, num_heads=2, use_rel_pos=True, pretrain_img_size=64)


def mvit(width: int) -> nn.Module:
    options = {"adaptive_window_size": 8, "out_features": ("scale2", "scale3"), "use_abs_pos": True, "pretrain_img_size": 64}
    return MViT(img_size=128, embed_dim=width, depth=3, last_block_indexes=(0, 1, 2), **options)


def swin(width: int) -> nn.Module:
    options = {"window_size": 4, "drop_path_rate": 0.0, "ape": True, "pretrain_img_size": 64, "out_indices": (0, 1)}
    return SwinTransformer(embed_dim=width, depths=(1, 2), num_heads=(2, 2), **options)


def fpn(width: int) -> nn.Module:
    widths = (8, 16, 32)
    stages = [
        ResNet.make_stage(BasicBlock, 1, in_channels=widths[i], out_channels=widths[i + 1], norm="BN", stride_per_block=[i + 1])
        for i in range(2)
    ]
    bottom_up = ResNet(BasicStem(3, 8, "BN"), stages, out_features=["res2", "res3"])
    top = LastLevelMaxPool()
    top.in_feature = "p3"
    return FPN(bottom_up, ["res2", "res3"], width, top_block=top)
