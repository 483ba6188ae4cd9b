# SPDX-License-Identifier: Apache-2.0
"""Programs as files: ``torch.export``'s archive, or ONNX in one file. Each also says what the numbers it gives mean."""

import contextlib
import importlib
import json
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.export import ExportedProgram

from cpvt_det.errors import BadInputError, RunStoppedError, first_line

FORMATS = ("torch_export", "onnx")
FACTS = "cpvt_det"  # the key of what is written beside the program, as JSON
INPUTS = ("images", "padding_mask")
OUTPUTS = ("boxes", "scores", "labels")
ONNX_PACKAGES = ("onnx", "onnxscript", "onnxruntime")
Run = Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]


def require_format(format: str) -> None:
    """Refuse a format whose packages are missing.

    Raises:
        BadInputError: with how to install them.
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
    program: ExportedProgram, format: str, file: BinaryIO, facts: dict[str, Any], half_precision: bool = False
) -> None:
    """Write a program.

    Args:
        program: of :func:`cpvt_det.export.trace`.
        format: of ``FORMATS``.
        file: open for writing.
        facts: what JSON takes. ``torch.export.load`` gives it back as the extra file ``cpvt_det.json``; in ONNX it is the metadata
            ``cpvt_det``.
        half_precision: as the program's. ONNX is then left as it is converted, for the runtime to simplify: onnxscript 0.7 merges
            float32 norms into half convolutions, which no runtime loads.

    Raises:
        RunStoppedError: there is no ONNX for it.
    """
    if format == "torch_export":
        torch.export.save(program, file, extra_files={f"{FACTS}.json": json.dumps(facts)})
        return
    try:
        with _silenced("onnxscript"):  # which says what it could not simplify
            names = {"input_names": INPUTS, "output_names": OUTPUTS}
            converted = torch.onnx.export(program, **names, dynamo=True, verbose=False, optimize=not half_precision)
    except Exception as error:  # what torch raises has no common base
        raise RunStoppedError(f"torch.onnx cannot convert the program: {first_line(error)}") from error
    converted.model.metadata_props[FACTS] = json.dumps(facts)
    file.write(converted.model_proto.SerializeToString())


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
    """Open a program that was written, on the CPU, with as many threads as torch.

    Args:
        path: the file.
        format: of ``FORMATS``.

    Returns:
        A function of images and padding mask, as :meth:`cpvt_det.export.Deployed.forward`.

    Raises:
        RunStoppedError: onnxruntime cannot load it.
    """
    if format == "torch_export":
        with Path(path).open("rb") as file:
            return torch.export.load(file).module()
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors: warnings are of what it did to the graph
    try:
        session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # what onnxruntime raises has no common base
        raise RunStoppedError(f"onnxruntime cannot load what was converted: {first_line(error)}") from error

    def run(images: Tensor, padding_mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        answers = session.run(list(OUTPUTS), {"images": images.numpy(), "padding_mask": padding_mask.numpy()})
        return tuple(torch.from_numpy(answer) for answer in answers)

    return run
