# SPDX-License-Identifier: Apache-2.0
"""Programs as files: ``torch.export``'s archive, or ONNX in one file. Each contains the metadata that explains its output."""

import contextlib
import importlib
import json
import logging
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.export import ExportedProgram

from cpvt_det.errors import BadInputError, RunStoppedError, first_line
from cpvt_det.inference import PostProcessor

FORMATS = ("torch_export", "onnx")
METADATA_KEY = "cpvt_det"  # key of the metadata, JSON, that is written with the program
INPUTS = ("images", "padding_mask")
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
OPSET = 18  # of ONNX's operators: the first that torch's exporter has, whatever its version
OLDEST_RUNTIMES = {False: "1.14", True: "1.31"}  # the first onnxruntime with this opset; and that loads float16 on a CPU
Run = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


def require_format(format: str) -> None:
    """Refuse a format whose packages are missing.

    Raises:
        BadInputError: missing packages; the message contains the command to install them.
    """
    missing = []
    for name in ONNX_PACKAGES if format == "onnx" else ():
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise BadInputError(f"--format onnx needs {', '.join(missing)}: pip install 'cpvt-det[export]'")


def write_program(
    program: ExportedProgram,
    format: str,
    file: BinaryIO,
    metadata: dict[str, Any],
    half_precision: bool = False,
    outputs: Sequence[str] = PostProcessor.outputs,
) -> None:
    """Write a program.

    Args:
        program: result of :func:`cpvt_det.export.trace`.
        format: one of ``FORMATS``.
        file: binary file, open for writing.
        metadata: values that JSON can hold. ``torch.export.load`` returns them as the extra file ``cpvt_det.json``; in ONNX they
            are the metadata ``cpvt_det``.
        half_precision: whether the program computes in float16. The ONNX graph is then not optimised, but left to the runtime:
            onnxscript 0.7 merges float32 norms into half convolutions, which no runtime loads.
        outputs: names of what the program returns, as of its post-processing.

    Raises:
        RunStoppedError: a program that cannot be converted to ONNX.
    """
    if format == "torch_export":
        torch.export.save(program, file, extra_files={f"{METADATA_KEY}.json": json.dumps(metadata)})
        return
    try:
        with _silenced("onnxscript"):  # it warns of what it cannot simplify
            names = {"input_names": INPUTS, "output_names": outputs}
            options = {"dynamo": True, "opset_version": OPSET, "verbose": False, "optimize": not half_precision}
            converted = torch.onnx.export(program, **names, **options)
    except Exception as error:  # what torch raises has no common base
        raise RunStoppedError(f"torch.onnx cannot convert the program: {first_line(error)}") from error
    converted.model.metadata_props[METADATA_KEY] = json.dumps(metadata)
    file.write(_for_old_runtimes(converted.model_proto).SerializeToString())


def _for_old_runtimes(model: Any) -> Any:
    """The ``onnx.ModelProto`` in the oldest version of the file format that its operators need, without what later ones added:
    notes of the exporter beside every operator, such as the files and lines that it came from.
    """
    from onnx.helper import find_min_ir_version_for

    model.ir_version = find_min_ir_version_for(model.opset_import)
    graphs = [model.graph]
    for graph in graphs:  # grows by the bodies of loops and branches
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


def open_program(path: str | Path, format: str) -> Run:
    """Open a written program, on the CPU, with as many threads as torch uses.

    Args:
        path: path of the file.
        format: one of ``FORMATS``.

    Returns:
        A function of images and padding mask, as :meth:`cpvt_det.export.ExportModule.forward`.

    Raises:
        RunStoppedError: onnxruntime cannot load it.
    """
    if format == "torch_export":
        with Path(path).open("rb") as file:
            return torch.export.load(file).module()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only: warnings are about its changes to the graph
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # what onnxruntime raises has no common base
        raise RunStoppedError(f"onnxruntime cannot load the converted program: {first_line(error)}") from error

    def run(images: Tensor, padding_mask: Tensor) -> tuple[Tensor, ...]:
        answers = session.run(None, {"images": images.numpy(), "padding_mask": padding_mask.numpy()})
        return tuple(torch.from_numpy(answer) for answer in answers)

    return run
