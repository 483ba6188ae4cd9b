# SPDX-License-Identifier: Apache-2.0
"""The upright boxes around shapes that annotation tools draw, xywh in pixels."""

import math
from collections.abc import Sequence


def around_corners(x0: float, y0: float, x1: float, y1: float, angle: float) -> list[float]:
    """The box around a rectangle, given by opposite corners and turned by an angle, in radians, about its middle."""
    if not angle:
        return [min(x0, x1), min(y0, y1), abs(x1 - x0), abs(y1 - y0)]
    return around_rotated((x0 + x1) / 2, (y0 + y1) / 2, abs(x1 - x0), abs(y1 - y0), angle)


def around_rotated(cx: float, cy: float, w: float, h: float, angle: float) -> list[float]:
    """The box around a rectangle that is turned by an angle, in radians, about its middle."""
    sine, cosine = abs(math.sin(angle)), abs(math.cos(angle))
    width, height = w * cosine + h * sine, w * sine + h * cosine
    return [cx - width / 2, cy - height / 2, width, height]


def around_ellipse(cx: float, cy: float, rx: float, ry: float, angle: float) -> list[float]:
    """The box around an ellipse, given by its semi-axes and turned by an angle, in radians, about its middle."""
    sine, cosine = math.sin(angle), math.cos(angle)
    half_width, half_height = math.hypot(rx * cosine, ry * sine), math.hypot(rx * sine, ry * cosine)
    return [cx - half_width, cy - half_height, 2 * half_width, 2 * half_height]


def around_points(xs: Sequence[float], ys: Sequence[float]) -> list[float]:
    """The box around points."""
    return [min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)]
