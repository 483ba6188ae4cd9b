# SPDX-License-Identifier: Apache-2.0
"""Convert convolutions and linear layers of a float32 file to int8, by onnxruntime's quantization or NNCF.

Attention, norms, sampling, boxes and scores stay in float32. Depthwise convolutions such as PEG's stay in float32 too, because they
need few multiplications and their channels have different ranges. ``docs/export.md`` states the AP of int8 files made this way.
"""

import contextlib
import io
import logging
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cpvt_det.checkpoint.exported import ExportedModel, Program, openvino_core
from cpvt_det.common.errors import BadInputError, RunStoppedError, first_line

Feed = dict[str, Any]
"""Name of an input -> its array."""


def quantize(path: Path, format: str, images: Iterable[Tensor], facts: Mapping[str, Any]) -> None:
    """Replace an exported file with one that computes in int8.

    Args:
        path: path of the file.
        format: ``onnx`` or ``openvino``.
        images: (3, h, w) each, in [0, 255], prepared as in evaluation; the ranges of activations are measured on them.
        facts: metadata of the file.

    Raises:
        RunStoppedError: a program that the library cannot convert.
    """
    feeds = _feeds(images, facts)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # progress bars and advice of the libraries
                (_quantize_onnx if format == "onnx" else _quantize_openvino)(path, Path(folder) / path.name, feeds)
        except (BadInputError, RunStoppedError):  # from the images
            raise
        except Exception as error:  # what these libraries raise has no common base
            library = "onnxruntime" if format == "onnx" else "nncf"
            raise RunStoppedError(f"{library} cannot convert the program to int8: {first_line(error)}") from error
        for file in Path(folder).iterdir():
            os.replace(file, path.with_name(file.name))


def _feeds(images: Iterable[Tensor], facts: Mapping[str, Any]) -> Iterator[Feed]:
    """The program's inputs for each image, on canvases that the program accepts."""
    called: list[Feed] = []

    def keep(images: Tensor, padding_mask: Tensor) -> tuple[Tensor]:
        arrays = {"images": images.numpy(), "padding_mask": padding_mask.numpy()}
        called.append({name: arrays[name] for name in facts["inputs"]})
        return (torch.zeros(len(images)),)

    model = ExportedModel(Program(keep, dict(facts)), "the program")
    for image in images:
        batch = model.preprocess([image])
        model(batch.images, batch.padding_mask)
        yield called.pop()


def _quantize_onnx(path: Path, target: Path, feeds: Iterator[Feed]) -> None:
    import onnx
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static, shape_inference

    class Reader(CalibrationDataReader):
        def get_next(self) -> Feed | None:
            return next(feeds, None)

    shape_inference.quant_pre_process(path, path, skip_optimization=True, skip_symbolic_shape=True)
    linear_alone = {"MatMulConstBOnly": True}  # also finds weights behind a transposition
    options = {"quant_format": QuantFormat.QDQ, "per_channel": True, "extra_options": linear_alone}
    types = {"activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8, "reduce_range": True}  # AVX2 adds in 16 bits
    chosen = {"op_types_to_quantize": ["Conv", "MatMul", "Gemm"], "nodes_to_exclude": _kept(onnx.load(path).graph)}
    quantize_static(path, target, Reader(), **chosen, **options, **types)


def _kept(graph: Any) -> list[str]:
    """Names of operators that stay in float32: depthwise convolutions, and products with a constant that is not a matrix. Attention
    keys that are computed from constant queries are such a constant."""
    shapes = {weight.name: weight.dims for weight in graph.initializer}
    names = []
    for node in graph.node:
        if node.op_type == "MatMul" and len(shapes.get(node.input[1], (0, 0))) != 2:
            names.append(node.name)
        elif node.op_type == "Conv" and shapes.get(node.input[1], (0, 0))[1] == 1:
            names += [node.name for part in node.attribute if part.name == "group" and part.i > 1]
    return names


def _quantize_openvino(path: Path, target: Path, feeds: Iterator[Feed]) -> None:
    import nncf
    import openvino

    nncf.set_log_level(logging.ERROR)
    model = openvino_core().read_model(path)
    others = {operator.get_type_name() for operator in model.get_ops()} - {"Convolution", "MatMul"}
    products = [operator for operator in model.get_ops() if operator.get_type_name() == "MatMul"]
    of_activations = [product.get_friendly_name() for product in products if not any(map(_is_weight, product.input_values()))]
    kept = list(feeds)
    ignored = nncf.IgnoredScope(types=sorted(others), names=of_activations, validate=False)
    quantized = nncf.quantize(model, nncf.Dataset(kept), subset_size=len(kept), ignored_scope=ignored)
    openvino.save_model(quantized, target, compress_to_fp16=False)


def _is_weight(value: Any) -> bool:
    """Whether a value is a constant matrix. The vector by which D-FINE multiplies its distributions is not."""
    return value.get_node().get_type_name() == "Constant" and len(value.get_shape()) == 2
