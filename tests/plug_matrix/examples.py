# SPDX-License-Identifier: Apache-2.0
"""A tiny random model of every family, with a padded batch: what the tests and the table try ``add_peg`` on."""

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import Tensor, nn

from cpvt_det.common.errors import BadInputError
from cpvt_det.common.structures import Size, padding_mask_of

Inputs = tuple[tuple, dict[str, Any]]
C = 32
WIDE = 256  # what detrex's sine code of a box is written for
SIZES = ((64, 128), (128, 64), (96, 160))
PEERS = {"detr": "facebookresearch/detr", "deformable-detr": "fundamentalvision/Deformable-DETR", "detrex": "IDEA-Research/detrex"}


@dataclass
class Example:
    """A family's model and inputs.

    Attributes:
        name: of the family or, where a family has several, of the model.
        needs: modules that must be there, or the name of a checkout.
        build: the model, as a user has it.
        inputs: the call's arguments for a canvas; of two images the second leaves 32 pixels below and at the right empty.
        sizes: canvases that the model takes.
        options: for ``add_peg``.
    """

    name: str
    needs: str
    build: Callable[[], nn.Module]
    inputs: Callable[[Size], Inputs]
    sizes: Sequence[Size] = SIZES
    options: dict[str, Any] = field(default_factory=dict)

    def installed(self) -> bool:
        return self.needs in PEERS or importlib.util.find_spec(self.needs) is not None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build().eval()

    def run(self, model: nn.Module, size: Size) -> list[Tensor]:
        """The floating point outputs, in order."""
        if hasattr(model, "peg_grid"):
            model.peg_grid = (size[0] // 32, size[1] // 32)
        args, kwargs = self.inputs(size)
        return tensors(model(*args, **kwargs))


def tensors(output: Any) -> list[Tensor]:
    """The floating point tensors in whatever a model gives."""
    leaves = torch.utils._pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def valid_sizes(size: Size, stride: int = 1) -> list[Size]:
    """(h, w) of the two images of a batch, in cells."""
    return [(-(-(size[0] - e) // stride), -(-(size[1] - e) // stride)) for e in (0, 32)]


def _randn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def _images(size: Size) -> Tensor:
    return _randn(2, 3, *size)


def _level(size: Size, stride: int, channels: int = C) -> tuple[Tensor, Tensor, Tensor]:
    """A map, its mask (True = padded) and an encoding."""
    shape = (-(-size[0] // stride), -(-size[1] // stride))
    features = _randn(2, channels, *shape)
    return features, padding_mask_of(valid_sizes(size, stride), shape), features.flip(0)


def _one_level(size: Size, channels: int = C, query_channels: int = C) -> Inputs:
    features, mask, encoding = _level(size, 32, channels)
    return (features, mask, _randn(5, query_channels), encoding), {}


def _many_levels(size: Size, channels: int = C, queries: Sequence[Any] | None = None) -> Inputs:
    levels = zip(*(_level(size, stride, channels) for stride in (16, 32, 64)), strict=True)
    return (*(list(level) for level in levels), *(queries or [_randn(5, 2 * channels)])), {}


def _image_inputs(size: Size) -> Inputs:
    return (_images(size),), {}


def _masked_images(size: Size) -> Inputs:
    return (), {"pixel_values": _images(size), "pixel_mask": (~padding_mask_of(valid_sizes(size), size)).long()}


def _detectron2(name: str) -> Callable[[], nn.Module]:
    """One of ``backbones.py``, where alone detectron2 is imported."""
    return lambda: getattr(importlib.import_module("plug_matrix.backbones"), name)(C)


def _detr() -> nn.Module:
    from models.transformer import Transformer

    return Transformer(C, 2, 2, 1, 32, dropout=0.0, return_intermediate_dec=True)


def _deformable_detr() -> nn.Module:
    from models.deformable_transformer import DeformableTransformer

    return DeformableTransformer(C, 2, 2, 1, 32, dropout=0.0, return_intermediate_dec=True, num_feature_levels=3)


def _detrex_detr() -> nn.Module:
    from projects.detr.modeling import transformer as part

    encoder = part.DetrTransformerEncoder(C, 2, 0.0, 32, 0.0, num_layers=2)
    return part.DetrTransformer(encoder, part.DetrTransformerDecoder(C, 2, 0.0, 32, 0.0, num_layers=1))


def _detrex_dab_detr() -> nn.Module:
    from projects.dab_detr.modeling import dab_transformer as part

    encoder = part.DabDetrTransformerEncoder(WIDE, 2, 0.0, 32, 0.0, num_layers=2)
    return part.DabDetrTransformer(encoder, part.DabDetrTransformerDecoder(WIDE, 2, 0.0, 32, 0.0, num_layers=1))


def _detrex_deformable_detr() -> nn.Module:
    from projects.deformable_detr.modeling import deformable_transformer as part

    encoder = part.DeformableDetrTransformerEncoder(C, 2, 32, 0.0, 0.0, num_layers=2, num_feature_levels=3)
    decoder = part.DeformableDetrTransformerDecoder(C, 2, 32, 0.0, 0.0, num_layers=1, num_feature_levels=3)
    return part.DeformableDetrTransformer(encoder, decoder, num_feature_levels=3)


def _detrex_dino() -> nn.Module:
    from projects.dino.modeling import dino_transformer as part

    encoder = part.DINOTransformerEncoder(WIDE, 2, 32, 0.0, 0.0, num_layers=2, num_feature_levels=3)
    decoder = part.DINOTransformerDecoder(WIDE, 2, 32, 0.0, 0.0, num_layers=1, num_feature_levels=3, use_checkpoint=False)
    decoder.class_embed = nn.ModuleList(nn.Linear(WIDE, 5) for _ in range(2))
    decoder.bbox_embed = nn.ModuleList(nn.Linear(WIDE, 4) for _ in range(2))
    return part.DINOTransformer(encoder, decoder, num_feature_levels=3, two_stage_num_proposals=5)


def _resnet_config(widths: list[int], stages: list[str]) -> Any:
    import transformers

    depths = [1 for _ in widths]
    return transformers.ResNetConfig(embedding_size=8, hidden_sizes=widths, depths=depths, layer_type="basic", out_features=stages)


def _hf_options() -> dict[str, Any]:
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    return {"d_model": C, "num_queries": 5, "encoder_attention_heads": 2, "decoder_attention_heads": 2, "num_labels": 3, **layers}


def _hf_detr() -> nn.Module:
    import transformers

    config = transformers.DetrConfig(backbone_config=_resnet_config([8, 16], ["stage2"]), **_hf_options())
    return transformers.DetrForObjectDetection(config)


def _hf_deformable_detr() -> nn.Module:
    import transformers

    resnet = _resnet_config([8, 16], ["stage1", "stage2"])
    config = transformers.DeformableDetrConfig(backbone_config=resnet, num_feature_levels=3, **_hf_options())
    return transformers.DeformableDetrForObjectDetection(config)


def _hf_rt_detr() -> nn.Module:
    from transformers.models.rt_detr.configuration_rt_detr import RTDetrConfig
    from transformers.models.rt_detr.modeling_rt_detr import RTDetrHybridEncoder

    return RTDetrHybridEncoder(RTDetrConfig(**_hybrid_options()))


def _hybrid_options() -> dict[str, Any]:
    channels = {"encoder_in_channels": [C, C], "feat_strides": [16, 32], "encode_proj_layers": [1], "decoder_in_channels": [C, C]}
    sizes = {"encoder_hidden_dim": C, "encoder_ffn_dim": 32, "encoder_attention_heads": 2, "hidden_expansion": 0.5}
    return channels | sizes


def _hf_rt_detr_v2() -> nn.Module:
    from transformers.models.rt_detr_v2.configuration_rt_detr_v2 import RTDetrV2Config
    from transformers.models.rt_detr_v2.modeling_rt_detr_v2 import RTDetrV2HybridEncoder

    return RTDetrV2HybridEncoder(RTDetrV2Config(**_hybrid_options()))


def _hf_d_fine() -> nn.Module:
    from transformers.models.d_fine.configuration_d_fine import DFineConfig
    from transformers.models.d_fine.modeling_d_fine import DFineHybridEncoder

    return DFineHybridEncoder(DFineConfig(**_hybrid_options()))


def _hf_deimv2() -> nn.Module:
    from transformers.models.deimv2.configuration_deimv2 import Deimv2Config
    from transformers.models.deimv2.modeling_deimv2 import Deimv2HybridEncoder

    return Deimv2HybridEncoder(Deimv2Config(**_hybrid_options()))


def _hf_lw_detr() -> nn.Module:
    from transformers.models.lw_detr.configuration_lw_detr import LwDetrViTConfig
    from transformers.models.lw_detr.modeling_lw_detr import LwDetrViTBackbone

    options = {"hidden_size": C, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16, "pretrain_image_size": 64}
    return LwDetrViTBackbone(LwDetrViTConfig(**options, num_windows=4, window_block_indices=[0], out_features=["stage1", "stage2"]))


def _hf_rf_detr() -> nn.Module:
    from transformers.models.rf_detr.configuration_rf_detr import RfDetrDinov2Config
    from transformers.models.rf_detr.modeling_rf_detr import RfDetrDinov2Backbone

    options = {"hidden_size": C, "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 16, "image_size": 64}
    return RfDetrDinov2Backbone(
        RfDetrDinov2Config(**options, num_windows=2, window_block_indexes=[0], out_features=["stage1", "stage2"])
    )


def _timm_vit() -> nn.Module:
    from timm.models.vision_transformer import VisionTransformer

    options = {"reg_tokens": 2, "dynamic_img_size": True, "num_classes": 5}
    return VisionTransformer(img_size=(64, 128), patch_size=16, embed_dim=C, depth=2, num_heads=2, **options)


def _timm_tnt() -> nn.Module:
    from timm.models.tnt import TNT

    options = {"num_heads_inner": 2, "num_heads_outer": 2, "num_classes": 5}
    return TNT(img_size=(64, 128), embed_dim=C, inner_dim=8, depth=2, **options)


def _torchvision_vit() -> nn.Module:
    model = torchvision.models.VisionTransformer(64, 16, num_layers=2, num_heads=2, hidden_dim=C, mlp_dim=32)
    model.heads = nn.Identity()  # its own starts at zero
    return model


def _torch_encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(C, 2, 32, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2)


def _torch_inputs(size: Size) -> Inputs:
    features, mask, _ = _level(size, 32)
    return (features.flatten(2).transpose(1, 2),), {"src_key_padding_mask": mask.flatten(1)}


def _embeds(size: Size) -> Inputs:
    return (), {"inputs_embeds": [_level(size, stride)[0] for stride in (16, 32)]}


EXAMPLES = (
    Example("detectron2 ViT", "detectron2", _detectron2("vit"), _image_inputs),
    Example("detectron2 FPN", "detectron2", _detectron2("fpn"), _image_inputs, options={"after": ["p2", "p4"]}),
    Example("facebookresearch/detr", "detr", _detr, _one_level),
    Example("Deformable-DETR", "deformable-detr", _deformable_detr, _many_levels),
    Example("detrex DETR", "detrex", _detrex_detr, _one_level),
    Example("detrex DAB-DETR", "detrex", _detrex_dab_detr, lambda size: _one_level(size, WIDE, 4)),
    Example("detrex Deformable-DETR", "detrex", _detrex_deformable_detr, _many_levels),
    Example("detrex DINO", "detrex", _detrex_dino, lambda size: _many_levels(size, WIDE, [(None, None), [None, None]])),
    Example("transformers DETR", "transformers", _hf_detr, _masked_images),
    Example("transformers Deformable-DETR", "transformers", _hf_deformable_detr, _masked_images),
    Example("timm VisionTransformer", "timm", _timm_vit, _image_inputs),
    Example("torchvision VisionTransformer", "torchvision", _torchvision_vit, _image_inputs, sizes=((64, 64),)),
    Example("timm TNT", "timm", _timm_tnt, _image_inputs, sizes=((64, 128),)),
    Example("transformers RT-DETR", "transformers", _hf_rt_detr, _embeds),
    Example("transformers RT-DETR v2", "transformers", _hf_rt_detr_v2, _embeds),
    Example("transformers D-FINE", "transformers", _hf_d_fine, _embeds),
    Example("transformers DEIMv2", "transformers", _hf_deimv2, _embeds),
    Example("transformers LW-DETR", "transformers", _hf_lw_detr, _image_inputs),
    Example("transformers RF-DETR", "transformers", _hf_rf_detr, _image_inputs),
    Example("torch.nn.TransformerEncoder", "torch", _torch_encoder, _torch_inputs, options={"grid": (2, 4)}),
    Example("detectron2 MViTv2", "detectron2", _detectron2("mvit"), _image_inputs),
    Example("detectron2 Swin", "detectron2", _detectron2("swin"), _image_inputs, options={"after": 1}),
)


def use_checkout(peer: str, path: Path) -> None:
    """Make a checkout importable, with stand-ins for what it wants and its transformers do not need.

    Raises:
        BadInputError: an unknown peer, a path that is no checkout of it.
    """
    marks = {"detr": "models/transformer.py", "deformable-detr": "models/deformable_transformer.py", "detrex": "projects/dino"}
    if peer not in PEERS:
        raise BadInputError(f"unknown peer {peer!r}; known: {', '.join(PEERS)}")
    if not (path / marks[peer]).exists():
        raise BadInputError(f"{path} is no checkout of {PEERS[peer]}: it has no {marks[peer]}")
    sys.path.insert(0, str(path))
    if peer == "detrex":
        for name in ("wandb", "fairscale", "fairscale.nn", "fairscale.nn.checkpoint", "pkg_resources", "detrex._C", "einops"):
            _stand_in(name)
        return
    torchvision.__version__ = "0.9.0"  # both take 0.29 for 0.2
    if peer == "deformable-detr":
        _stand_in("MultiScaleDeformableAttention")
        from models.ops.functions import ms_deform_attn_func as functions
        from models.ops.modules import ms_deform_attn

        class Python:
            """Their own Python version in the place of their CUDA kernel."""

            @staticmethod
            def apply(value, shapes, start, locations, weights, step):
                return functions.ms_deform_attn_core_pytorch(value, shapes, locations, weights)

        ms_deform_attn.MSDeformAttnFunction = Python


def _stand_in(name: str) -> None:
    module = types.ModuleType(name)
    module.__path__ = []
    module.__getattr__ = lambda attribute: _Nothing if not attribute.startswith("__") else _missing(attribute)
    sys.modules.setdefault(name, module)


class _Nothing:
    def __init__(self, *args: Any, **kwargs: Any):
        pass


def _missing(attribute: str) -> None:
    raise AttributeError(attribute)
