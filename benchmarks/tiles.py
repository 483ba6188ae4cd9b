#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""AP by object size and seconds, of tiles and of the whole image, on large canvases: ``python benchmarks/tiles.py WEIGHTS ...``.

Images of the config's first test set are pasted on canvases, side by side at random places, at their own size or, with
``--shrink``, smaller. What is beyond them is grey.
"""

import fnmatch
import json
import shlex
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from PIL import Image
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from benchmarks.machine import machine, versions
from benchmarks.origin import commit_of
from cpvt_det import builders
from cpvt_det.checkpoint.initial import load_initial_weights
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.errors import BadInputError
from cpvt_det.common.files import write_json
from cpvt_det.config import load_cfg
from cpvt_det.data.coco import CocoDataset
from cpvt_det.training.evaluate import evaluate
from cpvt_det.training.tasks.task import build_task

FIGURES = ("AP", "AP50", "APs", "APm", "APl")
GREY = 114


def paste(dataset: CocoDataset, folder: Path, grid: tuple[int, int], canvases: int, shrink: float) -> Path:
    """Paste images on canvases; the path of their COCO JSON.

    Args:
        dataset: data set that images are drawn from, without replacement as long as there are any.
        folder: folder for the canvases and the JSON.
        grid: (columns, rows) of cells, each as large as the largest image.
        canvases: number of canvases.
        shrink: factor on the sides of the pasted images.
    """
    rng = np.random.default_rng(0)
    extents = [(record.height, record.width) for record in dataset.records]
    cell = [max(1, round(shrink * max(side))) for side in zip(*extents, strict=True)]
    columns, rows = grid
    images, annotations, waiting = [], [], []
    for number in range(canvases):
        canvas = Image.new("RGB", (columns * cell[1], rows * cell[0]), (GREY,) * 3)
        for place in range(columns * rows):
            waiting = waiting or rng.permutation(len(dataset.records)).tolist()
            record = dataset.records[waiting.pop()]
            height, width = (max(1, round(shrink * side)) for side in (record.height, record.width))
            left = place % columns * cell[1] + int(rng.integers(cell[1] - width + 1))
            top = place // columns * cell[0] + int(rng.integers(cell[0] - height + 1))
            with Image.open(record.file_name) as image:
                canvas.paste(image.convert("RGB").resize((width, height), Image.Resampling.LANCZOS), (left, top))
            boxes = record.boxes_xyxy * np.array([width / record.width, height / record.height] * 2)
            for (x0, y0, x1, y1), label in zip(boxes.tolist(), record.labels.tolist(), strict=True):
                box = [left + x0, top + y0, x1 - x0, y1 - y0]
                owner = {"id": len(annotations) + 1, "image_id": number + 1, "category_id": dataset.classes.ids[label]}
                annotations.append({**owner, "bbox": box, "area": box[2] * box[3], "iscrowd": 0})
        canvas.save(folder / f"{number:04d}.png")
        images.append({"id": number + 1, "file_name": f"{number:04d}.png", "height": canvas.height, "width": canvas.width})
    categories = [{"id": i, "name": name} for i, name in zip(dataset.classes.ids, dataset.classes.names, strict=True)]
    write_json({"images": images, "annotations": annotations, "categories": categories}, folder / "canvases.json")
    return folder / "canvases.json"


def measure(config: str, words: Sequence[str]) -> dict[str, Any]:
    """Figures in percent of an evaluation, and its wall and CPU seconds per image."""
    cfg = load_cfg(config, words)
    task = build_task(cfg)
    tests = task.load_tests()
    detector = builders.build_detector(cfg).to(builders.build_device(cfg))
    load_initial_weights(cfg, detector, tests[0].classes, for_evaluation=True)
    begin, used = time.perf_counter(), time.process_time()
    figures = evaluate(task, detector, tests, Path(cfg.OUTPUT_DIR))["bbox"]
    seconds = {"seconds": time.perf_counter() - begin, "cpu_seconds": time.process_time() - used}
    found = {name: round(figures[name], 2) if figures[name] == figures[name] else None for name in FIGURES}
    return {**found, **{name: round(value / len(tests[0].records), 3) for name, value in seconds.items()}}


@click.command(context_settings={"ignore_unknown_options": True, "help_option_names": ["-h", "--help"]})
@click.argument("weights")
@click.option("--config-file", "config", required=True, help="Config of the weights, whose first test set is pasted.")
@click.option("--grid", type=(int, int), default=(4, 3), show_default=True, help="Columns and rows of images on a canvas.")
@click.option("--canvases", default=20, show_default=True)
@click.option("--shrink", default=1.0, show_default=True, help="Factor on the sides of the pasted images.")
@click.option("--tiles", default=640, show_default=True, help="Side of a tile in pixels.")
@click.option("--overlap", default=0.2, show_default=True)
@click.option("--case", "case", default="*", metavar="PATTERN", help="Only what matches, such as '*whole image*'.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for tiles_TEST-SET.json.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@click.argument("words", nargs=-1, metavar="[KEY VALUE]...")
@common_options
@report_errors
def main(
    weights: str,
    config: str,
    grid: tuple[int, int],
    canvases: int,
    shrink: float,
    tiles: int,
    overlap: float,
    case: str,
    output: Path | None,
    busy: bool,
    words: tuple[str, ...],
) -> None:
    """Print AP by object size and seconds per image of the whole image, resized by the config and not resized, and of tiles."""
    load_average = check_load(busy)
    cells = " ".join(map(str, grid))
    options = f"--grid {cells} --canvases {canvases} --shrink {shrink} --tiles {tiles} --overlap {overlap}{' --busy' * busy}"
    parts = [weights, "--config-file", config, *options.split(), "--case", case, *words]
    command = shlex.join(["python", "benchmarks/tiles.py", *parts])
    record: dict[str, Any] = {"command": command, "commit": commit_of(Path(__file__).parent, short=True)}
    record |= {"machine": machine("cpu", load_average), "versions": versions(), "threads": torch.get_num_threads(), "busy": busy}
    tiled = ["TEST.TILES.SIZE", str(tiles), "TEST.TILES.OVERLAP", str(overlap)]
    ways = {"whole image": [], "whole image, not resized": ["INPUT.MIN_SIZE_TEST", "0"]}
    for merge in ("ios", "nms"):
        for whole in ("True", "False"):
            more = [*tiled, "TEST.TILES.MERGE", merge, "TEST.TILES.WHOLE", whole]
            ways[f"tiles{' and the whole image' if whole == 'True' else ''}, {merge}"] = more
    ways = {name: more for name, more in ways.items() if fnmatch.fnmatch(name, case)}
    if not ways:
        raise BadInputError(f"--case {case!r} matches nothing")
    with tempfile.TemporaryDirectory() as folder:
        cfg = load_cfg(config, words)
        pasted = paste(builders.load_tests(cfg)[0], Path(folder), grid, canvases, shrink)
        own = ["DATASETS.REGISTER", str([["canvases", str(pasted), folder]]), "DATASETS.TEST", "('canvases',)"]
        own += ["OUTPUT_DIR", f"{folder}/output", "MODEL.WEIGHTS", weights, "TEST.IMS_PER_BATCH", "1"]
        record["ways"] = {name: measure(config, [*words, *own, *more]) for name, more in ways.items()}
    table = [(name, *found.values()) for name, found in record["ways"].items()]
    click.echo(tabulate(table, ("", *FIGURES, "seconds per image", "CPU seconds per image"), tablefmt="pipe"))
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / f"tiles_{cfg.DATASETS.TEST[0]}.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
