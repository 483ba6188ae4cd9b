# SPDX-License-Identifier: Apache-2.0
"""A web server that answers a photograph with what is on it.

``pip install fastapi uvicorn``, ``WEIGHTS=output/model_best.pth uvicorn web:app``, then
``curl --data-binary @photo.jpg -H 'Content-Type: image/jpeg' localhost:8000/detect``.
"""

import io
import os
import threading
from typing import Annotated

from fastapi import Body, FastAPI, HTTPException
from PIL import Image

from cpvt_det import Predictor

app, predictor, one_at_a_time = FastAPI(), Predictor.from_checkpoint(os.environ["WEIGHTS"]), threading.Lock()


@app.post("/detect")
def detect(photo: Annotated[bytes, Body(media_type="image/jpeg")]) -> list[dict]:
    try:
        image = Image.open(io.BytesIO(photo))
        image.load()
    except (OSError, Image.DecompressionBombError) as error:
        raise HTTPException(422, f"no image: {error}") from error
    with one_at_a_time:  # FastAPI calls this in several threads
        found = predictor(image).above(predictor.threshold)
    rows = zip(found.names, found.scores.tolist(), found.boxes_xyxy.tolist(), strict=True)
    return [{"name": name, "score": score, "box_xyxy": box} for name, score, box in rows]
