#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Detections of an exported detector on a picture, without cpvt_det: ``python run_onnx.py detector.onnx picture.jpg``."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

session = onnxruntime.InferenceSession(sys.argv[1])
facts = json.loads(session.get_modelmeta().custom_metadata_map["cpvt_det"])
picture = ImageOps.exif_transpose(Image.open(sys.argv[2])).convert("RGB")
scale = min(facts["min_size"] / min(picture.size), facts["max_size"] / max(picture.size)) or 1  # 0: no resize
pixels = np.asarray(picture.resize([max(1, round(side * scale)) for side in picture.size], Image.Resampling.BILINEAR))
height, width = pixels.shape[:2]
canvas = [-(-side // facts["stride"]) * facts["stride"] for side in (height, width)]
images, padding_mask = np.zeros((1, 3, *canvas), np.float32), np.ones((1, *canvas), bool)
images[0, :, :height, :width], padding_mask[0, :height, :width] = pixels.transpose(2, 0, 1), False
boxes, scores, labels = session.run(None, {"images": images, "padding_mask": padding_mask})
for box, score, label in zip(boxes[0] * (picture.size * 2), scores[0], labels[0], strict=True):
    if score >= 0.5:
        print(facts["class_names"][label], f"{score:.3f}", *box.round(1))
