# SPDX-License-Identifier: Apache-2.0
"""Whole models: DETR-R50, Deformable-DETR-R50 and DINO-R50, inference and training steps, and encoders with PEG and with sine.

Our sine model does the work of the official one and of transformers', to the same outputs: without dropout, logits and boxes
of the last layer, the total loss and the norm of all gradients are compared. Then all are timed with a dropout of 0.1
everywhere, but DINO with none, and with the noise of its denoising queries. Ours with PEG, as it ships, does other work and is
timed beside them; and once more beside ours with sine alone.
Peers are timed as they come and with the switches of ``benchmarks/at_best.py``. Batches come without padding and with it.

A training step here sets gradients to None, runs the model, the criterion with matcher and auxiliary losses, and backward. Clipping
and the optimiser's step are left out: they are the same few passes over the parameters for all.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor

from benchmarks.at_best import AT_BEST, at_best
from benchmarks.clocks import Command
from benchmarks.harness import ROUNDS, Case, Contender, Plan, Work
from benchmarks.models import Model, Recipe, detrex_model, hf_model, official_model, our_model, set_dropout, without_chance
from benchmarks.suites import Options
from cpvt_det.common.structures import Levels, PaddedBatch, Size, Targets, level_padding_mask
from cpvt_det.models.detector import Detector

TITLE = "DETR-R50, Deformable-DETR-R50 and DINO-R50, whole models"
PLANS = {"quick": Plan(warm_up=0, rounds=2, most_rounds=2), "full": Plan(rounds=ROUNDS, most_rounds=15, seconds=30.0)}

IMAGES: dict[str, Size] = {"quick": (256, 256), "cpu": (640, 640), "cuda": (800, 1333)}
CANVAS: Size = (640, 640)
PADDED: tuple[tuple[Size, ...], ...] = (((640, 448), (464, 640)), ((640, 320), (320, 640)))
"""Two images, one upright and one lying, on the canvas: 29 and 50 % of it are padded."""
TINY: Size = (64, 64)
FEW_QUERIES = 50  # of the 85 tokens of a tiny image with four levels, as many can be proposals
STRIDE = 64  # sides of canvases are multiples of it
OBJECTS = 26
PASSES = ("inference", "training step")
KEEP_MEMORY = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "2147483647", "MALLOC_TOP_PAD_": "67108864"}
"""Settings of glibc: no memory of a process goes back to the kernel."""
DETR, DEFORMABLE, DINO = Recipe("DETR", queries=100), Recipe(), Recipe("DINO", queries=900, two_stage=True, dropout=0.0)
DETREX = replace(DINO, detector="detrex DINO")
SMALL = (Recipe("DETR", channels=64, layers=3, queries=100), Recipe(channels=64, layers=3), replace(DINO, layers=2, queries=100))
HEADS = ("class_embed", "bbox_embed")
FEW_OTHERS = {"inference": 1e-3, "training step": 1e-2}
"""Tolerance of DINO's outcomes: of its 900 proposals, one or two at the border are others by rounding alone. In float64 the losses
and gradients of all are compared (``benchmarks/foreign_weights.py``)."""
HALF_TOLERANCE = 0.1
MUCH = 0.4
"""Share of padding above which a case has few contenders."""
PEG = "another position encoding, and padding masked in the backbone: ours as it ships"
ENCODING = "another position encoding"
OTHER_DETECTOR = "another detector"
ROUNDED_PROPOSALS = "in half precision other proposals are chosen"  # it cannot order two with nearly equal scores
OTHER_PROPOSALS = "padded tokens are no proposals"
MASKED = "padding masked in the backbone: ours as it ships, with sine"


@dataclass(frozen=True)
class Shape:
    """One case: recipe, the images' size, how many, and the pass; or the sizes of images of which ``size`` is the canvas."""

    recipe: Recipe
    size: Size
    batch: int
    passes: str
    sizes: tuple[Size, ...] = ()
    stride: int = STRIDE

    @property
    def model(self) -> str:
        return f"{self.recipe.detector}-R50" + (", two stages" if self.recipe.two_stage and not self.recipe.is_dino else "")

    @property
    def image_sizes(self) -> list[Size]:
        return list(self.sizes) or [self.size] * self.batch

    @property
    def image(self) -> str:
        return f"{self.size[0]}x{self.size[1]}"

    @property
    def name(self) -> str:
        return f"{self.model} {self.image} b{self.batch}{f', {self.padded} padded,' if self.sizes else ''} {self.passes}"

    @property
    def canvas(self) -> Size:
        height, width = (-(-max(sides) // self.stride) * self.stride for sides in zip(*self.image_sizes, strict=True))
        return height, width

    @property
    def padding(self) -> float:
        """The share of the batch's canvas that is padded."""
        return 1 - sum(height * width for height, width in self.image_sizes) / (self.batch * self.canvas[0] * self.canvas[1])

    @property
    def is_short(self) -> bool:
        """Whether the case has few contenders: those with most padding, and detrex's."""
        return self.padding > MUCH or self.recipe == DETREX

    def has_bf16(self, device: str) -> bool:
        """Whether the case has contenders in bf16."""
        return has_bf16(device) and not self.recipe.is_dino

    @property
    def padded(self) -> str:
        return f"{100 * self.padding:.0f} %"

    def at(self, size: Size) -> "Shape":
        """The same case with images of another size, and about the same share of padding."""
        (height, width), (old_height, old_width) = size, self.size
        sizes = tuple((-(-height * h // old_height), -(-width * w // old_width)) for h, w in self.sizes)
        return replace(self, size=size, sizes=sizes)

    @property
    def tiny(self) -> "Shape":
        """The same case with tiny images, and no more queries than these have proposals."""
        return replace(self.at(TINY), recipe=replace(self.recipe, queries=min(self.recipe.queries, FEW_QUERIES)))


def shapes(size: str, device: str) -> list[Shape]:
    """The cases: ``quick`` small models, ``default`` DETR and DINO with two images and Deformable-DETR with one, ``all`` also
    Deformable-DETR with two and with two stages; on a GPU one image and eight.

    A GPU does everything in less time, so there ``default`` is all.
    """
    image = IMAGES["quick" if size == "quick" else device]
    several = 8 if device == "cuda" else 2
    if size == "quick":
        kinds = [(recipe, image, 1) for recipe in SMALL]
    elif size == "default" and device == "cpu":
        kinds = [(DETR, image, several), (DEFORMABLE, image, 1), (DINO, image, several)]
    else:
        # Padded tokens are proposals in the official code and not in ours, so with two stages nothing is padded.
        canvas = (-(-image[0] // STRIDE) * STRIDE, -(-image[1] // STRIDE) * STRIDE)
        two_stage = Recipe(two_stage=True)
        kinds = [(DETR, image, several), (DEFORMABLE, image, 1), (DEFORMABLE, image, several), (two_stage, canvas, 1)]
        kinds.append((DINO, canvas, several))
        if device == "cuda":
            kinds.append((DETR, image, 1))
    return [Shape(*kind, passes) for kind, passes in product(kinds, PASSES)]


def padded_shapes(size: str) -> list[Shape]:
    """All detectors with padded batches; none for ``quick``."""
    if size == "quick":
        return []
    kinds = product((DETR, DEFORMABLE, DINO), PADDED, PASSES)
    return [Shape(recipe, CANVAS, len(sizes), passes, sizes) for recipe, sizes, passes in kinds]


def detrex_shapes(options: Options) -> list[Shape]:
    """DINO with the encoding of detrex, where a checkout is given; it masks the padding in training alone."""
    if "detrex" not in options.peers or options.size == "quick":
        return []
    plain = [Shape(DETREX, CANVAS, 2, passes) for passes in PASSES]
    return [*plain, Shape(DETREX, CANVAS, 2, PASSES[1], PADDED[0])]


def cases(options: Options) -> list[Case]:
    chosen = shapes(options.size, options.device)
    beside = [*padded_shapes(options.size), *detrex_shapes(options)]
    found = [make_case(shape, options) for shape in [*chosen, *beside]]
    found += [make_encoding_case(shape, part, options) for part in ("", "encoder of ") for shape in chosen[: 2 * len(PASSES)]]
    found += [make_detectors_case(shape, options) for shape in chosen if shape.recipe == DINO and shape.passes == PASSES[0]]
    if options.device == "cpu" and options.size != "quick":
        found += [make_kept_memory_case(shape) for shape in chosen if shape.passes == PASSES[1] and not shape.recipe.two_stage]
    return found


def make_case(shape: Shape, options: Options) -> Case:
    return Case(
        name=shape.name,
        about=about(shape, shape.model, shape.passes),
        build=partial(make_work, shape, options),
        memory=options.device == "cuda" or (options.size != "quick" and shape.passes == PASSES[1] and not shape.sizes),
        warm=partial(make_work, shape.tiny, options),
    )


def about(shape: Shape, model: str, passes: str) -> dict[str, Any]:
    """Columns of the table; the image is the canvas of a padded batch."""
    return {"model": model, "image": shape.image, "images": shape.batch, "padded": shape.padded, "pass": passes}


def make_encoding_case(shape: Shape, part: str, options: Options) -> Case:
    """The cost of PEG compared with sine, in the whole model, and in position encoding and encoder alone."""
    return Case(
        name=f"{part}{shape.name}, sine and PEG",
        about=about(shape, f"{part}{shape.model}", shape.passes),
        build=partial(make_encoding_work, shape, part, options),
    )


def make_detectors_case(shape: Shape, options: Options) -> Case:
    """What DINO costs at inference beside Deformable-DETR with two stages and as many queries."""
    return Case(
        name=f"{shape.name}, beside Deformable-DETR",
        about=about(shape, f"{shape.model} and Deformable-DETR-R50", shape.passes),
        build=partial(make_detectors_work, shape, options),
    )


def make_kept_memory_case(shape: Shape) -> Case:
    """The cost of glibc returning large blocks to the kernel, which sets them to zero when they are used again."""
    words = [sys.executable, "-m", "benchmarks.step_process", shape.recipe.detector, str(shape.size[0]), str(shape.batch)]
    return Case(
        name=f"{shape.name}, memory kept",
        about=about(shape, shape.model, f"{shape.passes}, own process"),
        build=lambda: Work(
            [
                Contender("cpvt_det PEG", Command(words)),
                Contender("cpvt_det PEG, memory kept", Command(words, KEEP_MEMORY)),
            ]
        ),
    )


def make_encoding_work(shape: Shape, part: str, options: Options) -> Work:
    """Our model with its default settings, with sine and with PEG."""
    batch, targets = make_inputs(shape, options.device)
    contenders = []
    for name, position in (("sine", ""), ("PEG", "peg")):
        model = our_model(shape.recipe, options.device, position)
        contender = make_contender(shape, batch, targets, f"cpvt_det {name}", model, other_work=ENCODING if position else "")
        if part:
            masks = [level_padding_mask(batch.padding_mask, stride) for stride in model.module.strides]
            features = [torch.randn(shape.batch, shape.recipe.channels, *mask.shape[1:], device=options.device) for mask in masks]
            call = partial(encode, model.module, features, masks, shape.passes == PASSES[1])
            contender = replace(contender, call=call, check=None)
        contenders.append(contender)
    return Work(contenders)


def make_detectors_work(shape: Shape, options: Options) -> Work:
    """Our Deformable-DETR and our DINO, both with PEG.

    Their feed-forward networks are 1024 and 2048 wide, as published; and Deformable-DETR once more with those of DINO.
    """
    batch, targets = make_inputs(shape, options.device)
    two_stage = replace(shape.recipe, detector=DEFORMABLE.detector)
    as_wide = replace(two_stage, width_of=DINO.detector)
    contenders = []
    for name, recipe in (("Deformable-DETR", two_stage), ("Deformable-DETR, as wide as DINO", as_wide), ("DINO", shape.recipe)):
        model = our_model(recipe, options.device, "peg")
        contenders.append(make_contender(shape, batch, targets, f"cpvt_det {name}", model, other_work=OTHER_DETECTOR))
    return Work(contenders)


def encode(detector: Detector, features: list[Tensor], masks: list[Tensor], backward: bool) -> Tensor:
    """The memory; in training its gradients too."""
    detector.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(backward):
        levels = Levels.from_masks(masks, features[0].dtype)
        memory = detector.transformer.encode(features, levels, detector.position).tokens
    if backward:
        memory.square().mean().backward()
    return memory.detach()


def make_inputs(shape: Shape, device: str) -> tuple[PaddedBatch, list[Targets]]:
    """Noise for images, and objects anywhere, from a fixed seed."""
    generator = torch.Generator().manual_seed(0)
    targets = []
    for _ in range(shape.batch):
        sides = 0.05 + 0.4 * torch.rand(OBJECTS, 2, generator=generator)
        centres = sides / 2 + torch.rand(OBJECTS, 2, generator=generator) * (1 - sides)
        labels = torch.randint(DETR.classes, (OBJECTS,), generator=generator)
        targets.append(Targets(labels, torch.cat((centres, sides), 1)).to(device))
    images = [torch.randn(3, *size, generator=generator).to(device) for size in shape.image_sizes]
    return PaddedBatch.from_images(images, shape.stride), targets


def make_work(shape: Shape, options: Options) -> Work:
    """All contenders with the same weights; the first one is the official model if it is available, then transformers'.

    A short case has peers as they come, and ours in float32. DINO has its authors' code as it comes and with all switches of
    ``at_best.py`` together, and none in bf16.
    """
    batch, targets = make_inputs(shape, options.device)
    left_out: dict[str, str] = {}
    same = our_model(shape.recipe, options.device, mask_padding=False)
    make = partial(make_contender, shape, batch, targets)
    builds = peers_of(shape.recipe, same, options, left_out)
    peers = {name: build() for name, build in builds.items()}
    contenders = [make(name, model, peer=True) for name, model in peers.items()]
    bf16 = shape.has_bf16(options.device)
    if not shape.is_short:
        for name, model in peers.items():
            found = at_best(name, model, builds[name], make, options.size == "all", bf16)
            if shape.recipe.is_dino:  # a step of its code takes half a minute
                found = [one for one in found if one.name.endswith(AT_BEST)]
            contenders += found
    if shape.recipe.is_dino:
        left_out["bf16"] = ROUNDED_PROPOSALS
    elif not bf16:
        left_out["bf16"] = "the processor's instructions, as far as torch uses them, have no products of bf16"
    return Work([*contenders, *our_contenders(shape, same, make, options)], tolerance(shape, options.device), left_out)


def our_contenders(shape: Shape, same: Model, make: Callable[..., Contender], options: Options) -> list[Contender]:
    """Ours with the work of the peers; as it ships, which masks the padding; with PEG; and those in bf16.

    Args:
        shape: the case.
        same: our model that does the work of the peers.
        make: function that makes a contender.
        options: options of the run.
    """
    rounded = ROUNDED_PROPOSALS if shape.recipe.two_stage else ""
    peg = our_model(shape.recipe, options.device, "peg")
    found = [make("cpvt_det", same, other_work=OTHER_PROPOSALS if shape.padding > 0 and shape.recipe.two_stage else "")]
    if shape.padding > 0:
        found.append(make("cpvt_det, padding masked", our_model(shape.recipe, options.device), other_work=MASKED))
    found.append(make("cpvt_det PEG", peg, other_work=PEG))
    if shape.has_bf16(options.device) and not shape.is_short:
        found.append(make("cpvt_det bf16", same, bf16=True, other_work=rounded))
        found.append(make("cpvt_det PEG bf16", peg, bf16=True, other_work=PEG))
    if shape.passes == PASSES[1] and not shape.sizes:
        frugal = our_model(shape.recipe, options.device, "peg", checkpointing=True)
        found.append(make("cpvt_det PEG, checkpointing", frugal, other_work=PEG))
    return found


def has_bf16(device: str) -> bool:
    """Whether bf16 may save time; with AVX2 alone its convolutions take minutes."""
    return device != "cpu" or torch.backends.cpu.get_cpu_capability().startswith("AVX512")


def tolerance(shape: Shape, device: str) -> float:
    """Of outputs, and in training of the loss and the gradients' norm too; a GPU's convolutions may round to TF32."""
    if shape.recipe.is_dino:
        return FEW_OTHERS[shape.passes]
    if device == "cuda":
        return 1e-3
    return 1e-5 if shape.passes == PASSES[0] else 1e-4


def peers_of(recipe: Recipe, ours: Model, options: Options, left_out: dict[str, str]) -> dict[str, Callable[[], Model]]:
    """The name of each peer, and a function that makes its model with our weights."""
    found: dict[str, Callable[[], Model]] = {}
    state = {name: tensor.cpu() for name, tensor in ours.module.state_dict().items()}  # peers are made there
    peer = recipe.origin.peer
    checkout = options.peers.get(peer)
    if checkout is None:
        left_out["official"] = f"no checkout given: --peer {peer}=PATH"
    elif peer == "detrex":
        found["detrex"] = partial(detrex_model, checkout, recipe, options.device, state)
    else:
        found["official"] = partial(official_model, checkout, recipe, options.device, state)
    if "detrex" in options.peers and recipe.detector == DEFORMABLE.detector:
        left_out["detrex"] = "its models import only where all of it is compiled; its core is in the suite op"
    if "transformers" not in options.peers:
        left_out["transformers"] = "not installed"
    elif recipe.is_dino:
        left_out["transformers"] = "it has no DINO"
    elif recipe.two_stage:
        left_out["transformers"] = "its refining layers share the class head, and its loss leaves proposals out"
    else:
        found["transformers"] = partial(hf_model, recipe, options.device, state)
    return found


def make_contender(
    shape: Shape,
    batch: PaddedBatch,
    targets: list[Targets],
    name: str,
    model: Model,
    peer: bool = False,
    bf16: bool = False,
    other_work: str = "",
) -> Contender:
    """A model in the case's pass; models may be shared, because no call changes them."""
    model.module.train(shape.passes == PASSES[1])
    set_dropout(model.module, shape.recipe.dropout)
    device = batch.images.device.type
    autocast = partial(torch.autocast, device, torch.bfloat16) if bf16 else contextlib.nullcontext
    if shape.passes == PASSES[1]:
        call: Callable[[], Any] = partial(train, model, batch, targets, autocast)
        check = partial(outcome_of_training, model, call, shape.recipe)
    else:
        call = partial(infer, model, batch, autocast)
        check = partial(_answer, call, shape.recipe)
    tolerance = HALF_TOLERANCE if bf16 else None
    return Contender(name, call, peer, tolerance, other_work=other_work, check=check)


def infer(model: Model, batch: PaddedBatch, autocast: Callable[[], Any]) -> tuple[Tensor, Tensor]:
    """Logits and boxes."""
    with torch.no_grad(), autocast():
        return model.predict(batch)


def train(model: Model, batch: PaddedBatch, targets: list[Targets], autocast: Callable[[], Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Logits, boxes and total loss; the gradients stay in the parameters."""
    model.module.zero_grad(set_to_none=True)
    with autocast():
        logits, boxes, total = model.learn(batch, targets)
    total.backward()
    return logits.detach(), boxes.detach(), total.detach()


def outcome_of_training(model: Model, call: Callable[[], tuple[Tensor, Tensor, Tensor]], recipe: Recipe) -> dict[str, Tensor]:
    """The results of one step without dropout and noise; the norm is of all gradients but those of heads that one model shares."""
    with without_chance(model.module, recipe.dropout):
        logits, boxes, total = call()
    named = [(name, parameter.grad) for name, parameter in model.module.named_parameters() if parameter.grad is not None]
    gradients = [slope for name, slope in named if not (recipe.origin.shares_heads and any(head in name for head in HEADS))]
    norm = torch.stack([gradient.norm() for gradient in gradients]).norm()
    return {**_answer(lambda: (logits, boxes), recipe), "loss": total, "gradient_norm": norm}


def _answer(call: Callable[[], tuple[Tensor, Tensor]], recipe: Recipe) -> dict[str, Tensor]:
    """The outputs without the order of queries that are ranked proposals: two with equal scores may be swapped. Of DINO, means."""
    named = dict(zip(("logits", "boxes"), (x.float() for x in call()), strict=True))
    if recipe.is_dino:
        return {name: x.mean(dim=1) for name, x in named.items()}
    return {name: x.sort(dim=1).values if recipe.two_stage else x for name, x in named.items()}
