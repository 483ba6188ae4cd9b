# SPDX-License-Identifier: Apache-2.0
"""Plan one image of the shapes data set as a scene, then paint it.

The classes ``hourglass`` and ``bowtie`` are the same glyph, turned by 90 degrees: they differ only in orientation. Apart from
random jitter, all shapes are mirror-symmetric, so a flipped image keeps its labels.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from PIL import Image, ImageDraw

from cpvt_det.common.errors import ConfigError

CUT_SHARE = 0.4  # share of objects that may extend beyond the border
OVERHANG = 0.4  # largest part of a side that may be beyond the border
MAX_TURN = math.radians(12)
MAX_LOG_ASPECT = 0.2  # a square remains recognisable: sides differ by 1.22 to 1 at most
MIN_CONTRAST = 100.0  # colour distance between an object and its surroundings, of 255 per channel
TRIES = 20  # limits the search: a crowded image gets fewer objects than requested
SUPERSAMPLING = 8  # Pillow also fills the pixels on a polygon's edge: with 8, that is an eighth of a pixel


def _ring_of(radii: Sequence[float], count: int) -> np.ndarray:
    """(count, 2) points around the origin, the first one at the top; the radii repeat in order."""
    angles = 2 * np.pi * np.arange(count) / count
    return np.resize(radii, count)[:, None] * np.stack([np.sin(angles), -np.cos(angles)], axis=1)


_HOURGLASS = np.array([(-1, -1), (1, -1), (0.2, 0), (1, 1), (-1, 1), (-0.2, 0)], dtype=float)
_ARM = np.array([(-1, -3), (1, -3), (1, -1)], dtype=float)
# Outline, then holes, in any unit: placing stretches the outline to the box. y points down. Every outline is star-shaped around
# the middle of its box, so the part inside the border is one piece.
GLYPHS: dict[str, list[np.ndarray]] = {
    "circle": [_ring_of([1], 64)],
    "square": [np.array([(-1, -1), (1, -1), (1, 1), (-1, 1)], dtype=float)],
    "triangle": [_ring_of([1], 3)],
    "star": [_ring_of([1, 0.42], 10)],
    "cross": [np.concatenate([_ARM, _ARM[:, ::-1] * (-1, 1), -_ARM, _ARM[:, ::-1] * (1, -1)])],
    "ring": [_ring_of([1], 64), _ring_of([0.55], 64)],
    "hourglass": [_HOURGLASS],
    "bowtie": [_HOURGLASS[:, ::-1]],
}
CLASS_NAMES = tuple(GLYPHS)


@dataclass(frozen=True)
class ShapesSpec:
    """The properties of the images.

    Attributes:
        image_sides: (smallest, largest) width and height in pixels, drawn independently.
        object_sides: (smallest, largest) width and height of a box in pixels.
        max_objects: largest number of objects per image; the smallest is 0.
        max_overlap: largest fraction of a box that all other boxes together may cover.
        min_visible: smallest share of an object's area that must be inside the image. With 0.5, an hourglass could look like a
            triangle.
        scale: factor for both pixel ranges; the same seed gives the same scenes at every scale.
        aspect: width over height of every image. The area of an image is the area of a square with a side from ``image_sides``.
            With ``None``, the sides are drawn independently.

    Raises:
        ConfigError: objects that do not fit into the images, or are too small to be recognised.
    """

    image_sides: tuple[int, int] = (96, 192)
    object_sides: tuple[float, float] = (12, 96)
    max_objects: int = 8
    max_overlap: float = 0.5
    min_visible: float = 0.6
    scale: float = 1.0
    aspect: float | None = None

    def __post_init__(self) -> None:
        shortest = min(_sides_of(self, self.image_sides[0], self.image_sides[0]))
        if self.object_sides[1] > shortest:
            raise ConfigError(
                f"object_sides up to {self.object_sides[1]} do not fit image_sides from {shortest}; "
                "make the objects smaller or the images larger"
            )
        if not 4 <= self.object_sides[0] * self.scale < math.inf:
            raise ConfigError(
                f"scale {self.scale} makes objects of {self.object_sides[0] * self.scale:g} pixels; "
                f"below 4 pixels shapes cannot be recognised, so use a scale of {4 / self.object_sides[0]:.2f} or more"
            )


def _sides_of(spec: ShapesSpec, width: int, height: int) -> tuple[int, int]:
    """Width and height of an image, from two drawn sides."""
    if spec.aspect is None:
        return width, height
    root = math.sqrt(spec.aspect)
    return round(width * root), round(width / root)


@dataclass
class Shape:
    """One object, in pixels at scale 1.

    Attributes:
        label: index into ``CLASS_NAMES``.
        paths: (V, 2) points each: the outline, then holes; may extend beyond the image.
        box: (4,) xyxy of the part inside the image, in steps of 1/64 pixel.
        colour: (3,) RGB in [0, 255].
        shading: (2,) relative change of the colour over the object, along x and y.
    """

    label: int
    paths: list[np.ndarray]
    box: np.ndarray
    colour: np.ndarray = field(default_factory=lambda: np.zeros(3))
    shading: np.ndarray = field(default_factory=lambda: np.zeros(2))


@dataclass
class Backdrop:
    """A background: a colour gradient over the image, and a texture in one tint, made of noise at two sizes and a wave."""

    base: np.ndarray  # (3,)
    slope: np.ndarray  # (2, 3), from border to border along x and y
    tint: np.ndarray  # (3,)
    noises: list[np.ndarray]  # grids of any size, stretched over the image
    wave: tuple[float, float, float, float]  # amplitude, radians per pixel along x and y, phase

    def colour_at(self, x: float, y: float) -> np.ndarray:
        """(3,) RGB without the texture, at a point (x, y) in [0, 1] of the image."""
        return self.base + (x - 0.5) * self.slope[0] + (y - 0.5) * self.slope[1]


@dataclass
class Mark:
    """A distractor: thin strokes, (V, 2) points each, of one width and colour, in pixels at scale 1."""

    strokes: list[np.ndarray]
    width: float
    colour: np.ndarray


@dataclass
class Scene:
    """The content of an image without its noise, in pixels at scale 1; later shapes cover earlier ones."""

    width: int
    height: int
    backdrop: Backdrop
    marks: list[Mark]
    shapes: list[Shape]


def draw_image(spec: ShapesSpec, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[np.ndarray]]:
    """Draw one image.

    Args:
        spec: properties of the image.
        rng: the only source of randomness.

    Returns:
        image: (H, W, 3) uint8, RGB.
        boxes_xyxy: (G, 4) float64, in pixels, tight to the part of each object inside the image, covered or not.
        labels: (G,) int64, index into ``CLASS_NAMES``.
        polygons: G of (V, 2) float64, in pixels, the part of each object inside the image, covered or not.
    """
    scene = plan_scene(spec, rng)
    image = paint_scene(scene, spec.scale, rng)
    factor = np.array(image.shape[1::-1]) / (scene.width, scene.height)
    boxes = np.array([shape.box for shape in scene.shapes]).reshape(-1, 4) * np.tile(factor, 2)
    polygons = [_to_64ths(_one_polygon(shape.paths, scene.width, scene.height) * factor) for shape in scene.shapes]
    return image, _to_64ths(boxes), np.array([shape.label for shape in scene.shapes], dtype=np.int64), polygons


def plan_scene(spec: ShapesSpec, rng: np.random.Generator) -> Scene:
    """Choose all objects and their positions, at scale 1 regardless of ``spec.scale``."""
    width, height = _sides_of(spec, *rng.integers(spec.image_sides[0], spec.image_sides[1] + 1, 2).tolist())
    backdrop = _plan_backdrop(rng)
    marks = [_plan_mark(width, height, rng) for _ in range(rng.integers(0, 5))]
    shapes: list[Shape] = []
    for _ in range(rng.integers(0, spec.max_objects + 1)):
        candidates = (_place_shape(spec, width, height, rng) for _ in range(TRIES))
        shape = next((c for c in candidates if c is not None and _leaves_room(c, shapes, spec.max_overlap)), None)
        if shape is None:
            break
        start, end = shape.box[:2], shape.box[2:]
        neighbours = [other.colour for other in shapes if (other.box[:2] < end).all() and (other.box[2:] > start).all()]
        # A random colour with enough contrast to these; if none of 30 has enough, the best of them.
        avoid = np.stack([backdrop.colour_at(*((start + end) / 2 / (width, height))), *neighbours])
        colours = rng.uniform(0, 255, (30, 3))
        # (30, 1, 3) - (n, 3) -> (30, n), weighted by the eye's sensitivity
        distances = np.sqrt((((colours[:, None] - avoid) ** 2) * (0.7, 1.6, 0.7)).sum(-1))
        shape.colour = colours[np.argmax(np.minimum(distances.min(1), MIN_CONTRAST))]
        shape.shading = rng.uniform(-0.12, 0.12, 2)
        shapes.append(shape)
    return Scene(width, height, backdrop, marks, shapes)


def _plan_backdrop(rng: np.random.Generator) -> Backdrop:
    noises = [
        rng.normal(0, 11, rng.integers(3, 7, 2)).astype(np.float32),
        rng.normal(0, rng.uniform(0, 9), rng.integers(12, 32, 2)).astype(np.float32),
    ]
    height = rng.uniform(6, 20) if rng.random() < 0.5 else 0.0
    frequency, angle, phase = 2 * math.pi / rng.uniform(5, 40), *rng.uniform(0, 2 * math.pi, 2).tolist()
    return Backdrop(
        base=rng.uniform(40, 215, 3),
        slope=rng.uniform(-40, 40, (2, 3)),
        tint=rng.uniform(0.5, 1, 3),
        noises=noises,
        wave=(height, frequency * math.cos(angle), frequency * math.sin(angle), phase),
    )


def _plan_mark(width: int, height: int, rng: np.random.Generator) -> Mark:
    start, colour = rng.uniform(0, 1, 2) * (width, height), rng.uniform(0, 255, 3)
    kind = rng.choice(["line", "dots", "scribble", "text"])
    if kind == "line":
        return Mark([np.stack([start, rng.uniform(0, 1, 2) * (width, height)])], rng.uniform(0.7, 1.6), colour)
    if kind == "dots":
        points = start + rng.normal(0, 15, (rng.integers(4, 16), 1, 2))
        return Mark(list(points + np.array([(0, 0), (1, 0)])), rng.uniform(1, 2), colour)
    if kind == "scribble":
        steps = rng.normal(0, 4, (rng.integers(8, 25), 2)) + rng.normal(0, 2, 2)
        return Mark([start + np.cumsum(steps, axis=0)], rng.uniform(0.7, 1.4), colour)
    corners = rng.integers(0, 3, (rng.integers(4, 14), 3, 2)) * (1.2, 2.2)  # letters of three corners each
    corners[..., 0] += 4.2 * np.arange(len(corners))[:, None]
    return Mark(list(start + corners), 0.8, colour)


def _place_shape(spec: ShapesSpec, width: int, height: int, rng: np.random.Generator) -> Shape | None:
    """Try to place a shape without colour; ``None`` if its size or visible part does not meet the spec."""
    low, high = spec.object_sides
    label = int(rng.integers(len(GLYPHS)))
    # Width and height have the same distribution, so turning by 90 degrees does not change the statistics of sizes.
    side, stretch = rng.uniform(math.log(low), math.log(high)), rng.uniform(-MAX_LOG_ASPECT, MAX_LOG_ASPECT) / 2
    size = _to_64ths(np.clip(np.exp([side + stretch, side - stretch]), low, high))
    overhang = OVERHANG * size * (rng.random() < CUT_SHARE)
    corner = _to_64ths(rng.uniform(-overhang, (width, height) - size + overhang))
    angle = rng.uniform(-MAX_TURN, MAX_TURN)
    turn = np.array([(math.cos(angle), math.sin(angle)), (-math.sin(angle), math.cos(angle))])
    paths = [path @ turn for path in GLYPHS[CLASS_NAMES[label]]]
    origin, extent = paths[0].min(0), np.ptp(paths[0], axis=0)
    paths = [corner + (path - origin) / extent * size for path in paths]

    if (corner >= 0).all() and (corner + size <= (width, height)).all():
        return Shape(label, paths, np.concatenate([corner, corner + size]))
    inside = [_clip_path(path, width, height) for path in paths]
    if _area(inside) < spec.min_visible * _area(paths):
        return None
    box = _to_64ths(np.concatenate([inside[0].min(0), inside[0].max(0)]))
    return Shape(label, paths, box) if (box[2:] - box[:2]).min() >= low else None


def _to_64ths(pixels: np.ndarray) -> np.ndarray:
    """Round to multiples of 1/64 pixel, whose sums and differences are exact, so that no box exceeds its image by 1e-14."""
    return np.round(64 * pixels) / 64


def _clip_path(path: np.ndarray, width: int, height: int) -> np.ndarray:
    """The part of a polygon inside the image (Sutherland-Hodgman): (V', 2), empty where nothing is inside."""
    for axis, border, sign in ((0, 0, 1), (0, width, -1), (1, 0, 1), (1, height, -1)):
        depth = sign * (path[:, axis] - border)
        following, depth_following = np.roll(path, -1, axis=0), np.roll(depth, -1)
        crosses = depth * depth_following < 0
        crossings = path + (depth / np.where(crosses, depth - depth_following, 1))[:, None] * (following - path)
        crossings[crosses, axis] = border
        # Each edge yields its crossing of the border, then its end: (V, 2, 2) -> (2 V, 2), without points outside.
        keep = np.stack([crosses, depth_following >= 0], axis=1).reshape(-1)
        path = np.stack([crossings, following], axis=1).reshape(-1, 2)[keep]
    return path


def _one_polygon(paths: Sequence[np.ndarray], width: int, height: int) -> np.ndarray:
    """The part of an outline inside the image as one polygon, without its holes. A cut leads to each hole, and the polygon runs
    along it twice.
    """
    outline, *holes = (_clip_path(path, width, height) for path in paths)
    for hole in holes:
        if len(hole):
            outline = np.concatenate([outline, outline[:1], hole[::-1], hole[-1:]])
    return outline


def _area(paths: Sequence[np.ndarray]) -> float:
    """The area of an outline minus the area of its holes."""
    areas = [abs(np.sum(p[:, 0] * np.roll(p[:, 1], -1) - p[:, 1] * np.roll(p[:, 0], -1))) / 2 for p in paths]
    return float(areas[0] - sum(areas[1:]))


def _leaves_room(shape: Shape, others: Sequence[Shape], max_overlap: float) -> bool:
    """Whether no box has more than ``max_overlap`` of its area covered by the others together."""
    boxes = np.array([other.box for other in others] + [shape.box])
    overlaps = np.minimum(boxes[:, None, 2:], boxes[:, 2:]) - np.maximum(boxes[:, None, :2], boxes[:, :2])
    shared = np.prod(np.maximum(overlaps, 0), axis=2)  # (G, G), the areas themselves on the diagonal
    return bool((shared.sum(1) <= (1 + max_overlap) * np.diagonal(shared)).all())


def paint_scene(scene: Scene, scale: float, rng: np.random.Generator) -> np.ndarray:
    """Paint a scene with camera noise: (H, W, 3) uint8, RGB."""
    width, height = round(scene.width * scale), round(scene.height * scale)
    factor = np.array([width / scene.width, height / scene.height])
    canvas = _paint_backdrop(scene, width, height)
    for mark in scene.marks:
        points = np.concatenate(mark.strokes)
        box = np.concatenate([points.min(0) - mark.width, points.max(0) + mark.width])
        _stamp(canvas, factor, box, mark.strokes, mark.colour, line_width=mark.width)
    for shape in scene.shapes:
        _stamp(canvas, factor, shape.box, shape.paths, shape.colour, shape.shading)
    canvas += rng.uniform(1, 6) * rng.standard_normal(canvas.shape, dtype=np.float32)
    return np.clip(canvas + 0.5, 0, 255).astype(np.uint8)


def _paint_backdrop(scene: Scene, width: int, height: int) -> np.ndarray:
    """The background, (H, W, 3) float32."""
    backdrop = scene.backdrop
    x = ((np.arange(width, dtype=np.float32) + 0.5) / width)[None, :]
    y = ((np.arange(height, dtype=np.float32) + 0.5) / height)[:, None]
    size, along_x, along_y, phase = backdrop.wave
    texture = size * np.sin(along_x * scene.width * x + (along_y * scene.height * y + phase))
    for noise in backdrop.noises:
        texture += np.asarray(Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC))
    canvas = texture[..., None] * backdrop.tint.astype(np.float32)
    canvas += backdrop.colour_at(x[..., None], 0.5)
    canvas += backdrop.colour_at(0.5, y[..., None]) - backdrop.base
    return canvas


def _stamp(
    canvas: np.ndarray,
    factor: np.ndarray,
    box: np.ndarray,
    paths: Sequence[np.ndarray],
    colour: np.ndarray,
    shading: Sequence[float] = (0.0, 0.0),
    line_width: float | None = None,
) -> None:
    """Paint a colour on the canvas inside ``box``, either on an outline without its holes or on thin strokes."""
    height, width = canvas.shape[:2]
    left, top = np.maximum(np.floor(box[:2] * factor), 0).astype(int).tolist()
    right, bottom = np.minimum(np.ceil(box[2:] * factor), (width, height)).astype(int).tolist()
    if left >= right or top >= bottom:
        return
    mask = Image.new("L", ((right - left) * SUPERSAMPLING, (bottom - top) * SUPERSAMPLING))
    pen = ImageDraw.Draw(mask)
    for i, path in enumerate(paths):
        # Pillow's integer coordinates are the middles of pixels
        points = (((path * factor - (left, top)) * SUPERSAMPLING) - 0.5).reshape(-1).tolist()
        if line_width is None:
            pen.polygon(points, fill=0 if i else 255)
        else:
            pen.line(points, fill=255, width=max(1, round(line_width * factor.mean() * SUPERSAMPLING)))
    alpha = np.asarray(mask.reduce(SUPERSAMPLING), dtype=np.float32)[..., None] / 255
    x, y = (np.linspace(-1, 1, side, dtype=np.float32) for side in (right - left, bottom - top))
    light = (1 + float(shading[0]) * x[None, :] + float(shading[1]) * y[:, None])[..., None]
    region = canvas[top:bottom, left:right]
    region += alpha * (light * colour.astype(np.float32) - region)
