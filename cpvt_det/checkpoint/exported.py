# SPDX-License-Identifier: Apache-2.0
"""Exported files, ONNX or OpenVINO, in place of a checkpoint. They are called with a batch, like the model they were made from."""

import functools
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fvcore.common.config import CfgNode
from torch import Tensor, nn
from torch.nn import functional as F

from cpvt_det.checkpoint.fetch import EXPORTED
from cpvt_det.checkpoint.weights import Weights, config_of_weights
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import MapSizeError, WeightsError, first_line
from cpvt_det.common.structures import PaddedBatch, Thresholds

INPUTS = ("images", "padding_mask")
"""Names of a program's inputs; a program for images that fill their canvas has only the first."""
METADATA_KEY = "cpvt_det"
"""Key of the JSON metadata that is written with a program."""
PACKAGES = {"onnx": "onnxruntime", "openvino": "openvino"}
Run = Callable[[Tensor, Tensor], tuple[Tensor, ...]]


class Program(NamedTuple):
    """An opened program.

    Attributes:
        run: function of images (B, 3, H, W) float32 and padding mask (B, H, W) bool that returns the program's outputs; a program
            without a mask ignores it.
        facts: metadata of the program; empty for a program of another project.
    """

    run: Run
    facts: dict[str, Any]


class ExportedModel(nn.Module):
    """An exported program that is called like the model it was made from. This module has no weights, and its outputs are already
    decoded.

    Args:
        program: the program; its metadata contains ``stride``, ``fixed``, the dimensions that may not change between calls, and
            ``inputs``, the names of its inputs.
        origin: name of the program's file in messages.
    """

    def __init__(self, program: Program, origin: str):
        super().__init__()
        self.run = program.run
        self.origin = origin
        self.size_divisibility: int = program.facts["stride"]
        self.fixed: dict[str, int] = program.facts["fixed"]
        self.is_masked = "padding_mask" in program.facts["inputs"]

    def preprocess(self, images: Sequence[Tensor]) -> PaddedBatch:
        """Put images (3, h, w) in [0, 255] on one canvas, as floats; the program normalises them. For a program without a padding
        mask, they are stretched to the canvas."""
        images = [image.float() for image in images]
        if not self.is_masked:
            largest = [max(image.shape[axis] for image in images) for axis in (1, 2)]
            whole = [-(-side // self.size_divisibility) * self.size_divisibility for side in largest]
            canvas = [self.fixed.get(name, side) for name, side in zip(("height", "width"), whole, strict=True)]
            images = [F.interpolate(image[None], canvas, mode="bilinear", antialias=True)[0] for image in images]
        return PaddedBatch.from_images(images, self.size_divisibility)

    def forward(self, images: Tensor, padding_mask: Tensor) -> tuple[Tensor, ...]:
        """Run the program. It returns the same outputs as :meth:`cpvt_det.export.program.ExportModule.forward`.

        Args:
            images: (B, 3, H, W) float32 from 0 to 255.
            padding_mask: (B, H, W) bool, True = padded.

        Raises:
            MapSizeError: images that are larger than a program's fixed canvas.
        """
        count, _, *sides = images.shape
        canvas = [self.fixed.get(name, side) for name, side in zip(("height", "width"), sides, strict=True)]
        if sides[0] > canvas[0] or sides[1] > canvas[1]:
            raise MapSizeError(
                f"{self.origin} has a fixed canvas of {canvas[0]}x{canvas[1]}, but these images need {sides[0]}x{sides[1]}; export "
                "it again with a larger --size, or set a smaller image size in INPUT"
            )
        batch = self.fixed.get("batch", count)
        whole = -(-count // batch) * batch  # the last batch is filled with padding
        pixels, mask = images.new_zeros(whole, 3, *canvas), padding_mask.new_ones(whole, *canvas)
        pixels[:count, :, : sides[0], : sides[1]], mask[:count, : sides[0], : sides[1]] = images, padding_mask
        parts = [self.run(*part) for part in zip(pixels.split(batch), mask.split(batch), strict=True)]
        return tuple(torch.cat(column)[:count] for column in zip(*parts, strict=True))


def is_exported(word: str | os.PathLike[str]) -> bool:
    """Whether a path is that of an exported program, judged by its suffix."""
    return Path(word).suffix in EXPORTED


def open_program(path: str | os.PathLike[str], format: str) -> Program:
    """Open a program on the CPU, with as many threads as torch uses, in float32 unless the file says otherwise.

    Args:
        path: path of the file.
        format: ``onnx`` or ``openvino``.

    Raises:
        WeightsError: a file that cannot be read, or whose runtime is not installed.
    """
    path = Path(path).expanduser()
    for file in (path, *([path.with_suffix(".bin")] if format == "openvino" else [])):
        if not file.is_file():
            raise WeightsError(f"there is no file {file}" + ("" if file == path else f", which belongs to {path}"))
    try:
        return (_open_onnx if format == "onnx" else _open_openvino)(str(path))
    except ImportError as error:
        extra = "export" if format == "onnx" else "openvino"
        raise WeightsError(f"{path} needs {PACKAGES[format]}: pip install 'cpvt-det[{extra}]'") from error
    except Exception as error:  # what runtimes raise has no common base
        raise WeightsError(f"{PACKAGES[format]} cannot load {path}: {first_line(error)}") from error


def _open_onnx(path: str) -> Program:
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3  # errors only, because warnings are about the runtime's changes to the graph
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    names = [one.name for one in session.get_inputs()]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        answers = session.run(None, {name: one.numpy() for name, one in zip(names, inputs, strict=False)})
        return tuple(torch.from_numpy(answer) for answer in answers)

    return Program(run, json.loads(session.get_modelmeta().custom_metadata_map.get(METADATA_KEY, "{}")))


@functools.cache
def openvino_core() -> Any:
    """The ``openvino.Core`` of this process.

    There is only one, because each core with a compiled model sets an alternate stack for signal handlers and unmaps this stack
    when the core is destroyed. With OpenVINO 2026.4, a process that uses two cores one after the other is left with an unmapped
    stack, so that Ctrl-C or the end of a data worker causes a segmentation fault.
    """
    import openvino

    return openvino.Core()


def _open_openvino(path: str) -> Program:
    core = openvino_core()
    model = core.read_model(path)
    facts = json.loads(model.get_rt_info(METADATA_KEY).astype(str)) if model.has_rt_info(METADATA_KEY) else {}
    options = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": torch.get_num_threads(), "PERFORMANCE_HINT": "LATENCY"}
    compiled = core.compile_model(model, "CPU", options)  # the default is bfloat16 on some processors

    names = [one.any_name for one in compiled.inputs]

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        answers = compiled({name: one.numpy() for name, one in zip(names, inputs, strict=False)})
        return tuple(torch.from_numpy(answers[output].copy()) for output in compiled.outputs)

    return Program(run, facts)


def read_program(path: str | os.PathLike[str]) -> tuple[CfgNode, Weights, ExportedModel]:
    """The config, the other metadata, and the model of a program.

    Raises:
        WeightsError: a file that cannot be read, or that ``cpvt-det export`` of this version did not write.
    """
    program, origin = open_program(path, EXPORTED[Path(path).suffix]), str(path)
    try:
        facts = program.facts
        classes = Classes(tuple(facts["class_ids"]), tuple(facts["class_names"]))
        kept = {"overall": facts.get("threshold"), "classes": facts.get("class_thresholds")}
        thresholds = Thresholds.from_state_dict(kept, len(classes)) if "threshold" in facts else None
        weights = Weights({}, classes, None, origin, facts["config"], thresholds)
        model = ExportedModel(program, origin)
    except (KeyError, TypeError, ValueError) as error:
        raise WeightsError(
            f"{origin} was not written by cpvt-det export: it lacks the config of its model; export it again"
        ) from error
    return config_of_weights(weights), weights, model
