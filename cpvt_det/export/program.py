# SPDX-License-Identifier: Apache-2.0
"""Turn a model into a program of torch's operators: from pixels and a padding mask to boxes, scores and labels, or class scores.

The program becomes a file: ``torch.export``'s archive, ONNX, or OpenVINO's two files. Each contains metadata that describe its
output.
"""

import contextlib
import copy
import importlib.util
import json
import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram

from cpvt_det.checkpoint.exported import INPUTS, METADATA_KEY, openvino_core
from cpvt_det.common.errors import BadInputError, RunStoppedError, first_line
from cpvt_det.common.structures import unpadded
from cpvt_det.evaluation.answers import ClassScores, PostProcessor
from cpvt_det.layers.attention import DeformableAttention
from cpvt_det.layers.norm import MaskedGroupNorm
from cpvt_det.models import ImageModel
from cpvt_det.models.backbones.timm import TimmBackbone
from cpvt_det.models.backbones.timm_networks import fix_padding
from cpvt_det.models.real_time_detr import ConvNorm, RepVGGBlock
from cpvt_det.position.learned import LearnedEncoding
from cpvt_det.position.peg import PEGDetection

DIMENSIONS = ("batch", "height", "width")
SAMPLINGS = {"gather": "export", "grid_sample": "grid_sample"}  # name -> implementation of ``ms_deform_attn``
FORMATS = ("torch_export", "onnx", "openvino")
ONNX = {"onnx": "export", "onnxscript": "export"}
PACKAGES = {"torch_export": {}, "onnx": {**ONNX, "onnxruntime": "export"}, "openvino": {**ONNX, "openvino": "openvino"}}
"""Format -> the packages that it needs, and the extra that installs each."""
OPSET = 18  # version of ONNX's operators: the first that every version of torch's exporter has
aten = torch.ops.aten


@dataclass(frozen=True)
class Canvas:
    """The shape of a batch: the number of images, and the height and width to which all images are padded."""

    batch: int
    height: int
    width: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.height} x {self.width}"


class ExportModule(nn.Module):
    """A model together with normalisation and post-processing, so that a user of the file needs no constants, such as pixel means.

    Args:
        detector: result of :func:`prepare`.
        postprocess: the post-processor that matches the detector's classification, or :class:`ClassScores` for a classifier.
        half_precision: whether to compute in float16 the operations that autocast computes in float16 in training. Norms, heads,
            boxes and positions stay in float32, and so do the weights in the file.
    """

    def __init__(self, detector: ImageModel, postprocess: PostProcessor | ClassScores, half_precision: bool = False):
        super().__init__()
        self.detector = detector
        self.postprocess = postprocess
        self.half_precision = half_precision

    def forward(self, images: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, ...]:
        """Run model and post-processing.

        Args:
            images: (B, 3, H, W) float32, RGB from 0 to 255, at the top left of a canvas whose sides are multiples of the
                detector's ``size_divisibility``; values under the padding have no effect.
            padding_mask: (B, H, W) bool, True = padded; ``None`` if all images fill the canvas.

        Returns:
            Boxes (B, n, 4) float32, xyxy in [0, 1] of the unpadded image; scores (B, n) float32, best first; labels (B, n) int64.
            For a classifier, the scores of the classes, (B, K) float32.
        """
        normalised = (images - self.detector.pixel_mean) / self.detector.pixel_std
        computing = torch.autocast(images.device.type, torch.float16) if self.half_precision else contextlib.nullcontext()
        with computing, unpadded() if padding_mask is None else contextlib.nullcontext():
            mask = torch.zeros_like(images[:, 0], dtype=torch.bool) if padding_mask is None else padding_mask
            predictions = self.detector(normalised, mask)
        return self.postprocess.decode(predictions)


def prepare(detector: ImageModel, sampling: str = "gather") -> ImageModel:
    """Make a copy of a detector for inference only.

    Batch norms of PEG and of the hybrid encoder are merged into their convolutions, and the two branches of each block of the
    encoder are merged into one convolution. Group norms stay, because they depend on the input. The TensorFlow-style padding of
    some timm networks becomes constant.

    Args:
        detector: the detector to copy; not changed.
        sampling: method by which deformable attention reads its sampling points, a key of ``SAMPLINGS``; no effect on DETR.
    """
    ready = copy.deepcopy(detector).cpu().float().eval().requires_grad_(False)
    ready.to(memory_format=torch.contiguous_format)  # the only format of weights in files
    for module in ready.modules():
        if isinstance(module, DeformableAttention):
            module.implementation = SAMPLINGS[sampling]
        if isinstance(module, TimmBackbone):
            fix_padding(module.body)
        is_peg = isinstance(module, PEGDetection) and not isinstance(module.norm, MaskedGroupNorm)
        if is_peg or isinstance(module, (ConvNorm, RepVGGBlock)):
            module.fold()
    return ready


def trace(module: ExportModule, canvas: Canvas, dynamic: Collection[str] = DIMENSIONS, masked: bool = True) -> ExportedProgram:
    """Trace a detector with ``torch.export``.

    Args:
        module: the module to trace.
        canvas: shape to trace at; the dimensions that are not in ``dynamic`` are fixed to it.
        dynamic: names from ``DIMENSIONS`` that may differ from call to call.
        masked: whether the program has a padding mask as its second input.

    Returns:
        A program of aten operators, with torch's ``scan`` for step-by-step computations.

    Raises:
        RunStoppedError: a model that torch cannot trace.
    """
    stride, largest = module.detector.size_divisibility, largest_sides(module.detector)
    rows, columns = (stride * Dim(name, min=2, max=largest) for name in ("rows", "columns"))
    dims = {"batch": Dim("batch", min=1), "height": rows, "width": columns}
    batch, height, width = (dims[name] if name in dynamic else Dim.STATIC for name in DIMENSIONS)
    shapes = {"images": {0: batch, 2: height, 3: width}, "padding_mask": {0: batch, 1: height, 2: width}}
    images = torch.zeros(canvas.batch, 3, canvas.height, canvas.width)
    inputs = {"images": images, "padding_mask": torch.zeros_like(images[:, 0], dtype=torch.bool)}
    if not masked:
        del inputs["padding_mask"], shapes["padding_mask"]
    try:
        with torch.no_grad():
            program = torch.export.export(module, tuple(inputs.values()), dynamic_shapes=shapes)
            if module.half_precision:  # this traces everything again, including the separate graph under autocast
                program = program.run_decompositions(FLOAT_NORMS)
    except Exception as error:  # what torch raises has no common base
        raise RunStoppedError(
            f"torch.export cannot trace the model: {first_line(error)}; --dynamic none with --size is the easiest to trace"
        ) from error
    return program


def largest_sides(detector: ImageModel) -> int | None:
    """Largest side of a canvas, in units of ``size_divisibility``; ``None`` for no limit. Only a learned table sets a limit."""
    tables = [module.row_embed.num_embeddings for module in detector.modules() if isinstance(module, LearnedEncoding)]
    finest = min(detector.strides)
    return min(tables) * finest // detector.size_divisibility if tables else None


def _layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor, bias: Tensor, eps: float = 1e-5, cudnn: bool = True) -> Tensor:
    return aten.native_layer_norm(x.float(), shape, weight, bias, eps)[0].to(x.dtype)


def _batch_norm(x: Tensor, weight: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *options) -> Tensor:
    _, momentum, eps, _ = options
    return aten._native_batch_norm_legit_no_training(x.float(), weight, bias, mean, variance, momentum, eps)[0].to(x.dtype)


FLOAT_NORMS = {aten.layer_norm.default: _layer_norm, aten.batch_norm.default: _batch_norm}
"""Decompositions for programs in float16: norms in float32, as GPUs compute them under autocast. ONNX requires that all
operands of a norm have one type; torch also accepts a half input with float32 weights."""


def require_packages(format: str, int8: bool = False) -> None:
    """Refuse a format whose packages, or those of its int8, are missing.

    Raises:
        BadInputError: missing packages; the message contains the command to install them.
    """
    needed = {**PACKAGES[format], **({"nncf": "int8"} if int8 and format == "openvino" else {})}
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        extras = ",".join(dict.fromkeys(needed[name] for name in missing))
        raise BadInputError(f"--format {format} needs {', '.join(missing)}: pip install 'cpvt-det[{extras}]'")


def write_program(
    program: ExportedProgram, format: str, path: Path, metadata: dict[str, Any], half_precision: bool, outputs: Sequence[str]
) -> None:
    """Write a program.

    Args:
        program: result of :func:`trace`.
        format: one of ``FORMATS``.
        path: path of the file; OpenVINO's ends in ``.xml``, and its weights become a second file that ends in ``.bin``.
        metadata: values that JSON can represent. ``torch.export.load`` returns them as the extra file ``cpvt_det.json``. In ONNX
            they are the metadata ``cpvt_det``, and in OpenVINO the ``rt_info`` of that name.
        half_precision: whether the program computes in float16 or, for OpenVINO, the weights are in float16. An ONNX file is then
            not optimised here but left to the runtime, because onnxscript 0.7 merges float32 norms into half convolutions, which no
            runtime loads.
        outputs: names of the program's outputs, from its post-processing.

    Raises:
        RunStoppedError: a program that cannot be converted.
    """
    if format == "torch_export":
        with _silenced("torch._export.serde.serialize"):  # it warns that scan takes no values from outside
            torch.export.save(program, path, extra_files={f"{METADATA_KEY}.json": json.dumps(metadata)})
        return
    try:
        with _silenced("onnxscript"):  # it warns of what it cannot simplify
            names = {"input_names": INPUTS[: len(program.graph_signature.user_inputs)], "output_names": outputs}
            optimize = format == "openvino" or not half_precision
            options = {"dynamo": True, "opset_version": OPSET, "verbose": False, "optimize": optimize}
            converted = torch.onnx.export(program, **names, **options)
    except Exception as error:  # what torch raises has no common base
        raise RunStoppedError(f"torch.onnx cannot convert the program: {first_line(error)}") from error
    converted.model.metadata_props[METADATA_KEY] = json.dumps(metadata)
    content = _for_old_runtimes(converted.model_proto).SerializeToString()
    if format == "onnx":
        path.write_bytes(content)
        return
    import openvino

    try:
        model = openvino_core().read_model(content)
    except RuntimeError as error:
        raise RunStoppedError(f"OpenVINO cannot read the program: {first_line(error)}") from error
    model.set_rt_info(json.dumps(metadata), METADATA_KEY)
    openvino.save_model(model, path, compress_to_fp16=half_precision)


def _for_old_runtimes(model: Any) -> Any:
    """Convert an ``onnx.ModelProto`` to the oldest file format that its operators allow, without the additions of later formats.

    These additions are the exporter's notes on every operator, such as the source files and lines that it came from.
    """
    from onnx.helper import find_min_ir_version_for

    model.ir_version = find_min_ir_version_for(model.opset_import)
    graphs = [model.graph]
    for graph in graphs:  # the list grows by the bodies of loops and branches
        for part in (graph, *graph.node, *graph.input, *graph.output, *graph.value_info):
            part.ClearField("metadata_props")
        graphs += [attribute.g for node in graph.node for attribute in node.attribute if attribute.HasField("g")]
    return model


@contextlib.contextmanager
def _silenced(name: str) -> Iterator[None]:
    library = logging.getLogger(name)
    before = library.level
    library.setLevel(logging.ERROR)
    try:
        yield
    finally:
        library.setLevel(before)
