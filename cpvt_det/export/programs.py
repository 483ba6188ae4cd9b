# SPDX-License-Identifier: Apache-2.0
"""Programs as files: ``torch.export``'s archive, ONNX, or OpenVINO's two files. Each contains metadata that describe its output."""

import contextlib
import importlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.export import ExportedProgram

from cpvt_det.checkpoint.exported import METADATA_KEY, openvino_core
from cpvt_det.common.errors import BadInputError, RunStoppedError, first_line
from cpvt_det.evaluation.answers import PostProcessor

FORMATS = ("torch_export", "onnx", "openvino")
INPUTS = ("images", "padding_mask")
PACKAGES = {"torch_export": (), "onnx": ("onnx", "onnxscript", "onnxruntime"), "openvino": ("onnx", "onnxscript", "openvino")}
OPSET = 18  # version of ONNX's operators: the first that every version of torch's exporter has
OLDEST_RUNTIMES = {False: "1.14", True: "1.31"}  # first onnxruntime with this opset, and first with float16 on a CPU


def require_format(format: str) -> None:
    """Refuse a format whose packages are missing.

    Raises:
        BadInputError: missing packages; the message contains the command to install them.
    """
    missing = []
    for name in PACKAGES[format]:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        extras = "export,openvino" if "openvino" in missing else "export"
        raise BadInputError(f"--format {format} needs {', '.join(missing)}: pip install 'cpvt-det[{extras}]'")


def write_program(
    program: ExportedProgram,
    format: str,
    path: Path,
    metadata: dict[str, Any],
    half_precision: bool = False,
    outputs: Sequence[str] = PostProcessor.outputs,
) -> None:
    """Write a program.

    Args:
        program: result of :func:`cpvt_det.export.trace`.
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
            names = {"input_names": INPUTS, "output_names": outputs}
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
