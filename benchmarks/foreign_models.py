# SPDX-License-Identifier: Apache-2.0
"""Models of DINO, H-DETR and detrex with random weights, made by the authors' code from checkouts."""

import argparse
import contextlib
import dataclasses
import functools
import importlib
import runpy
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn

from benchmarks.detrex_model import imports_from, replaced_names
from benchmarks.equal import DoubleTorch
from benchmarks.peers import official_core, official_cuda_op, official_op, packages_of, with_extension
from cpvt_det.common.class_names import COCO_CLASSES, COCO_ROWS
from cpvt_det.common.errors import BadInputError
from cpvt_det.config import load_cfg

NOT_CALLED = ("panopticapi", "pycocotools", "termcolor", "addict", "mmcv", "mmdet", "mmcv_custom")
"""Packages that DINO's and H-DETR's files import, and that these models do not call."""
LIMIT = 1e-10
"""Largest relative difference of outputs in float64, of which some hundred operations lose digits."""
EPSILON = 1e-5
"""Of the numbers of boxes, from 0 and 1, as in our code; 1e-3 in DINO's and detrex's."""
LOSSES = {"cls": 2, "bbox": 5, "giou": 2}
"""Weights of H-DETR's losses."""


@dataclass(frozen=True)
class Case:
    """One model.

    Args:
        peer: checkout whose code it is.
        name: name in the table.
        config: file below ``configs/coco`` for our model.
        arguments: what the authors' model is made of: for DINO and H-DETR the options that differ, for detrex a config file.
        swin: True: our backbone is detectron2's Swin-T.
    """

    peer: str
    name: str
    config: str
    arguments: Any
    swin: bool = False


@dataclass
class Foreign:
    """A model of the authors' code.

    Args:
        module: the model.
        predict: function from (1, 3, H, W) images to logits (1, Q, K) and boxes (1, Q, 4).
        namespaces: names of its files, of which ``inverse_sigmoid`` and ``torch`` are replaced while it runs.
        criterion: its criterion, where losses are compared too.
        NestedTensor: its batch of images and padding mask.
    """

    module: nn.Module
    predict: Callable[[Tensor], tuple[Tensor, Tensor]]
    namespaces: list[dict[str, Any]]
    criterion: nn.Module | None = None
    NestedTensor: Callable[..., Any] | None = None


def build_dino(folder: Path, case: Case, **more: Any) -> Foreign:
    """A model of IDEA-Research/DINO, from its config, with the noise of its scripts, and options that differ from it."""
    options = runpy.run_path(str(folder / "config/DINO" / case.arguments))
    options = {name: value for name, value in options.items() if not name.startswith("_")}
    options |= {"device": "cpu", "masks": False, "backbone": "swin_T_224_1k" if case.swin else options["backbone"]}
    options |= {"dn_box_noise_scale": 1.0} | more
    detector, misc, namespaces = imported(folder, "models.dino.dino", "util.misc")
    _replace_op(namespaces, "models.dino.ops.modules.ms_deform_attn", folder, "dino")
    module, criterion, _ = detector.build_dino(argparse.Namespace(**options))
    return Foreign(module, lambda images: _official(module, misc.NestedTensor, images), namespaces, criterion, misc.NestedTensor)


def build_hdetr(folder: Path, case: Case) -> Foreign:
    """A model of HDETR/H-Deformable-DETR with all its "tricks", as its script ``*_hybrid_branch_*`` makes it."""
    numbers = {"num_queries_one2one": 300, "num_queries_one2many": 1500, "topk": 100, "use_checkpoint": False}
    foreign = _build_official(folder, case.peer, **numbers)

    def predict(images: Tensor) -> tuple[Tensor, Tensor]:
        foreign.module.num_queries, foreign.module.transformer.two_stage_num_proposals = 300, 300  # as in its evaluation
        return foreign.predict(images)

    return dataclasses.replace(foreign, predict=predict)


def _build_official(folder: Path, peer: str, **more: Any) -> Foreign:
    """A Deformable-DETR++ of a checkout that is made of Deformable-DETR's."""
    words = {"dataset_file": "coco", "device": "cpu", "masks": False, "frozen_weights": None, "aux_loss": True}
    words |= {"backbone": "resnet50", "lr_backbone": 2e-5, "dilation": False, "position_embedding": "sine", "num_feature_levels": 4}
    words |= {"hidden_dim": 256, "dim_feedforward": 2048, "nheads": 8, "dropout": 0.0, "enc_layers": 6, "dec_layers": 6}
    words |= {"enc_n_points": 4, "dec_n_points": 4, "focal_alpha": 0.25}
    words |= {"with_box_refine": True, "two_stage": True, "mixed_selection": True, "look_forward_twice": True}
    words |= {f"{name}_loss_coef": weight for name, weight in LOSSES.items()}
    words |= {"set_cost_class": 2, "set_cost_bbox": 5, "set_cost_giou": 2, **more}
    detector, misc, namespaces = imported(folder, "models.deformable_detr", "util.misc")
    _replace_op(namespaces, "models.ops.modules.ms_deform_attn", folder, peer)
    module, criterion, _ = detector.build(argparse.Namespace(**words))
    return Foreign(module, lambda images: _official(module, misc.NestedTensor, images), namespaces, criterion, misc.NestedTensor)


def _replace_op(namespaces: list[dict[str, Any]], attention: str, folder: Path, peer: str) -> None:
    """The pure-PyTorch core in place of the compiled op where that does not run, and no download of a backbone's weights."""
    op = functools.partial(official_op, official_cuda_op(folder, peer), official_core(folder, peer))
    for space in namespaces:
        if space["__name__"] == attention:
            space["MSDeformAttnFunction"] = argparse.Namespace(apply=op)
        if "is_main_process" in space:
            space["is_main_process"] = lambda: False


def build_detrex(folder: Path, case: Case, **more: Any) -> Foreign:
    """A model of detrex, from its config and options that differ from it."""
    with imports_from([folder]):
        try:
            from detectron2.config import LazyConfig, instantiate

            importlib.import_module("detrex.config").get_config = lambda path: mock.MagicMock()  # of data and optimiser
            config = LazyConfig.load(str(folder / "projects" / case.arguments)).model
            config.update({"device": "cpu", **more})
            module = instantiate(config)
        except Exception as error:
            raise BadInputError(f"peer detrex: {case.name} cannot be built: {error}; it needs detectron2 too") from error
    module.normalizer = nn.Identity()
    found: list[tuple[Tensor, Tensor]] = []
    module.inference = lambda logits, boxes, sizes: found.append((logits, boxes)) or []

    def predict(images: Tensor) -> tuple[Tensor, Tensor]:
        module([{"image": image} for image in images])
        return found.pop()

    names = [name for name in sys.modules if name.startswith(("detrex.", "projects."))]
    return Foreign(module, predict, [vars(sys.modules[name]) for name in names])


BUILDERS = {"dino": build_dino, "hdetr": build_hdetr, "detrex": build_detrex}


def imported(folder: Path, *names: str) -> tuple[Any, ...]:
    """Modules of a checkout of DINO or H-DETR, and the namespaces of all its files that they import."""
    with packages_of(folder), with_extension(folder), imports_from([folder], NOT_CALLED):
        modules = [importlib.import_module(name) for name in names]
        found = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("models", "util")]
        return (*modules, [vars(module) for module in found])


def _official(module: nn.Module, nested: Callable[..., Any], images: Tensor) -> tuple[Tensor, Tensor]:
    found = module(nested(images, torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)))
    return found["pred_logits"], found["pred_boxes"]


# Ours beside it


def names_of(case: Case) -> tuple[str, ...]:
    """Names of the classes of the authors' weights."""
    return (COCO_CLASSES if case.peer == "detrex" else COCO_ROWS).names


def config_of(case: Case, **overrides: str) -> CfgNode:
    """Our config of a model, for the classes of its authors' files."""
    classes = len(COCO_CLASSES if case.peer == "detrex" else COCO_ROWS)
    words = {"MODEL.NUM_CLASSES": str(classes), "MODEL.BACKBONE.MASK_PADDING": "False", "MODEL.BACKBONE.WEIGHTS": "", **overrides}
    return load_cfg(f"coco/{case.config}.yaml", [word for pair in words.items() for word in pair])


@contextlib.contextmanager
def float64_of(foreign: Foreign) -> Iterator[None]:
    """The authors' code with our bound of the numbers of boxes, and with float64 wherever it names float32."""
    inverse = {space["inverse_sigmoid"] for space in foreign.namespaces if "inverse_sigmoid" in space}
    assert len(inverse) == 1
    names = {"torch": DoubleTorch(), "inverse_sigmoid": functools.partial(inverse.pop(), eps=EPSILON)}
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double), replaced_names(foreign.namespaces, names):
        yield


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """Calls that name a GPU stay where they are: DINO's code asks for one where it prepares the noise of its queries."""
    to = torch.Tensor.to

    def stay(tensor: Tensor, *args: Any, **options: Any) -> Tensor:
        return to(tensor, *("cpu" if isinstance(word, str) and word == "cuda" else word for word in args), **options)

    with mock.patch.object(torch.Tensor, "cuda", lambda tensor: tensor), mock.patch.object(torch.Tensor, "to", stay):
        yield
