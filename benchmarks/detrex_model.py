# SPDX-License-Identifier: Apache-2.0
"""Deformable-DETR of a checkout of detrex, with detectron2 from the installed library or from a checkout.

detrex's packages import many libraries that this model never calls; those that are not installed are replaced by empty modules.
The sizes are those of its ``projects/deformable_detr/configs``.
"""

import functools
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torchvision
from torch import nn

from cpvt_det.common.errors import BadInputError

NOT_CALLED = ("wandb", "omegaconf", "cloudpickle", "fairscale", "einops", "cv2", "pkg_resources")
"""Packages that detrex and detectron2 import, and that this model does not call."""
COMPILED = ("detrex._C", "detectron2._C")
CHANNELS, LEVELS, LAYERS, QUERIES, CLASSES = 256, 4, 6, 300, 80
STAGES = {"res3": 512, "res4": 1024, "res5": 2048}
WEIGHTS = {"loss_class": 1.0, "loss_bbox": 5.0, "loss_giou": 2.0}
COSTS = {"cost_class": 2.0, "cost_bbox": 5.0, "cost_giou": 2.0}


class EmptyModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """A finder that makes packages of names only: every attribute is an empty class."""

    def __init__(self, packages: tuple[str, ...], modules: tuple[str, ...]):
        self.packages, self.modules = packages, modules

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        stands_in = name in self.modules or name.partition(".")[0] in self.packages
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if stands_in else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__version__, module.__getattr__ = "0", functools.partial(_empty_class, spec.name)
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing is there to be run."""


def _empty_class(module: str, name: str) -> type:
    if name.startswith("__"):
        raise AttributeError(f"{module} is an empty module and has no {name}")
    return type(name, (), {})


@contextmanager
def imports_from(folders: list[Path], not_called: tuple[str, ...] = ()) -> Iterator[None]:
    """Import from checkouts in this block, with empty modules for what is not installed; no bytecode is written to them.

    Args:
        folders: checkouts.
        not_called: packages that they import and do not call, beside those of detrex.
    """
    path, written = sys.path[:], sys.dont_write_bytecode
    packages = tuple(name for name in (*NOT_CALLED, *not_called) if importlib.util.find_spec(name) is None)
    finder = EmptyModules(packages, COMPILED)
    sys.path[:0], sys.dont_write_bytecode = [str(folder) for folder in folders], True
    sys.meta_path.append(finder)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        sys.meta_path.remove(finder)
        sys.path[:], sys.dont_write_bytecode = path, written
        for name in [name for name, module in sys.modules.items() if getattr(module, "__loader__", None) is finder]:
            del sys.modules[name]


@functools.cache
def detrex_modules(folder: Path, detectron2: Path | None) -> types.SimpleNamespace:
    """The modules that a Deformable-DETR is made of: ``project``, ``modeling``, ``layers``, ``resnet``, ``d2_layers``.

    Args:
        folder: checkout of detrex.
        detectron2: checkout of detectron2; ``None`` for the installed library.

    Raises:
        BadInputError: files that cannot be imported.
    """
    with imports_from([folder, *([detectron2] if detectron2 else [])]):
        try:
            return types.SimpleNamespace(
                project=importlib.import_module("projects.deformable_detr.modeling"),
                modeling=importlib.import_module("detrex.modeling"),
                layers=importlib.import_module("detrex.layers"),
                resnet=importlib.import_module("detectron2.modeling.backbone"),
                d2_layers=importlib.import_module("detectron2.layers"),
            )
        except Exception as error:
            raise BadInputError(f"peer detrex: its Deformable-DETR cannot be imported: {error}; it needs detectron2 too") from error


@contextmanager
def official_constants(folder: Path, detectron2: Path | None) -> Iterator[None]:
    """In this block, the two constants in which detrex differs from the official code have the official values."""
    detrex_modules(folder, detectron2)
    utils = importlib.import_module("detrex.utils")
    set_to = {
        "inverse_sigmoid": functools.partial(utils.inverse_sigmoid, eps=1e-5),
        "generalized_box_iou": torchvision.ops.generalized_box_iou,
    }
    with replaced_names(
        [vars(module) for name, module in sys.modules.items() if name.startswith(("detrex.", "projects."))], set_to
    ):
        yield


@contextmanager
def replaced_names(namespaces: list[dict[str, Any]], set_to: dict[str, Any]) -> Iterator[None]:
    """Inside, names have other values in those namespaces that have them."""
    before = [(space, name, space[name]) for space in namespaces for name in set_to if name in space]
    for space, name, _ in before:
        space[name] = set_to[name]
    try:
        yield
    finally:
        for space, name, value in before:
            space[name] = value


def build_detrex(folder: Path, detectron2: Path | None, refine: bool, two_stage: bool) -> nn.Module:
    """detrex's detector with random weights, on the CPU, for normalised images. The criterion is ``.criterion``.

    Args:
        folder: checkout of detrex.
        detectron2: checkout of detectron2; None for the installed one.
        refine: whether every decoder layer corrects the boxes of the one before.
        two_stage: whether queries are the encoder's proposals.
    """
    found = detrex_modules(folder, detectron2)
    resnet = found.resnet.ResNet(
        stem=found.resnet.BasicStem(in_channels=3, out_channels=64, norm="FrozenBN"),
        stages=found.resnet.ResNet.make_default_stages(depth=50, stride_in_1x1=False, norm="FrozenBN"),
        out_features=list(STAGES),
        freeze_at=1,
    )
    module = found.project.DeformableDETR(
        backbone=resnet,
        position_embedding=found.layers.PositionEmbeddingSine(CHANNELS // 2, temperature=10000, normalize=True, offset=-0.5),
        neck=found.modeling.ChannelMapper(
            input_shapes={name: found.d2_layers.ShapeSpec(channels=channels) for name, channels in STAGES.items()},
            in_features=list(STAGES),
            out_channels=CHANNELS,
            num_outs=LEVELS,
            kernel_size=1,
            norm_layer=nn.GroupNorm(32, CHANNELS),
        ),
        transformer=_transformer(found, two_stage),
        embed_dim=CHANNELS,
        num_classes=CLASSES,
        num_queries=QUERIES,
        criterion=_criterion(found),
        pixel_mean=[0.0] * 3,
        pixel_std=[1.0] * 3,
        with_box_refine=refine,
        as_two_stage=two_stage,
        device="cpu",
    )
    module.normalizer = torch.nn.Identity()
    return module


def _transformer(found: types.SimpleNamespace, two_stage: bool) -> nn.Module:
    sizes = {"embed_dim": CHANNELS, "feedforward_dim": 4 * CHANNELS, "num_layers": LAYERS, "num_feature_levels": LEVELS}
    return found.project.DeformableDetrTransformer(
        encoder=found.project.DeformableDetrTransformerEncoder(**sizes),
        decoder=found.project.DeformableDetrTransformerDecoder(**sizes, return_intermediate=True),
        as_two_stage=two_stage,
        num_feature_levels=LEVELS,
        two_stage_num_proposals=QUERIES,
    )


def _criterion(found: types.SimpleNamespace) -> nn.Module:
    suffixes = ["", *(f"_{layer}" for layer in range(LAYERS - 1)), "_enc"]
    weights = {name + suffix: weight for suffix in suffixes for name, weight in WEIGHTS.items()}
    matcher = found.modeling.HungarianMatcher(**COSTS, cost_class_type="focal_loss_cost")
    return found.project.DeformableCriterion(CLASSES, matcher, weights, loss_class_type="focal_loss")
