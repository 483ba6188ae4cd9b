# SPDX-License-Identifier: Apache-2.0
"""RT-DETRv2-R18, D-FINE-N and D-FINE-S beside those of transformers, in their published sizes: inference and training steps.

Both have the same drawn weights. Logits and boxes of the last layer are compared in evaluation, before any timing; losses and
gradients are compared in ``tests/whole/test_parity_real_time.py``, in small sizes. transformers does not mask padding here, so with
padding the work differs. Both freeze the backbone's norms, as transformers does, and make the same denoising queries in training.
"""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.at_best import channels_last, compiled
from benchmarks.harness import ROUNDS, Case, Contender, Plan, Work
from benchmarks.models import CONFIGS, Model, as_model, draw_weights
from benchmarks.suites import Options
from benchmarks.suites.model import CANVAS, DETR, ENCODING, PADDED, PASSES, Shape, infer, make_inputs, train
from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.checkpoint import load_weights
from cpvt_det.common.structures import PaddedBatch, Size, Targets
from cpvt_det.config import load_cfg

TITLE = "RT-DETRv2 and D-FINE beside transformers"
PLANS = {"quick": Plan(warm_up=0, rounds=2, most_rounds=2), "full": Plan(rounds=ROUNDS, most_rounds=15, seconds=20.0)}
MASKED = "padding masked, which transformers does not do"
SMALL: Size = (384, 256)  # with as many tokens as there are queries
OBLONG: Size = (640, 480)
CLASSES = 91
STRIDE = 32

HGNET_B0 = {
    "stem_channels": [3, 16, 16],
    "stage_in_channels": [16, 64, 256, 512],
    "stage_mid_channels": [16, 32, 64, 128],
    "stage_out_channels": [64, 256, 512, 1024],
    "stage_num_blocks": [1, 1, 2, 1],
    "stage_numb_of_layers": [3, 3, 3, 3],
    "use_learnable_affine_block": True,
    "hidden_sizes": [64, 256, 512, 1024],
}
"""What differs in HGNetV2-B0 from transformers' defaults."""
RESNET_18 = {"layer_type": "basic", "depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512]}
NARROW = {
    "encoder_hidden_dim": 128,
    "encoder_ffn_dim": 512,
    "d_model": 128,
    "decoder_ffn_dim": 512,
    "decoder_in_channels": [128, 128],
    "decoder_n_points": [6, 6],
    "encode_proj_layers": [1],
    "feat_strides": [16, 32],
    "num_feature_levels": 2,
    "hidden_expansion": 0.34,
    "depth_mult": 2 / 3,
}
SIZES: dict[str, tuple[str, dict[str, Any]]] = {
    "RT-DETRv2-R18": ("rtdetrv2_r18_{}_120ep", {"encoder_in_channels": [128, 256, 512], "hidden_expansion": 0.5}),
    "D-FINE-N": ("dfine_n_{}", {"encoder_in_channels": [512, 1024], **NARROW}),
    "D-FINE-S": (
        "dfine_s_{}",
        {
            "encoder_in_channels": [256, 512, 1024],
            "decoder_n_points": [3, 6, 3],
            "hidden_expansion": 0.5,
            "depth_mult": 1 / 3,
        },
    ),
}
"""Name -> our config of configs/coco, without the encoding; what differs from the defaults of transformers' config."""


def shapes(size: str) -> list[Shape]:
    """The cases of one model: one image, an oblong one, a step of two, a step with padding; for ``quick`` small images."""
    shape = partial(Shape, DETR, stride=STRIDE)
    if size == "quick":
        return [shape(SMALL, 1, PASSES[0]), shape(SMALL, 2, PASSES[1])]
    alone = [shape(canvas, 1, PASSES[0]) for canvas in (CANVAS, OBLONG)]
    return [*alone, shape(CANVAS, 2, PASSES[1]), shape(CANVAS, 2, PASSES[1], PADDED[0])]


def cases(options: Options, build: Callable[..., Work] | None = None) -> list[Case]:
    """The cases of a size; ``build`` makes a case's work from a model's name, a shape and the options, like :func:`make_work`."""
    missing = "" if "transformers" in options.peers else "transformers is not installed"
    return [
        Case(
            name=f"{model}{shape.name.removeprefix(shape.model)}",
            about={"model": model, "image": shape.image, "images": shape.batch, "padded": shape.padded, "pass": shape.passes},
            build=partial(build or make_work, model, shape, options),
            left_out=missing,
        )
        for model in SIZES
        for shape in shapes(options.size)
    ]


def make_work(model: str, shape: Shape, options: Options) -> Work:
    """transformers as it comes and, at inference, with channels last and compiled; ours with sine, and with PEG."""
    batch, targets = make_inputs(shape, options.device)
    theirs = their_model(model, options.device)
    same, peg = (our_model(model, theirs.module, position, options.device) for position in ("sine", "peg"))
    make = partial(make_contender, shape, batch, targets)
    masked = MASKED if shape.padding > 0 else ""
    contenders = [make("transformers", theirs, peer=True)]
    if shape.passes == PASSES[0]:
        contenders.append(make("transformers, channels last", channels_last(their_model(model, options.device)), peer=True))
        quick = compiled(their_model(model, options.device))
        contenders.append(replace(make("transformers, compiled", quick, peer=True), attempt=True))
    return Work([*contenders, make("cpvt_det", same, other_work=masked), make("cpvt_det PEG", peg, other_work=ENCODING)])


def make_contender(
    shape: Shape, batch: PaddedBatch, targets: list[Targets], name: str, model: Model, peer: bool = False, other_work: str = ""
) -> Contender:
    """A model in the case's pass; what is compared are its predictions, ranked, in evaluation."""
    as_it_is = contextlib.nullcontext

    def call() -> Any:
        model.module.train(shape.passes == PASSES[1])
        return train(model, batch, targets, as_it_is) if shape.passes == PASSES[1] else infer(model, batch, as_it_is)

    def check() -> tuple[Tensor, ...]:
        model.module.eval()
        return tuple(x.sort(dim=1).values for x in infer(model, batch, as_it_is))

    return Contender(name, call, peer, other_work=other_work, check=check)


def their_model(model: str, device: str) -> Model:
    """transformers' model with weights from a fixed seed, drawn so that attention depends on the image."""
    import transformers

    name, words = SIZES[model]
    words = {**words, "num_labels": CLASSES, "decoder_layers": 3}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name.startswith("dfine"):
            indices = list(range(5 - len(words["encoder_in_channels"]), 5))
            backbone = transformers.HGNetV2Config(**HGNET_B0, out_indices=indices)
            module: nn.Module = transformers.DFineForObjectDetection(transformers.DFineConfig(backbone_config=backbone, **words))
        else:
            backbone = transformers.RTDetrResNetConfig(**RESNET_18, out_indices=[2, 3, 4])
            module = transformers.RTDetrV2ForObjectDetection(transformers.RTDetrV2Config(backbone_config=backbone, **words))
        draw_weights(module)
        for part in module.modules():
            if isinstance(part, nn.Conv2d):  # with transformers' initial values, the maps vanish, and answers ignore the image
                nn.init.kaiming_normal_(part.weight)
            elif isinstance(part, nn.BatchNorm2d):
                nn.init.ones_(part.weight)
    module.requires_grad_(True).to(device)

    def predict(batch: PaddedBatch) -> tuple[Tensor, Tensor]:
        output = module(batch.images)
        return output.logits, output.pred_boxes.clamp(0, 1)

    def learn(batch: PaddedBatch, targets: Sequence[Targets]) -> tuple[Tensor, Tensor, Tensor]:
        output = module(batch.images, labels=[{"class_labels": one.labels, "boxes": one.boxes_cxcywh} for one in targets])
        return output.logits, output.pred_boxes, output.loss

    return Model(module, predict, learn)


def our_model(model: str, theirs: nn.Module, position: str, device: str) -> Model:
    """Ours, with transformers' weights; PEG has its own."""
    words = ["MODEL.NUM_CLASSES", str(CLASSES), "MODEL.BACKBONE.NORM", "FrozenBN"]
    cfg = load_cfg(str(CONFIGS / f"{SIZES[model][0].format(position)}.yaml"), words)
    module, criterion = build_detector(cfg), build_criterion(cfg)
    load_weights(module, theirs.state_dict())
    return as_model(module.to(device), criterion)
