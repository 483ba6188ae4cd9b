# SPDX-License-Identifier: Apache-2.0
"""The models of the suite ``real_time`` as ONNX files in onnxruntime, for images of one size.

Ours are written as by ``cpvt-det export --no-mask --sampling grid_sample --dynamic none``, transformers' by torch's older exporter,
because the newer one refuses them. Both have the same drawn weights and return logits and boxes of the last layer. These are
compared before any timing.
"""

import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.harness import Case, Work
from benchmarks.models import Model
from benchmarks.suites import Options, real_time
from benchmarks.suites.model import PASSES, Shape, make_inputs
from benchmarks.suites.real_time import make_contender, our_model, their_model
from cpvt_det.common.structures import PaddedBatch, Predictions
from cpvt_det.export.program import OPSET, Canvas, ExportModule, prepare, trace, write_program

TITLE = "RT-DETRv2 and D-FINE beside transformers, exported"
PLANS = real_time.PLANS


class LastLayer:
    """In the place of a post-processor: the logits and boxes that transformers' file has."""

    outputs = ("logits", "boxes")

    def decode(self, predictions: Predictions) -> tuple[Tensor, Tensor]:
        return predictions.logits[-1], predictions.boxes[-1]


class Answers(nn.Module):
    """Logits and boxes of a model of transformers."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        output = self.model(images)
        return output.logits, output.pred_boxes.clamp(0, 1)


def cases(options: Options) -> list[Case]:
    """Inference; ``quick`` has the smallest model alone, because tracing takes half a minute."""
    inference = [case for case in real_time.cases(options, make_work) if case.about["pass"] == PASSES[0]]
    return [case for case in inference if options.size != "quick" or case.about["model"] == "D-FINE-N"]


def make_work(model: str, shape: Shape, options: Options) -> Work:
    """Both as files, and ours as it is."""
    batch, targets = make_inputs(shape, options.device)
    theirs = their_model(model, options.device)
    ours = our_model(model, theirs.module, "sine", options.device)
    theirs.module.eval()
    make = partial(make_contender, shape, batch, targets)
    return Work(
        [
            make("transformers, onnxruntime", from_file(theirs, partial(write_theirs, theirs.module, batch)), peer=True),
            make("cpvt_det, onnxruntime", from_file(ours, partial(write_ours, ours.module, batch))),
            make("cpvt_det", ours),
        ]
    )


def from_file(model: Model, write: Callable[[Path], None]) -> Model:
    """The model whose predictions come from the ONNX file that ``write`` makes, with as many threads as torch has."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # waiting threads would take the others' cores
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.onnx"
        write(path)
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    (name,) = [one.name for one in session.get_inputs()]

    def predict(batch: PaddedBatch) -> tuple[Tensor, ...]:
        return tuple(torch.from_numpy(answer) for answer in session.run(None, {name: batch.images.contiguous().numpy()}))

    return Model(model.module, predict, model.learn)


def write_theirs(model: nn.Module, batch: PaddedBatch, path: Path) -> None:
    torch.onnx.export(Answers(model), (batch.images,), path, dynamo=False, opset_version=OPSET)


def write_ours(detector: nn.Module, batch: PaddedBatch, path: Path) -> None:
    ready = prepare(detector, "grid_sample")
    ready.pixel_mean.zero_()  # the batch is normalised
    ready.pixel_std.fill_(1)
    count, _, height, width = batch.images.shape
    program = trace(ExportModule(ready, LastLayer()), Canvas(count, height, width), (), masked=False)
    write_program(program, "onnx", path, {}, False, LastLayer.outputs)
