#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Weights of DINO, DAB-Deformable-DETR and H-DETR in our models: names, shapes and outputs.

The authors' code builds each of its models and saves it with random weights. Our config of that model loads the file by itself, as
``cpvt-det eval FILE --config-file CONFIG`` does; what was not loaded is an error. Then both get the same images, one by one, since
the authors' codes pad in their own ways.

``python benchmarks/foreign_weights.py --peer dino=PATH --peer hdetr=PATH --peer detrex=PATH``, with the paths of checkouts of
IDEA-Research/DINO, HDETR/H-Deformable-DETR and IDEA-Research/detrex; detrex needs an installed detectron2, and so does Swin. About
two minutes on one core.
"""

import argparse
import contextlib
import functools
import importlib
import json
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import click
import torch
from tabulate import tabulate
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.clocks import fixed_threads
from benchmarks.detrex_model import imports_from, replaced_names
from benchmarks.equal import difference
from benchmarks.machine import machine, versions
from benchmarks.models import DRAWN_WIDE
from benchmarks.parity_outcomes import DoubleTorch
from benchmarks.peers import find_peers, official_core, packages_of, peer_versions, with_extension
from cpvt_det.builders import detector_arguments
from cpvt_det.checkpoint import load_weights
from cpvt_det.config import load_cfg
from cpvt_det.data.coco_classes import COCO_CLASSES, COCO_ROWS
from cpvt_det.errors import BadInputError

SIZE = (192, 256)
"""Of the images: no padding in any code, and more tokens than queries."""
LIMIT = 1e-9
"""Largest relative difference of outputs in float64, of which some hundred operations lose digits."""
NOT_CALLED = ("panopticapi", "pycocotools", "termcolor", "addict", "mmcv", "mmdet", "mmcv_custom")
"""Packages that DINO's and H-DETR's files import, and that these models do not call."""
EPSILON = 1e-5
"""Of the numbers of boxes, from 0 and 1, as in our code; 1e-3 in DINO's and detrex's."""


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


CASES = [
    Case("dino", "DINO, 4 scales", "dino_r50_4scale_official_12ep", "DINO_4scale.py"),
    Case("dino", "DINO, 5 scales", "dino_r50_5scale_official_12ep", "DINO_5scale.py"),
    Case("dino", "DINO, 4 scales, Swin-T", "dino_r50_4scale_official_12ep", "DINO_4scale.py", swin=True),
    Case("hdetr", "H-DETR", "h_deformable_detr_r50_official_12ep", None),
    Case("detrex", "DINO, 4 scales", "dino_r50_4scale_sine_offset_12ep", "dino/configs/dino-resnet/dino_r50_4scale_12ep.py"),
    Case("detrex", "DINO, 5 scales", "dino_r50_5scale_sine_offset_12ep", "dino/configs/dino-resnet/dino_r50_5scale_12ep.py"),
    Case(
        "detrex",
        "DINO, 4 scales, Swin-T",
        "dino_r50_4scale_sine_offset_12ep",
        "dino/configs/dino-swin/dino_swin_tiny_224_4scale_12ep.py",
        swin=True,
    ),
    Case(
        "detrex",
        "DAB-Deformable-DETR",
        "dab_deformable_detr_r50_sine_offset_50ep",
        "dab_deformable_detr/configs/dab_deformable_detr_r50_50ep.py",
    ),
    Case(
        "detrex",
        "DAB-Deformable-DETR, two stages",
        "dab_deformable_detr_r50_sine_offset_two_stage_50ep",
        "dab_deformable_detr/configs/dab_deformable_detr_r50_two_stage_50ep.py",
    ),
]


# The authors' models


@dataclass
class Foreign:
    """A model of the authors' code.

    Args:
        module: the model.
        predict: function from (1, 3, H, W) images to logits (1, Q, K) and boxes (1, Q, 4).
        namespaces: names of its files, of which ``inverse_sigmoid`` and ``torch`` are replaced while it runs.
    """

    module: nn.Module
    predict: Callable[[Tensor], tuple[Tensor, Tensor]]
    namespaces: list[dict[str, Any]]


def build_dino(folder: Path, case: Case) -> Foreign:
    """A model of IDEA-Research/DINO, from its config."""
    options = runpy.run_path(str(folder / "config/DINO" / case.arguments))
    options = {name: value for name, value in options.items() if not name.startswith("_")}
    options |= {"device": "cpu", "masks": False, "backbone": "swin_T_224_1k" if case.swin else options["backbone"]}
    detector, misc, namespaces = _imported(folder, "models.dino.dino", "util.misc")
    attention = next(space for space in namespaces if space["__name__"] == "models.dino.ops.modules.ms_deform_attn")
    attention["MSDeformAttnFunction"] = argparse.Namespace(apply=functools.partial(_apply_core, official_core(folder, "dino")))
    for space in namespaces:
        space.update({"is_main_process": lambda: False} if "is_main_process" in space else {})  # it would download weights
    module = detector.build_dino(argparse.Namespace(**options))[0]
    return Foreign(module, lambda images: _official(module, misc.NestedTensor, images), namespaces)


def build_hdetr(folder: Path, case: Case) -> Foreign:
    """A model of HDETR/H-Deformable-DETR with all its "tricks", as its script ``*_hybrid_branch_*`` makes it."""
    words = {"dataset_file": "coco", "device": "cpu", "masks": False, "frozen_weights": None, "aux_loss": True}
    words |= {"backbone": "resnet50", "lr_backbone": 2e-5, "dilation": False, "position_embedding": "sine", "num_feature_levels": 4}
    words |= {"hidden_dim": 256, "dim_feedforward": 2048, "nheads": 8, "dropout": 0.0, "enc_layers": 6, "dec_layers": 6}
    words |= {"enc_n_points": 4, "dec_n_points": 4, "num_queries_one2one": 300, "num_queries_one2many": 1500, "topk": 100}
    words |= {"with_box_refine": True, "two_stage": True, "mixed_selection": True, "look_forward_twice": True}
    words |= {"set_cost_class": 2, "set_cost_bbox": 5, "set_cost_giou": 2, "cls_loss_coef": 2, "bbox_loss_coef": 5}
    words |= {"giou_loss_coef": 2, "focal_alpha": 0.25, "use_checkpoint": False}
    detector, misc, namespaces = _imported(folder, "models.deformable_detr", "util.misc")
    attention = next(space for space in namespaces if space["__name__"] == "models.ops.modules.ms_deform_attn")
    attention["MSDeformAttnFunction"] = argparse.Namespace(apply=functools.partial(_apply_core, official_core(folder, "hdetr")))
    for space in namespaces:
        space.update({"is_main_process": lambda: False} if "is_main_process" in space else {})
    module = detector.build(argparse.Namespace(**words))[0]

    def predict(images: Tensor) -> tuple[Tensor, Tensor]:
        module.num_queries, module.transformer.two_stage_num_proposals = 300, 300  # as in its evaluation
        return _official(module, misc.NestedTensor, images)

    return Foreign(module, predict, namespaces)


def build_detrex(folder: Path, case: Case) -> Foreign:
    """A model of detrex, from its config."""
    with imports_from([folder]):
        try:
            from detectron2.config import LazyConfig, instantiate

            importlib.import_module("detrex.config").get_config = lambda path: mock.MagicMock()  # of data and optimiser
            config = LazyConfig.load(str(folder / "projects" / case.arguments)).model
            config.device = "cpu"
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


def _imported(folder: Path, *names: str) -> tuple[Any, ...]:
    """Modules of a checkout, and the namespaces of all its files that they import."""
    with packages_of(folder), with_extension(folder), imports_from([folder], NOT_CALLED):
        modules = [importlib.import_module(name) for name in names]
        found = [module for name, module in sys.modules.items() if name.partition(".")[0] in ("models", "util")]
        return (*modules, [vars(module) for module in found])


def _apply_core(core: Callable[..., Tensor], value: Tensor, shapes: Tensor, start: Tensor, *rest: Any) -> Tensor:
    """The pure-PyTorch core in place of the compiled op."""
    locations, weights, _ = rest
    return core(value, shapes.tolist(), locations, weights)


def _official(module: nn.Module, nested: Callable[..., Any], images: Tensor) -> tuple[Tensor, Tensor]:
    found = module(nested(images, torch.zeros(len(images), *images.shape[2:], dtype=torch.bool)))
    return found["pred_logits"], found["pred_boxes"]


# Ours


def build_ours(case: Case, **overrides: str) -> nn.Module:
    """Our detector by the config alone, in evaluation mode; over detectron2's Swin-T where the case has it."""
    classes = len(COCO_CLASSES if case.peer == "detrex" else COCO_ROWS)
    words = {"MODEL.NUM_CLASSES": str(classes), "MODEL.BACKBONE.MASK_PADDING": "False", "MODEL.BACKBONE.WEIGHTS": "", **overrides}
    cfg = load_cfg(f"coco/{case.config}.yaml", [word for pair in words.items() for word in pair])
    backbone = None
    if case.swin:
        from detectron2.modeling.backbone.swin import SwinTransformer

        from cpvt_det.d2.backbone import Detectron2Backbone

        backbone = Detectron2Backbone(SwinTransformer(out_indices=(1, 2, 3)), stages=(3, 4, 5))
    detector, arguments = detector_arguments(cfg, backbone)
    return detector(**arguments).eval()


def _names(case: Case) -> tuple[str, ...]:
    return (COCO_CLASSES if case.peer == "detrex" else COCO_ROWS).names


# The comparison


@torch.no_grad()
def draw(module: nn.Module) -> None:
    """Weights with which queries differ: heads and attention are drawn wide, biases and norms are not constants."""
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point() and tensor.ndim == 1 and name.endswith(("weight", "running_var")):
            tensor.uniform_(0.5, 1.0)
        elif tensor.is_floating_point() and tensor.ndim == 1 and "sampling_offsets" not in name:
            tensor.uniform_(-0.2, 0.2)
        elif DRAWN_WIDE.search(name) or name.endswith(("refpoint_embed.weight", "enc_out_class_embed.weight")):
            tensor.normal_(0, tensor.shape[-1] ** -0.5)


@contextlib.contextmanager
def float64_of(foreign: Foreign) -> Iterator[None]:
    """The authors' code with our bound of the numbers of boxes, and with float64 wherever it names float32."""
    inverse = {space["inverse_sigmoid"] for space in foreign.namespaces if "inverse_sigmoid" in space}
    assert len(inverse) == 1
    names = {"torch": DoubleTorch(), "inverse_sigmoid": functools.partial(inverse.pop(), eps=EPSILON)}
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double), replaced_names(foreign.namespaces, names):
        yield


def compare(case: Case, folder: Path) -> dict[str, Any]:
    """Save the authors' model, load the file into ours, and compare.

    Returns:
        Counts of tensors and differences, by column.

    Raises:
        ClickException: a tensor that was not loaded, or outputs that differ.
    """
    with torch.random.fork_rng(), warnings.catch_warnings(), tempfile.TemporaryDirectory() as place:
        warnings.simplefilter("ignore")
        torch.manual_seed(0)
        foreign = BUILDERS[case.peer](folder, case)
        draw(foreign.module)
        file = Path(place) / "theirs.pth"
        torch.save({"model": foreign.module.state_dict()}, file)
        ours, with_peg = build_ours(case), build_ours(case, **_zero_peg(case))
        report = load_weights(ours, file, _names(case))
        beside = load_weights(with_peg, file, _names(case))
    if report.is_partial or beside.unexpected or any("pegs" not in name for name in beside.missing):
        raise click.ClickException(f"{case.peer}, {case.name}: {report}\n{report.table()}\n{beside}")
    images = torch.randn(2, 3, *SIZE, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    foreign.module.double().eval()
    logits, boxes, equal = [], [], True
    with torch.no_grad():
        for image in images[:, None]:
            mask = torch.zeros(1, *SIZE, dtype=torch.bool)
            found = ours.double()(image, mask)
            with float64_of(foreign):
                wanted = foreign.predict(image)
            logits.append(difference(found.logits[-1], wanted[0]))
            boxes.append(difference(found.boxes[-1], wanted[1]))
            single = (part.float() for part in (ours, with_peg))
            first, second = (model(image.float(), mask) for model in single)
            equal &= torch.equal(first.logits, second.logits) and torch.equal(first.boxes, second.boxes)
    row = {"code": case.peer, "model": case.name, "config": f"coco/{case.config}.yaml", "tensors": len(foreign.module.state_dict())}
    row |= {"loaded": len(report.loaded), "not loaded": len(report.missing) + len(report.unexpected) + len(report.remade)}
    row |= {"logits": max(logits), "boxes": max(boxes), "spread of boxes": float(wanted[1].std(1).mean())}
    row |= {"bit-equal with a zero PEG": equal}
    if not max(*logits, *boxes) < LIMIT or not equal:
        raise click.ClickException(f"outputs differ: {row}")
    return row


def _zero_peg(case: Case) -> dict[str, str]:
    encoding = "sine+peg" if case.peer == "dino" else "sine_offset+peg"
    return {"MODEL.POSITION.NAME": encoding, "MODEL.POSITION.ZERO_INIT": "True"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--peer", "given", multiple=True, metavar="NAME=PATH", help="Checkout: dino, hdetr, detrex.")
@click.option("--model", "pattern", default="", help="Only models whose name contains this.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("output/benchmarks/foreign_weights"), show_default=True)
def main(given: tuple[str, ...], pattern: str, output: Path) -> None:
    """Load weights that the authors' codes save, compare the outputs, and write OUTPUT.json."""
    peers = find_peers(given)
    rows = []
    with fixed_threads(1):
        for case in CASES:
            left_out = case.peer not in peers or ((case.swin or case.peer == "detrex") and "detectron2" not in peers)
            if not left_out and pattern in case.name:
                click.echo(f"{case.peer}: {case.name}", err=True)
                rows.append(compare(case, peers[case.peer]))
    words = ["python benchmarks/foreign_weights.py", *(f"--peer {name}=PATH" for name, folder in peers.items() if folder)]
    output.parent.mkdir(parents=True, exist_ok=True)
    record = {"command": " ".join(words), "machine": machine("cpu"), "versions": versions() | peer_versions(peers), "rows": rows}
    output.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    click.echo(tabulate(rows, headers="keys", floatfmt=".1e", tablefmt="github"))


if __name__ == "__main__":
    main(prog_name="benchmarks/foreign_weights.py")
