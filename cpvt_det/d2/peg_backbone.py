# SPDX-License-Identifier: Apache-2.0
"""PEG on the output maps of any backbone of detectron2, set up in YAML: ``MODEL.BACKBONE.NAME: build_peg_backbone``."""

from detectron2.config import CfgNode
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY, Backbone

from cpvt_det.errors import ConfigError, config_errors
from cpvt_det.plug.attach import attach
from cpvt_det.plug.families import DetectronBackbone


def add_peg_config(cfg: CfgNode) -> None:
    """Add the node ``MODEL.PEG``, which only ``MODEL.BACKBONE.NAME: build_peg_backbone`` reads."""
    cfg.MODEL.PEG = CfgNode()
    cfg.MODEL.PEG.BACKBONE = "build_resnet_fpn_backbone"  # backbone that gets the PEGs
    cfg.MODEL.PEG.IN_FEATURES = []  # names of the maps that get a PEG; empty: all maps
    cfg.MODEL.PEG.KERNEL_SIZE = 3  # kernel size of the convolution
    cfg.MODEL.PEG.NORM = "BN"  # norm after the convolution: BN, SyncBN, GN or none
    cfg.MODEL.PEG.ZERO_INIT = True  # True: start as the identity, so that pretrained weights give the same outputs at first


@BACKBONE_REGISTRY.register()
def build_peg_backbone(cfg: CfgNode, input_shape: ShapeSpec) -> Backbone:
    """The backbone ``MODEL.PEG.BACKBONE`` with a PEG on each of the maps ``MODEL.PEG.IN_FEATURES``.

    Only the keys ``peg.<map>`` are added to its state dict, so that weights of the backbone without PEG load. detectron2 gives a
    backbone no padding mask, so PEG sees the padding, which is zero in the image, like any convolution.

    Raises:
        ConfigError: a backbone that is not registered, or this one; settings that PEG refuses.
        PlugError: a map that the backbone does not have.
    """
    node = cfg.MODEL.PEG
    if node.BACKBONE == "build_peg_backbone" or node.BACKBONE not in BACKBONE_REGISTRY:
        raise ConfigError(f"MODEL.PEG.BACKBONE must be another backbone of detectron2's registry, got {node.BACKBONE!r}")
    backbone = BACKBONE_REGISTRY.get(node.BACKBONE)(cfg, input_shape)
    maps = list(node.IN_FEATURES) or list(backbone.output_shape())
    with config_errors("MODEL.PEG"):
        attach(backbone, DetectronBackbone(), maps, kernel_size=node.KERNEL_SIZE, norm=node.NORM, zero_init=node.ZERO_INIT)
    return backbone
