# SPDX-License-Identifier: Apache-2.0
"""The trained model that answers the page. For an image file, it returns the detections and, for each detection, where the decoder
looked."""

import functools
import threading
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpvt_det.common.errors import BadInputError, DataError
from cpvt_det.common.structures import Detections
from cpvt_det.data.images import read_header, read_image
from cpvt_det.predict.predictor import Predictor
from cpvt_det.visualize.attention import heat_map, look
from cpvt_det.visualize.page import embed_image
from cpvt_det.visualize.recording import ForwardRecord, attention_layers, record_inputs

MOST_PIXELS = 64_000_000
"""Size limit of an image, because a small file may contain more pixels than the memory can hold."""
KEPT = 4
"""Number of files whose passes are stored, so that a click on a box is answered immediately."""

Json = dict[str, Any]


@dataclass
class Pass:
    """The results of one image's pass through the detector, without the image's pixels, which may take 200 MB.

    Attributes:
        size: (height, width) of the image.
        picture: the image scaled down for the page, as a data URI.
        detections: detections, best first.
        queries: index of the decoder query of each detection.
        record: the inputs of the decoder's attention.
        seconds: time in seconds from the image to the detections, without decoding the file.
    """

    size: tuple[int, int]
    picture: str
    detections: Detections
    queries: list[int]
    record: ForwardRecord
    seconds: float


class ServedModel:
    """A predictor that several threads can use, and that stores the results of the last images.

    Args:
        predictor: predictor of a trained model.
        name: name of the model on the page.
    """

    def __init__(self, predictor: Predictor, name: str):
        self.predictor = predictor
        self.name = name
        self._lock = threading.Lock()
        self.passes = functools.lru_cache(KEPT)(lambda content, name: self._run(_read(content, name)))

    def detect(self, content: bytes, name: str) -> Pass:
        """The pass of an image. Its detections equal the result of ``predictor(path)`` bit for bit.

        Args:
            content: bytes of an image file.
            name: name of the file, for messages.

        Raises:
            DataError: a file that cannot be read as an image, or with more than 64 million pixels.
        """
        with self._lock:
            return self.passes(content, name)

    def looks(self, content: bytes, name: str, query: int) -> Json:
        """Where a decoder query looked, layer by layer, in pixels of the image.

        Args:
            content, name: image, as in :meth:`detect`.
            query: index of the query.

        Returns:
            For deformable attention, ``kind`` is "points". The result has the ``strides`` of the levels, and each of ``layers`` has
            the ``reference`` (x, y, or centre and size) and ``points`` (x, y, weight, level), whose weights sum to 1. For dense
            attention, ``kind`` is "heat". Each of ``layers`` has ``rows`` and ``corner``. ``rows`` is the attention to each cell,
            averaged over heads, in multiples of uniform attention. ``corner`` is the lower right corner of the cells.

        Raises:
            BadInputError: a query that the detector does not have.
        """
        record = self.detect(content, name).record
        count = record.inputs["decoder", 0][0].shape[1]
        if not 0 <= query < count:
            raise BadInputError(f"query {query} does not exist; this model has queries 0 to {count - 1}")
        layers = range(len(record.layers["decoder"]))
        if record.is_dense("decoder"):
            heats = [heat_map(record, look(record, "decoder", layer, [query])[0, :, 0].mean(0)) for layer in layers]
            return {"kind": "heat", "layers": [{"rows": heat.round(3).tolist(), "corner": corner} for heat, corner in heats]}
        return {"kind": "points", "strides": record.strides, "layers": [_points(record, layer, query) for layer in layers]}

    @torch.no_grad()
    def _run(self, image: Tensor) -> Pass:
        start = time.perf_counter()
        detector, postprocess = self.predictor.detector, self.predictor.postprocess
        resized, size = self.predictor.mapper.prepare(image), (image.shape[1], image.shape[2])
        layers = attention_layers(detector)["decoder"]
        batch = detector.preprocess([resized])
        with record_inputs({("decoder", n): layer for n, layer in enumerate(layers)}) as inputs:
            predictions = detector(batch.images, batch.padding_mask)
        (detections,) = postprocess(predictions, [size])
        queries = postprocess.rank(predictions)[3]
        record = ForwardRecord(detector, resized, size, tuple(batch.images.shape[2:]), {"decoder": layers}, inputs, [])
        seconds = time.perf_counter() - start
        return Pass(size, embed_image(image), detections.cpu(), queries[0].tolist(), record, seconds)


def _read(content: bytes, name: str) -> Tensor:
    header = read_header(name, content)
    if header.width * header.height > MOST_PIXELS:
        raise DataError(f"{name} has {header.width} x {header.height} pixels; the limit is {MOST_PIXELS // 1_000_000} million")
    return read_image(name, content)


def _points(record: ForwardRecord, layer: int, query: int) -> Json:
    locations, weights, references = look(record, "decoder", layer, [query])
    (height, width), (x, y) = record.canvas, record.scale
    canvas = torch.tensor([width * x, height * y])
    locations, weights = locations[0, 0] * canvas, weights[0, 0] / len(weights[0, 0])
    levels = torch.arange(len(record.strides), dtype=weights.dtype)[:, None].expand(weights.shape)
    points = torch.stack((*locations.unbind(-1), weights, levels), dim=-1).flatten(0, 2)  # (M, L, P, 4) -> (M L P, 4)
    reference = references[0, 0, 0] * canvas.repeat(references.shape[-1] // 2)
    return {"reference": reference.tolist(), "points": points.tolist()}
