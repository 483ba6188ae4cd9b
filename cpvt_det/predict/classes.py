# SPDX-License-Identifier: Apache-2.0
"""A trained classifier that is called with images, and the classes of one image."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from cpvt_det.builders import build_class_mapper, is_classifier
from cpvt_det.checkpoint.trained import Trained
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import ConfigError
from cpvt_det.evaluation.answers import classify
from cpvt_det.evaluation.tiles import Tiling
from cpvt_det.predict.predictor import ImageInput, Predictor

BEST = 5


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


class ClassPredictor(Predictor):
    """A trained classifier for images of any kind and size. It is called like a :class:`Predictor`, but returns
    :class:`ImageClasses`.
    """

    @classmethod
    def from_trained(cls, trained: Trained) -> "ClassPredictor":
        """Make a predictor from a loaded classifier.

        Raises:
            ConfigError: a detector, or keys that cannot be used.
        """
        if not is_classifier(trained.cfg):
            raise ConfigError(f"MODEL.META_ARCHITECTURE {trained.cfg.MODEL.META_ARCHITECTURE!r} is not a classifier; use Predictor")
        return cls(trained.detector, None, build_class_mapper(trained.cfg), trained.classes, trained.cfg.dump())

    def _predict_batch(
        self, images: Sequence[ImageInput], pixels: list[Tensor], tiling: Tiling | None, batch_size: int
    ) -> list[ImageClasses]:
        """The classes of one batch; each element of ``pixels`` is a (3, H, W) uint8 tensor."""
        if tiling is not None:
            raise ValueError("tiles are for detectors, and this model is a classifier; leave them out")
        found = classify(self.detector, [{"image": self.mapper.prepare(image)} for image in pixels])
        return [ImageClasses(scores, self.classes) for scores in found]
