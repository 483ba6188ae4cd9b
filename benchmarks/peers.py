# SPDX-License-Identifier: Apache-2.0
"""Implementations of other projects, unchanged: from a checkout given by its path, or from an installed library.

The version of a peer, or the commit of its checkout, is written to the results. Nothing is written to a checkout.
"""

import contextlib
import functools
import importlib
import importlib.metadata
import importlib.util
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torchvision

import cpvt_det
from benchmarks.origin import commit_of
from cpvt_det.common.errors import BadInputError, UnknownNameError

CHECKOUTS = {
    "deformable_detr": ("fundamentalvision/Deformable-DETR", "models/ops/functions/ms_deform_attn_func.py"),
    "detr": ("facebookresearch/detr", "models/detr.py"),
    "dino": ("IDEA-Research/DINO", "models/dino/ops/functions/ms_deform_attn_func.py"),
    "hdetr": ("HDETR/H-Deformable-DETR", "models/ops/functions/ms_deform_attn_func.py"),
    "dfine": ("Peterande/D-FINE", "src/zoo/dfine/dfine_criterion.py"),
    "deim": ("ShihuaHuang95/DEIM", "engine/deim/deim_criterion.py"),
    "detrex": ("IDEA-Research/detrex", "detrex/layers/multi_scale_deform_attn.py"),
    "detectron2": ("facebookresearch/detectron2", "detectron2/data/dataset_mapper.py"),
}
"""Name -> public repository, and a file that identifies a checkout of it."""
ROOT = Path(__file__).resolve().parent.parent
IMPORTED = ("transformers", "detectron2")
"""Libraries that take part if they are installed; for detectron2 a checkout is possible too, without its compiled parts."""


def find_peers(given: Iterable[str]) -> dict[str, Path | None]:
    """The peers of a run.

    Args:
        given: words of the command line: ``NAME=PATH`` for a checkout, ``NAME`` for a library.

    Returns:
        Name -> folder of the checkout, or ``None`` for a library; installed libraries are always included.

    Raises:
        UnknownNameError: a name of no peer.
        BadInputError: a path that is not a checkout of that peer, a checkout without a path, a library that is not installed.
    """
    found: dict[str, Path | None] = {name: None for name in IMPORTED if importlib.util.find_spec(name)}
    for text in given:
        name, _, path = text.partition("=")
        if name not in (*CHECKOUTS, *IMPORTED):
            raise UnknownNameError("peer", name, {*CHECKOUTS, *IMPORTED})
        if name in CHECKOUTS and (path or name not in found):
            found[name] = _checkout(name, path)
        elif path:
            raise BadInputError(f"peer {name} is a library and has no path; give --peer {name}")
        elif name not in found:
            raise BadInputError(f"peer {name} is not installed; pip install {name}")
    return found


def _checkout(name: str, path: str) -> Path:
    repository, known_by = CHECKOUTS[name]
    if not path:
        raise BadInputError(f"peer {name} needs the path of a checkout of {repository}: --peer {name}=PATH")
    folder = Path(path).expanduser()
    if not (folder / known_by).is_file():
        raise BadInputError(f"peer {name}: {path} is not a checkout of {repository}: it does not contain {known_by}")
    return folder.resolve()


def peer_versions(peers: dict[str, Path | None]) -> dict[str, str]:
    """Name -> version, ours included: the commit of a checkout (``+changes`` if files differ from it), or a library's version."""
    found = {"cpvt_det": f"{cpvt_det.__version__} {commit_of(Path(cpvt_det.__file__).parent)}"}
    for name, folder in peers.items():
        if folder is None:
            found[name] = importlib.metadata.version(name)
        else:
            found[name] = f"{CHECKOUTS[name][0]} {commit_of(folder)}"
    return found


PACKAGES = ("models", "util", "datasets")
"""Names of the packages in the checkouts."""
HALF = (torch.float16, torch.bfloat16)
EXTENSION = "MultiScaleDeformableAttention"
"""The compiled module of the official Deformable-DETR; the file of its pure-PyTorch core imports it too."""


@functools.cache
def official_op_file(folder: Path, peer: str = "deformable_detr") -> types.ModuleType:
    """``models/ops/functions/ms_deform_attn_func.py`` of a checkout, with the compiled extension if it is built.

    Raises:
        BadInputError: a file that cannot be imported.
    """
    with with_extension(folder):
        return _module(peer, folder)


@functools.cache
def detrex_core(folder: Path) -> Callable[..., Any]:
    """detrex's pure-PyTorch core, from its single file: the rest of detrex can be imported only if it is compiled.

    Raises:
        BadInputError: a file that cannot be imported.
    """
    return _module("detrex", folder).multi_scale_deformable_attn_pytorch


def _module(name: str, folder: Path) -> types.ModuleType:
    """The file that identifies a checkout, imported by itself."""
    path = folder / CHECKOUTS[name][1]
    spec = importlib.util.spec_from_file_location(f"benchmarks_peer_{name}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise BadInputError(f"peer {name}: {path.name} cannot be imported: {error}") from error
    return module


@contextlib.contextmanager
def with_extension(folder: Path) -> Iterator[None]:
    """The installed extension, else the one built inside the checkout, else an empty module of its name."""
    built = sorted({str(path.parent) for path in (folder / "models/ops").rglob(f"{EXTENSION}*.so")})
    before = sys.path[:]
    sys.path += built
    try:
        importlib.import_module(EXTENSION)
    except ImportError:
        sys.modules[EXTENSION] = types.ModuleType(EXTENSION)
    try:
        yield
    finally:
        sys.path[:] = before
        if not hasattr(sys.modules[EXTENSION], "ms_deform_attn_forward"):
            del sys.modules[EXTENSION]


@contextlib.contextmanager
def packages_of(folder: Path) -> Iterator[None]:
    """Import from a checkout in this block. Several checkouts use the names ``models`` and ``util``; they are removed afterwards.

    No bytecode is written to the checkout. Meanwhile torchvision's version is 0.9: the official code reads three characters of it
    (0.2 of 0.29) and would look for functions of that old version.
    """
    ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] in PACKAGES}
    version, written = torchvision.__version__, sys.dont_write_bytecode
    torchvision.__version__, sys.dont_write_bytecode = "0.9.0", True
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        torchvision.__version__, sys.dont_write_bytecode = version, written
        for name in [name for name in sys.modules if name.partition(".")[0] in PACKAGES]:
            del sys.modules[name]
        sys.modules.update(ours)


@functools.cache
def official_detr(folder: Path) -> types.SimpleNamespace:
    """The objects that suites use from a checkout: ``build(args)``, ``NestedTensor``, criterion, matcher and transforms.

    Its backbone downloads no weights.

    Raises:
        BadInputError: files that cannot be imported.
    """
    names = ("models.detr", "models.matcher", "models.backbone", "util.misc", "datasets.coco", "datasets.transforms")
    with packages_of(folder):
        try:
            detector, matcher, backbone, misc, coco, transforms = (importlib.import_module(name) for name in names)
        except Exception as error:
            raise BadInputError(f"peer detr: its modules cannot be imported: {error}") from error
    backbone.is_main_process = lambda: False  # in its backbone alone, where the main process downloads
    return types.SimpleNamespace(
        build=detector.build,
        NestedTensor=misc.NestedTensor,
        SetCriterion=detector.SetCriterion,
        HungarianMatcher=matcher.HungarianMatcher,
        prepare_annotations=coco.ConvertCocoPolysToMask(),
        transforms=transforms,
        batch_of=misc.nested_tensor_from_tensor_list,
    )


@functools.cache
def official_deformable_detr(folder: Path) -> types.SimpleNamespace:
    """``build(args)``, ``NestedTensor``, ``SetCriterion`` and ``HungarianMatcher`` of a checkout.

    For CUDA tensors its op uses the compiled extension if it is built, otherwise its own pure-PyTorch core: the extension's CPU
    functions only raise an error. Its backbone downloads no weights.

    Raises:
        BadInputError: files that cannot be imported.
    """
    with packages_of(folder), with_extension(folder):
        try:
            detector = importlib.import_module("models.deformable_detr")
            backbone = importlib.import_module("models.backbone")
            attention = importlib.import_module("models.ops.modules.ms_deform_attn")
            matcher = importlib.import_module("models.matcher")
            misc = importlib.import_module("util.misc")
        except Exception as error:
            raise BadInputError(f"peer deformable_detr: its models cannot be imported: {error}") from error
    attention.MSDeformAttnFunction = types.SimpleNamespace(
        apply=functools.partial(official_op, official_cuda_op(folder), official_core(folder))
    )
    backbone.is_main_process = lambda: False  # in its backbone alone, where the main process downloads
    return types.SimpleNamespace(
        build=detector.build,
        NestedTensor=misc.NestedTensor,
        SetCriterion=detector.SetCriterion,
        HungarianMatcher=matcher.HungarianMatcher,
    )


def official_op(compiled: Callable[..., Any] | None, core: Callable[..., Any], value: Any, shapes: Any, *rest: Any) -> Any:
    """The compiled op for CUDA tensors, if it is built, else the pure-PyTorch core.

    The compiled op has no half precision: under autocast it takes float32, as ``grid_sample`` of the core does.
    """
    start, locations, weights, step = rest
    if compiled is not None and value.is_cuda:
        value, locations, weights = (x.float() if x.dtype in HALF else x for x in (value, locations, weights))
        return compiled(value, shapes, start, locations, weights, step)
    return core(value, shapes.tolist(), locations, weights)


def official_core(folder: Path, peer: str = "deformable_detr") -> Callable[..., Any]:
    """``ms_deform_attn_core_pytorch(value, level_shapes, locations, weights)``; with level shapes in a list it copies nothing."""
    return official_op_file(folder, peer).ms_deform_attn_core_pytorch


def official_cuda_op(folder: Path, peer: str = "deformable_detr") -> Callable[..., Any] | None:
    """``MSDeformAttnFunction.apply``, or ``None`` if the extension is not built."""
    module = official_op_file(folder, peer)
    return module.MSDeformAttnFunction.apply if hasattr(module.MSDA, "ms_deform_attn_forward") else None


@functools.cache
def detectron2_data(folder: Path | None) -> types.SimpleNamespace:
    """detectron2's mapper and related modules, from a checkout or, for ``None``, from the installed library.

    Raises:
        BadInputError: files that cannot be imported, for example because a dependency of detectron2 is not installed.
    """
    before = sys.path[:]
    sys.path[:0] = [str(folder)] if folder else []
    try:
        data, structures = importlib.import_module("detectron2.data"), importlib.import_module("detectron2.structures")
        transforms = importlib.import_module("detectron2.data.transforms")
    except ImportError as error:
        raise BadInputError(f"peer detectron2: its mapper cannot be imported: {error}") from error
    finally:
        sys.path[:] = before
    return types.SimpleNamespace(
        DatasetMapper=data.DatasetMapper, T=transforms, BoxMode=structures.BoxMode, ImageList=structures.ImageList
    )


def detectron2_coco_eval() -> type | None:
    """``COCOeval_opt`` of an installed detectron2; ``None`` if its compiled part is missing."""
    try:
        return importlib.import_module("detectron2.evaluation.fast_eval_api").COCOeval_opt
    except ImportError:
        return None


@functools.cache
def transformers_module() -> Any:
    """transformers' ``MultiScaleDeformableAttention``: the op alone, without projections."""
    from transformers.models.deformable_detr.modeling_deformable_detr import MultiScaleDeformableAttention

    return MultiScaleDeformableAttention()
