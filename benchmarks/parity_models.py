# SPDX-License-Identifier: Apache-2.0
"""Pairs of detectors with the same weights, ours and a peer's, and the batch for both.

The weights are drawn at random in the peer's module, so that features keep their size and queries depend on the image, and are
loaded into ours by :func:`cpvt_det.checkpoint.load_weights`.
"""

import contextlib
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.detrex_model import build_detrex, official_constants
from benchmarks.models import CONFIGS, DRAWN_WIDE, Recipe, build_official, set_dropout
from benchmarks.parity_variants import Variant
from cpvt_det.builders import build_criterion, build_detector
from cpvt_det.checkpoint import load_weights
from cpvt_det.common.structures import PaddedBatch, Targets
from cpvt_det.config import load_cfg

OBJECTS = (4, 0, 7)  # objects in the images of a batch
FULL = {name: Recipe(name, queries=queries) for name, queries in (("DETR", 100), ("Deformable-DETR", 300))}
CLASS_BIAS = re.compile(r"class_embed\.(\d+\.)?bias$")
APART = 1e-5  # smallest distance of the logits that rank proposals, which float32 rounds by a few 1e-6
BLOCK_NORM = re.compile(r"^(bn\d|conv\d\.norm|downsample\.1|shortcut\.norm)$")


@dataclass
class Peer:
    """A detector that is called like the official one, or through an adapter.

    Args:
        module: the detector.
        criterion: function ``criterion(output, targets)`` that returns losses by their official names; it has ``matcher`` and
            ``weight_dict``.
        forward: function of a batch that returns ``pred_logits``, ``pred_boxes``, ``aux_outputs`` and, with two stages,
            ``enc_outputs``.
        source: source of the names of its weights, as in ``cpvt-det convert-weights``.
        settings: function that returns a context to run the detector in.
    """

    module: nn.Module
    criterion: nn.Module
    forward: Callable[[PaddedBatch], dict[str, Any]]
    source: str
    settings: Callable[[], contextlib.AbstractContextManager] = contextlib.nullcontext


# The batch and the weights


def draw_batch(sizes: Sequence[tuple[int, int]], classes: int, divisor: int) -> tuple[PaddedBatch, list[Targets]]:
    """Images of noise with a gradient across, and objects with no two boxes alike; float64, always the same."""
    generator = torch.Generator().manual_seed(1)

    def uniform(*shape: int) -> Tensor:
        return torch.rand(*shape, generator=generator, dtype=torch.float64)

    targets = []
    for count in OBJECTS[: len(sizes)]:
        side = 0.1 + 0.4 * uniform(count, 2)
        boxes = torch.cat((side / 2 + uniform(count, 2) * (1 - side), side), 1)
        targets.append(Targets(torch.randint(classes, (count,), generator=generator), boxes))
    images = [2 * uniform(3, *size) - 2 + 2 * torch.linspace(0, 1, size[1], dtype=torch.float64) for size in sizes]
    return PaddedBatch.from_images(images, divisor), targets


def in_dtype(batch: PaddedBatch, targets: Sequence[Targets], dtype: torch.dtype) -> tuple[PaddedBatch, list[Targets]]:
    """A batch and its targets rounded to a dtype; their float32 values in float64 too, so that both dtypes get the same input."""
    images = batch.images.float().to(dtype)
    rounded = [Targets(target.labels, target.boxes_cxcywh.float().to(dtype)) for target in targets]
    return PaddedBatch(images, batch.padding_mask, batch.image_sizes), rounded


@torch.no_grad()
def draw_weights(peer: Peer, batch: PaddedBatch) -> None:
    """Norms, biases and statistics that all differ, heads and sampling points drawn wide, and features that keep their size."""
    for name, tensor in peer.module.state_dict().items():
        fan_in = tensor.shape[-1] ** -0.5 if tensor.ndim else 1.0
        if name.endswith("sampling_offsets.bias") or CLASS_BIAS.search(name):
            tensor.add_(torch.randn_like(tensor) / 4)  # they start as a star, and as a rare class
        elif name.endswith("running_var") or (tensor.ndim == 1 and name.endswith("weight")):
            tensor.uniform_(0.5, 1.0)
        elif tensor.ndim == 1 and tensor.is_floating_point():
            tensor.uniform_(-0.2, 0.2)
        elif name.endswith("sampling_offsets.weight"):
            tensor.normal_(0, 0.5 * fan_in)
        elif name.endswith("in_proj_weight"):
            tensor[: 2 * tensor.shape[1]].normal_(0, 2 * fan_in)  # of queries and keys: what is attended to differs
        elif DRAWN_WIDE.search(name):
            tensor.normal_(0, fan_in)
    _scale_features(peer, batch)
    if hasattr(getattr(peer.module, "transformer", None), "enc_output"):
        _draw_ranks(peer, batch)


def _draw_ranks(peer: Peer, batch: PaddedBatch) -> None:
    """Draw what proposals are ranked by until no rounding can change their order; padded tokens, made of zeros, come last."""
    norm, head = peer.module.transformer.enc_output_norm, peer.module.class_embed[-1]
    zero_token = norm(peer.module.transformer.enc_output.bias)
    tokens: list[Tensor] = []
    hook = norm.register_forward_hook(lambda _, __, output: tokens.append(output))
    with peer.settings():
        peer.forward(batch)
    hook.remove()
    row = head.weight[0]
    for _ in range(1000):
        row.normal_(0, len(row) ** -0.5).sub_(zero_token / len(row) ** 0.5)
        ranked = (tokens[0] @ row).sort(1, descending=True)[0][:, : peer.module.num_queries + 1]
        if (ranked[:, :-1] - ranked[:, 1:]).min() > APART:
            return
    raise RuntimeError(f"after 1000 draws, logits of two proposals still differ by less than {APART}")


def _scale_features(peer: Peer, batch: PaddedBatch) -> None:
    """Divide the last norms of the backbone's blocks, and a projection without a norm, by the deviation of their output."""

    def rescale(parts: list[nn.Module], module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        for part in parts:
            part.weight /= output.std()
            part.bias /= output.std()
        return module.forward(*inputs)

    hooks = []
    for module in peer.module.modules():
        norms = {name: part for name, part in module.named_modules() if BLOCK_NORM.match(name)}
        if hasattr(module, "conv2") and norms:
            last = max(name for name in norms if name.startswith(("bn", "conv")))
            parts = [part for name, part in norms.items() if name == last or name.startswith(("downsample", "shortcut"))]
            hooks.append(module.register_forward_hook(lambda *given, parts=parts: rescale(parts, *given)))
    if isinstance(projection := getattr(peer.module, "input_proj", None), nn.Conv2d):
        hooks.append(projection.register_forward_hook(lambda *given: rescale([given[0]], *given)))
    with peer.settings():
        peer.forward(batch)
    for hook in hooks:
        hook.remove()


# The two detectors


def build_peer(variant: Variant, folders: Mapping[str, Path | None]) -> Peer:
    """The peer's detector and criterion, without dropout and with weights not yet drawn."""
    if variant.peer == "detrex":
        peer = _detrex_peer(variant, folders["detrex"], folders.get("detectron2"))
    else:
        peer = _official_peer(variant, folders[variant.peer])
    set_dropout(peer.module, 0.0)
    return peer


def _official_peer(variant: Variant, folder: Path) -> Peer:
    deformable = variant.peer == "deformable_detr"
    recipe = FULL["Deformable-DETR" if deformable else "DETR"]
    official, module, criterion = build_official(folder, recipe, **variant.arguments)
    source = "deformable_detr" if deformable else "facebook_detr"
    return Peer(module, criterion, lambda batch: module(official.NestedTensor(batch.images, batch.padding_mask)), source)


def _detrex_peer(variant: Variant, folder: Path, detectron2: Path | None) -> Peer:
    """In training, as in evaluation it takes padding for image; its output is what its criterion is given."""
    module = build_detrex(folder, detectron2, variant.arguments.get("refine", False), variant.two_stage).train()
    module.prepare_targets = lambda instances: None

    def forward(batch: PaddedBatch) -> dict[str, Any]:
        given = [
            {"image": image[:, :height, :width], "instances": _Instances((height, width))}
            for image, (height, width) in zip(batch.images, batch.image_sizes, strict=True)
        ]
        outputs: list[dict[str, Any]] = []
        module.criterion.forward = lambda output, targets: outputs.append(output) or {}
        try:
            module(given)
        finally:
            del module.criterion.forward
        return outputs[0]

    settings = contextlib.nullcontext if variant.own_constants else lambda: official_constants(folder, detectron2)
    return Peer(module, module.criterion, forward, "detrex_deformable_detr", settings)


class _Instances(types.SimpleNamespace):
    """The size of an image, in place of detectron2's object with this and its boxes."""

    def __init__(self, image_size: tuple[int, int]):
        super().__init__(image_size=image_size)

    def to(self, device: Any) -> "_Instances":
        return self


def build_ours(variant: Variant, state: Mapping[str, Tensor], source: str) -> tuple[nn.Module, Any, int]:
    """Our detector with a peer's weights, our criterion, and how many tensors were loaded.

    Raises:
        RuntimeError: weights that were not all loaded.
    """
    common = ("MODEL.NUM_CLASSES", "80" if variant.peer == "detrex" else "91", "MODEL.BACKBONE.MASK_PADDING", "False")
    overrides = [*common, "MODEL.DETR.DROPOUT", "0.0", "MODEL.BACKBONE.WEIGHTS", "", *variant.overrides]
    cfg = load_cfg(str(CONFIGS / variant.config), overrides)
    detector = build_detector(cfg)
    report = load_weights(detector, state)
    if report.is_partial or report.source != source:
        raise RuntimeError(f"{variant.peer}, {variant.name}: {report}")
    return detector.train(), build_criterion(cfg), len(report.loaded)


def to_dtype(peer: Peer, dtype: torch.dtype) -> None:
    """A peer's detector and criterion; the weight of "no object" keeps its exact value instead of its float32 rounding."""
    peer.module.to(dtype)
    peer.criterion.to(dtype)
    if hasattr(peer.criterion, "empty_weight"):
        peer.criterion.empty_weight[-1] = peer.criterion.eos_coef
