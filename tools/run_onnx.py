#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Detections of an exported detector on a picture, without cpvt_det: ``python run_onnx.py detector.onnx picture.jpg``."""

import argparse
import json
import os
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

DEFAULT_THRESHOLD = 0.5  # of a file without one


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Print class, score and box (x1 y1 x2 y2, in pixels) of each detection.")
    parser.add_argument("detector", help="ONNX file of cpvt-det export")
    parser.add_argument("picture", help="image file")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="SCORE",
        help="lowest score to print, from 0 to 1 (default: that of the best F1, which the file contains; else 0.5)",
    )
    arguments = parser.parse_args()
    for path in (arguments.detector, arguments.picture):
        if not os.path.isfile(path):
            parser.error(f"there is no file {path}")
    if arguments.threshold is not None and not 0 <= arguments.threshold <= 1:
        parser.error(f"--threshold must be a score from 0 to 1, got {arguments.threshold:g}")
    return arguments


def main() -> None:
    arguments = parse_arguments()
    session = onnxruntime.InferenceSession(arguments.detector)
    described = session.get_modelmeta().custom_metadata_map.get("cpvt_det")
    if described is None:
        sys.exit(f"{arguments.detector} is no file of cpvt-det export: it does not say what its detector expects")
    facts = json.loads(described)
    picture = ImageOps.exif_transpose(Image.open(arguments.picture)).convert("RGB")
    scale = min(facts["min_size"] / min(picture.size), facts["max_size"] / max(picture.size)) or 1  # 0: no resize
    pixels = np.asarray(picture.resize([max(1, round(side * scale)) for side in picture.size], Image.Resampling.BILINEAR))
    height, width = pixels.shape[:2]
    count, _, *sides = session.get_inputs()[0].shape  # numbers where the program was exported for one size, else names
    smallest = [-(-side // facts["stride"]) * facts["stride"] for side in (height, width)]
    canvas = [side if isinstance(side, int) else least for side, least in zip(sides, smallest, strict=True)]
    if height > canvas[0] or width > canvas[1]:
        size = f"{height} x {width} pixels (height x width)"
        sys.exit(f"the picture becomes {size}, and the program takes {canvas[0]} x {canvas[1]}; export it with a larger --size")
    count = count if isinstance(count, int) else 1
    images, padding_mask = np.zeros((count, 3, *canvas), np.float32), np.ones((count, *canvas), bool)
    images[0, :, :height, :width], padding_mask[0, :height, :width] = pixels.transpose(2, 0, 1), False
    boxes, scores, labels = (answer[0] for answer in session.run(None, {"images": images, "padding_mask": padding_mask}))
    kept = facts.get("threshold")
    threshold = next(score for score in (arguments.threshold, kept, DEFAULT_THRESHOLD) if score is not None)
    if arguments.threshold is None:
        origin = "the file contains none" if kept is None else "the best F1 of its evaluation"
        print(f"threshold {threshold:.3g}: {origin}; --threshold sets another", file=sys.stderr)
    for box, score, label in zip(boxes * (picture.size * 2), scores, labels, strict=True):
        if score >= threshold:
            print(facts["class_names"][label], f"{score:.3f}", *box.round(1))
    best = f"the best score is {scores.max():.3g} ({facts['class_names'][labels[scores.argmax()]]})"
    if scores.max() < threshold:
        best = f"no detection has a score of {threshold:.3g}, and {best}; --threshold sets a lower one"
    print(best, file=sys.stderr)


if __name__ == "__main__":
    main()
