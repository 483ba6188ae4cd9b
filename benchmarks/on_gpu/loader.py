# SPDX-License-Identifier: Apache-2.0
"""Images a second of the training loader, by the number of its workers: decoded, augmented as for COCO, in pinned memory."""

import itertools
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.on_gpu import Record, Settings, draw_shapes, say
from cpvt_det.builders.data import build_train_loader
from cpvt_det.builders.datasets import check_datasets
from cpvt_det.cli.folder import folder_config
from cpvt_det.common.memory import usable_cores
from cpvt_det.config import load_cfg
from cpvt_det.data.records import Records

WORKERS = (0, 4, 8, 16)
SECONDS, BATCH = 2.5, 16
CONFIG = "coco/deformable_detr_r50_peg_50ep.yaml"


def run(record: Record, settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as place:
        found: list[Records] = []
        record.part("images", partial(_keep, found, Path(place), settings))
        for workers in (0, 1) if settings.rehearse else sorted({min(number, usable_cores()) for number in WORKERS}):
            if found:
                record.part(f"{workers} workers", partial(read, found[0], workers, settings))


def _keep(found: list[Records], place: Path, settings: Settings) -> dict[str, Any]:
    """The training images of a folder of photographs, or drawn shapes."""
    folder = Path(settings.photos) if settings.photos else draw_shapes(place / "shapes")
    cfg, _ = folder_config(folder, place, ())
    found.append(check_datasets(cfg).train[0].records)
    height, width = (round(float(side)) for side in found[0].sizes.mean(0))
    return {"images": len(found[0]), "mean_size": f"{height}x{width}", "drawn": not settings.photos, "cores": usable_cores()}


def read(records: Records, workers: int, settings: Settings) -> dict[str, float]:
    """Images a second after the first batch, which starts the workers."""
    words = ["DATALOADER.NUM_WORKERS", str(workers), "SOLVER.IMS_PER_BATCH", str(2 if settings.rehearse else BATCH)]
    cfg = load_cfg(CONFIG, [*words, "MODEL.DEVICE", settings.device])
    loader = build_train_loader(cfg, records, seed=0)
    seconds, images = (0.2 if settings.rehearse else SECONDS), 0
    begin = time.perf_counter()
    batches = iter(loader)
    next(batches)
    start = time.perf_counter()
    for batch in itertools.chain(batches):
        images += len(batch)
        if time.perf_counter() - start > seconds:
            break
    rate = images / (time.perf_counter() - start)
    say(f"loader, {workers} workers: {rate:.0f} images/s")
    return {"images_per_second": rate, "images": images, "seconds_to_the_first_batch": start - begin}
