# SPDX-License-Identifier: Apache-2.0
"""The contract of an evaluator, which takes a model's answers image by image and returns metrics."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any

from cpvt_det.common.structures import Thresholds


class Evaluator(ABC):
    """Collects the answers image by image, then computes metrics.

    Images that are never added count as images without an answer. In a distributed evaluation, every process fills its own
    evaluator, and one evaluator then merges the ``state`` of all others.

    Args:
        image_ids: ids of the images of the test set.
    """

    def __init__(self, image_ids: Collection[int]):
        self._known = frozenset(image_ids)
        self._found: dict[int, Any] = {}

    @abstractmethod
    def add(self, image_id: int, answer: Any) -> None:
        """Add the answer to one image, after :meth:`check_new`."""

    @abstractmethod
    def evaluate(self) -> dict[str, dict[str, float]]:
        """The metrics by group, such as ``{"bbox": {"AP": ...}}``."""

    def thresholds(self) -> Thresholds | None:
        """The score thresholds to store in a checkpoint; ``None`` for answers without a threshold."""
        return None

    def state(self) -> dict[int, Any]:
        """The answers added so far, by image id, in a form that can be sent to another process."""
        return dict(self._found)

    def merge(self, state: Mapping[int, Any]) -> None:
        """Add the ``state`` of another evaluator of the same test set.

        Raises:
            ValueError: an image that is unknown or was already added.
        """
        for image_id in state:
            self.check_new(image_id)
        self._found.update(state)

    def check_new(self, image_id: int) -> None:
        """Refuse an image that is unknown or was already added.

        Raises:
            ValueError: such an image.
        """
        if image_id not in self._known:
            raise ValueError(f"image id {image_id!r} is not among the {len(self._known)} images of the test set")
        if image_id in self._found:
            raise ValueError(f"the answers of image id {image_id!r} were already added; add every image once")
