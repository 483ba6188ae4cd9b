# SPDX-License-Identifier: Apache-2.0
"""The models of docs/parity.md, except those of transformers: the settings of ours and of the peer's, and the images."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

PADDED = {
    "detr": ((150, 224), (128, 97), (65, 200)),
    "deformable_detr": ((150, 256), (180, 97), (65, 200)),
    "detrex": ((192, 200), (180, 256), (65, 200)),
}
"""Heights and widths of images: padded below, at the right, and both, on 160 x 224 for DETR and on 192 x 256 for the others."""
ONE_SIZE = ((192, 256),) * 3


@dataclass(frozen=True)
class Variant:
    """One model to compare.

    Args:
        peer: project whose code ours is compared with.
        name: name of the model in the tables of docs/parity.md.
        config: file below ``configs/coco`` for our model.
        overrides: KEY VALUE words that change it.
        arguments: options of the official command line.
        sizes: height and width of each image.
        two_stage: True: queries are proposals.
        lacks_padded_proposals: True: the batch has padded tokens that are proposals for the peer but not for ours, so that the
            class loss of proposals, the total and the gradients differ.
        own_constants: True: detrex keeps its own constants, so that the losses of boxes differ.
    """

    peer: str
    name: str
    config: str
    overrides: tuple[str, ...] = ()
    arguments: Mapping[str, Any] = field(default_factory=dict)
    sizes: tuple[tuple[int, int], ...] = ONE_SIZE
    two_stage: bool = False
    lacks_padded_proposals: bool = False
    own_constants: bool = False


def variants() -> list[Variant]:
    """All models of docs/parity.md but those of transformers, which the tests compare."""
    found = []
    for backbone, dc5, norms in (("resnet18", False, None), ("resnet50", False, 0), ("resnet50", True, 0)):
        pairs = [(norm, position) for position in ("sine", "learned") for norm in ("post-norm", "pre-norm")]
        found += [_detr(backbone, dc5, *pair) for pair in (pairs if norms is None else (pairs[0], pairs[3]))]
    multi = "deformable_detr_r50_official_50ep.yaml"
    single = {"num_feature_levels": 1}
    learned = ("MODEL.POSITION.NAME", "learned")
    found += [
        _deformable("single scale", "deformable_detr_r50_official_single_scale_50ep.yaml", **single),
        _deformable("single scale, DC5", "deformable_detr_r50_official_single_scale_dc5_50ep.yaml", **single, dilation=True),
        _deformable("multi-scale", multi),
        *_refined("deformable_detr"),
        _deformable("multi-scale, learned", multi, overrides=learned, position_embedding="learned"),
    ]
    for own in (False, True):
        suffix = ", own constants" if own else ""
        found.append(_detrex(f"multi-scale{suffix}", multi, own_constants=own, sizes=PADDED["detrex"]))
        found += _refined("detrex", suffix, own_constants=own)
    return found


def _detr(backbone: str, dc5: bool, norm: str, position: str) -> Variant:
    overrides = ("MODEL.BACKBONE.NAME", backbone, "MODEL.BACKBONE.DC5", str(dc5), "MODEL.POSITION.NAME", position)
    overrides += ("MODEL.DETECTOR.DECODER_POSITION", "same", "MODEL.DETECTOR.PRE_NORM", str(norm == "pre-norm"))
    arguments = {"backbone": backbone, "dilation": dc5, "pre_norm": norm == "pre-norm", "position_embedding": position}
    name = f"{backbone}{' DC5' * dc5}, {norm}, {position}"
    return Variant("detr", name, "detr_r50_sine_50ep.yaml", overrides, arguments, PADDED["detr"])


def _deformable(name: str, config: str, overrides: tuple[str, ...] = (), **arguments: Any) -> Variant:
    return Variant("deformable_detr", name, config, overrides, {"cls_loss_coef": 2, **arguments}, PADDED["deformable_detr"])


def _detrex(name: str, config: str, **more: Any) -> Variant:
    overrides = ("MODEL.BACKBONE.FREEZE_AT", "1", "MODEL.CRITERION.CLASS_WEIGHT", "1.0")
    return Variant("detrex", name, config, overrides, **more)


def _refined(peer: str, suffix: str = "", **more: Any) -> list[Variant]:
    """Refinement, and two stages with and without padding."""
    found = []
    refine, two = (f"deformable_detr_r50_official_{name}_50ep.yaml" for name in ("refine", "two_stage"))
    for name, config, two_stage, padded in (
        ("+ refinement", refine, False, True),
        ("++ two stages, padded", two, True, True),
        ("++ two stages, one size", two, True, False),
    ):
        fields = {"sizes": PADDED[peer] if padded else ONE_SIZE, "two_stage": two_stage}
        fields |= {"lacks_padded_proposals": two_stage and padded, **more}
        if peer == "detrex":
            found.append(_detrex(name + suffix, config, arguments={"refine": True}, **fields))
        else:
            arguments = {"cls_loss_coef": 2, "with_box_refine": True, "two_stage": two_stage}
            found.append(Variant(peer, name, config, arguments=arguments, **fields))
    return found
