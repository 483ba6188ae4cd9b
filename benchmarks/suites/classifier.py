# SPDX-License-Identifier: Apache-2.0
"""DeiT-S and TNT-S of timm and ours with timm's weights, 224 x 224: inference and training steps.

Compared before timing: the logits; in training also the loss and the norm of all gradients. A training step sets gradients to None,
runs model and cross-entropy, and backward; nothing is dropped. Batches of images of unequal sizes are timed too: timm's two models
do not take them, so they stand beside ours on the canvas, full.
"""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.harness import ROUNDS, Case, Contender, Plan, Work
from benchmarks.suites import Options
from cpvt_det.builders import build_detector
from cpvt_det.checkpoint import convert_state_dict
from cpvt_det.common.structures import PaddedBatch, Size
from cpvt_det.config import load_cfg

TITLE = "Classifiers: DeiT-S and TNT-S"
PLANS = {"quick": Plan(warm_up=0, rounds=2, most_rounds=2), "full": Plan(rounds=ROUNDS, most_rounds=15, seconds=30.0)}

CLASSES = 1000
SIDE = 224
MODELS = {"DeiT-S": ("deit_small", "deit_small_patch16_224", "deit"), "TNT-S": ("tnt_small", "tnt_s_patch16_224", "tnt")}
"""Name -> our config of configs/imagenet, timm's name, the name of the conversion."""
PASSES = ("inference", "training step")
UNEQUAL: tuple[Size, ...] = ((224, 160), (160, 224), (224, 224), (192, 192))
"""Sizes of images that share a canvas of 224 x 224, in turns: a fifth of it is padded."""


@dataclass(frozen=True)
class Shape:
    """One case."""

    model: str
    batch: int
    passes: str
    unequal: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} b{self.batch}{', unequal sizes,' if self.unequal else ''} {self.passes}"

    @property
    def sizes(self) -> list[Size]:
        return [UNEQUAL[index % len(UNEQUAL)] if self.unequal else (SIDE, SIDE) for index in range(self.batch)]


def shapes(size: str) -> list[Shape]:
    """The cases: for ``quick`` one image."""
    batches = (1,) if size == "quick" else (8,)
    return [Shape(*shape, unequal) for unequal in (False, True) for shape in product(MODELS, batches, PASSES)]


def cases(options: Options) -> list[Case]:
    return [make_case(shape, options) for shape in shapes(options.size)]


def make_case(shape: Shape, options: Options) -> Case:
    return Case(
        name=shape.name,
        about={"model": shape.model, "images": shape.batch, "sizes": "unequal" if shape.unequal else "equal", "pass": shape.passes},
        build=partial(make_work, shape, options),
        memory=options.size != "quick" and shape.passes == PASSES[1] and not shape.unequal,
        warm=partial(make_work, Shape(shape.model, 1, shape.passes), options),
        left_out="" if importlib.util.find_spec("timm") else "timm is not installed",
    )


def make_inputs(shape: Shape, device: str) -> tuple[PaddedBatch, Tensor]:
    """Noise for images, and labels (B,) int64, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    images = [torch.randn(3, *size, generator=generator) for size in shape.sizes]
    labels = torch.randint(CLASSES, (shape.batch,), generator=generator)
    return PaddedBatch.from_images([image.to(device) for image in images], SIDE), labels.to(device)


def make_models(model: str, device: str) -> tuple[nn.Module, nn.Module]:
    """timm's model with drawn weights, wide enough for attention to depend on the image, and ours with the same."""
    import timm

    config, name, source = MODELS[model]
    torch.manual_seed(0)
    theirs = timm.create_model(name, num_classes=CLASSES)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.05)
    cfg = load_cfg(f"imagenet/{config}.yaml", ["MODEL.BACKBONE.DROP_PATH", "0.0", "MODEL.NUM_CLASSES", str(CLASSES)])
    ours = build_detector(cfg)
    found = convert_state_dict(theirs.state_dict(), source)
    ours.load_state_dict(ours.state_dict() | found)
    return theirs.to(device), ours.to(device)


def make_work(shape: Shape, options: Options) -> Work:
    """timm's model, and ours with its weights; of unequal sizes ours alone, beside a full canvas."""
    theirs, ours = make_models(shape.model, options.device)
    batch, labels = make_inputs(shape, options.device)
    canvas = torch.zeros_like(batch.padding_mask)
    make = partial(make_contender, shape, labels)
    if shape.unequal:
        padded = "images of unequal sizes, padded"
        found = [
            make("cpvt_det, full canvas", ours, lambda: ours(batch.images, canvas).logits[0]),
            make("cpvt_det", ours, lambda: ours(batch.images, batch.padding_mask).logits[0], other_work=padded),
        ]
        return Work(found, left_out={"timm": "it takes no padding mask"})
    found = [
        make("timm", theirs, lambda: theirs(batch.images), peer=True),
        make("cpvt_det", ours, lambda: ours(batch.images, canvas).logits[0]),
    ]
    return Work(found, tolerance=1e-4)


def make_contender(
    shape: Shape,
    labels: Tensor,
    name: str,
    model: nn.Module,
    predict: Callable[[], Tensor],
    peer: bool = False,
    other_work: str = "",
) -> Contender:
    """Inference, or a training step whose outcome is loss, logits and the norm of all gradients."""
    is_training = shape.passes == PASSES[1]
    model.train(is_training)

    def infer() -> Tensor:
        with torch.inference_mode():
            return predict()

    def learn() -> dict[str, Tensor]:
        model.zero_grad(set_to_none=True)
        logits = predict()
        loss = F.cross_entropy(logits, labels)
        loss.backward()
        return {"loss": loss.detach(), "logits": logits.detach()}

    def check() -> dict[str, Tensor]:
        outcome = learn()
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        return outcome | {"gradient": torch.nn.utils.get_total_norm(gradients)}

    return Contender(name, learn if is_training else infer, peer, other_work=other_work, check=check if is_training else None)
