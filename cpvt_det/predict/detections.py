# SPDX-License-Identifier: Apache-2.0
"""The results for one image: boxes, scores and class names of its detections, or the scores of its classes."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.structures import Detections
from cpvt_det.data.images import read_image
from cpvt_det.visualize.pictures import draw_objects

if TYPE_CHECKING:
    import supervision


BEST = 5
"""Number of classes of an image that are shown and written by default."""


@dataclass(repr=False)
class ImageDetections(Detections):
    """The detections of one image, best first.

    Attributes:
        boxes_xyxy: (n, 4) float32, in pixels of the original image.
        scores: (n,) float32 in [0, 1].
        labels: (n,) int64 in [0, K).
        classes: ids and names of the labels.
        source: path that the image was read from, or its pixels, (3, H, W) uint8 RGB.
    """

    classes: Classes
    source: str | Tensor

    def __len__(self) -> int:
        return len(self.scores)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name} {score:.2f}" for name, score in zip(self.names[:5], self.scores.tolist(), strict=False))
        return f"<{len(self)} detections{': ' if shown else ''}{shown}{', ...' if len(self) > 5 else ''}>"

    @property
    def class_ids(self) -> Tensor:
        """(n,) int64, the data's category id of each detection."""
        return torch.tensor(self.classes.ids)[self.labels]

    @property
    def names(self) -> list[str]:
        """The class name of each detection."""
        return [self.classes.names[label] for label in self.labels.tolist()]

    @property
    def image(self) -> Tensor:
        """(3, H, W) uint8 RGB, the image. If ``source`` is a path, the file is read again."""
        return self.source if isinstance(self.source, Tensor) else read_image(self.source)

    def above(self, threshold: float) -> "ImageDetections":
        """The detections with a score of at least ``threshold``.

        Raises:
            ValueError: a threshold outside [0, 1].
        """
        if not 0 <= threshold <= 1:
            raise ValueError(f"threshold must be in [0, 1], as scores are, got {threshold}")
        keep = self.scores >= threshold
        return ImageDetections(self.boxes_xyxy[keep], self.scores[keep], self.labels[keep], self.classes, self.source)

    def to_coco(self, image_id: int) -> list[dict[str, Any]]:
        """Entries of COCO's results format, with the data's category ids and xywh boxes, equal to those of an evaluation."""
        start, end = self.boxes_xyxy.double().split(2, dim=1)
        boxes = torch.cat((start, end - start), dim=1)  # xyxy -> xywh
        columns = (self.class_ids.tolist(), boxes.tolist(), self.scores.double().tolist())
        keys = ("image_id", "category_id", "bbox", "score")
        return [dict(zip(keys, (image_id, *row), strict=True)) for row in zip(*columns, strict=True)]

    def to_supervision(self) -> "supervision.Detections":
        """The detections for the package supervision: ``class_id`` is the label, and ``data["class_name"]`` the class name.

        Raises:
            ConfigError: supervision is not installed.
        """
        try:
            from supervision import Detections as SupervisionDetections
        except ImportError as error:
            raise ConfigError("to_supervision needs the package supervision: pip install 'cpvt-det[supervision]'") from error
        arrays = {"xyxy": self.boxes_xyxy.numpy(), "confidence": self.scores.numpy(), "class_id": self.labels.numpy()}
        return SupervisionDetections(**arrays, data={"class_name": np.array(self.names, dtype=str)})

    def draw(self) -> Image.Image:
        """The image with the box, name and score of every detection, in the colour of its class; ``above(0.5).draw()`` draws high
        scores only.

        Images whose short side is below 384 pixels are enlarged by a whole factor, so that the labels fit.
        """
        return draw_objects(self.image, self, self.classes.names)


@dataclass(repr=False)
class ImageClasses:
    """The classes of one image.

    Attributes:
        scores: (K,) float32 in [0, 1], in the order of ``classes``; they sum to 1.
        classes: ids and names of the classes.
    """

    scores: Tensor
    classes: Classes

    def __repr__(self) -> str:
        shown = ", ".join(f"{found['name']} {found['score']:.2f}" for found in self.best())
        return f"<{shown}>"

    @property
    def name(self) -> str:
        """The name of the best class."""
        return self.classes.names[int(self.scores.argmax())]

    def best(self, count: int = BEST) -> list[dict[str, Any]]:
        """``name`` and ``score`` of the best classes, best first."""
        found = self.scores.topk(min(count, len(self.scores)))
        pairs = zip(found.indices.tolist(), found.values.tolist(), strict=True)
        return [{"name": self.classes.names[label], "score": score} for label, score in pairs]
