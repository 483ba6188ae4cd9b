# SPDX-License-Identifier: Apache-2.0
"""The score thresholds of a trained model: from which score on its detections are used."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

DEFAULT_THRESHOLD = 0.5
"""The threshold of weights that keep none."""


@dataclass(frozen=True)
class Thresholds:
    """The thresholds of the highest F1 on the first test set, at IoU 0.5; detections with this score or a higher one count.

    Attributes:
        overall: threshold of all classes together; ``None`` if no detection is right.
        classes: threshold of each of the K classes; ``None`` for a class of which no detection is right.
    """

    overall: float | None
    classes: tuple[float | None, ...]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, for checkpoints and JSON."""
        return {"overall": self.overall, "classes": list(self.classes)}

    @classmethod
    def from_state_dict(cls, state: Any, num_classes: int) -> "Thresholds":
        """The thresholds of :meth:`state_dict`.

        Raises:
            ValueError: something else, scores that are not in [0, 1], or another number of classes.
        """
        classes = state.get("classes") if isinstance(state, Mapping) else None
        fits = isinstance(classes, list) and len(classes) == num_classes
        if not fits or not all(map(_is_score, [state.get("overall"), *classes])):
            expected = f'{{"overall": score, "classes": [{num_classes} scores]}}, scores from 0 to 1 or null'
            raise ValueError(f"thresholds must be {expected}, got {state!r}")
        return cls(state["overall"], tuple(classes))

    def describe(self, names: tuple[str, ...], most: int = 10) -> str:
        """One line: the overall threshold, and those of the first classes."""
        if self.overall is None:
            return "none, as no detection is right"
        shown = [f"{name} {_text(value)}" for name, value in zip(names[:most], self.classes, strict=False)]
        return f"{_text(self.overall)} ({', '.join(shown)}{', ...' if len(names) > most else ''})"


def _is_score(value: Any) -> bool:
    return value is None or (isinstance(value, float) and math.isfinite(value) and 0 <= value <= 1)


def _text(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
