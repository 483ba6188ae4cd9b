#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Times in a browser, of the page of ``cpvt-det serve`` and of ``report.html``: ``python benchmarks/browser.py --photos FOLDER``.

- **First boxes**: from the start of the command, and from the drop of the folder's first photograph, to boxes in the page; until
  the command has named its address; and its CPU time on all cores. The models have random weights, which take the same time.
- **Slider**: one step of the threshold, from its event to the new layout, in the page's own clock.
- **Report**: of as many photographs (the folder's, in turns) with 100 random detections and 8 random objects each.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.errors import BadInputError

CONFIGS = ("coco/detr_r50_peg_50ep.yaml", "coco/deformable_detr_r50_peg_50ep.yaml")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
SLIDE = """([id, steps]) => steps.map((step) => {
  const slider = document.getElementById(id), start = performance.now();
  slider.value = step;
  slider.dispatchEvent(new Event("input"));
  document.body.getBoundingClientRect();
  return performance.now() - start;
})"""
STEPS = list(range(20, 1000, 40))


@contextmanager
def open_browser() -> Iterator[Any]:
    """The system's Chromium, without a window.

    Raises:
        BadInputError: no Chromium, or playwright is not installed.
    """
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    try:
        from playwright.sync_api import sync_playwright
    except ImportError as error:
        raise BadInputError("this benchmark drives a browser: pip install playwright") from error
    if path is None:
        raise BadInputError(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield opened
        opened.close()


def save_random(config: str, path: Path) -> None:
    """A checkpoint of a config's model with random weights and COCO's classes."""
    import torch

    from cpvt_det.builders import build_detector
    from cpvt_det.common.class_names import COCO_CLASSES
    from cpvt_det.config import load_cfg

    cfg = load_cfg(config, ["MODEL.NUM_CLASSES", str(len(COCO_CLASSES)), "MODEL.BACKBONE.WEIGHTS", ""])
    torch.manual_seed(0)
    node = {"config": cfg.dump(), "classes": {"ids": list(COCO_CLASSES.ids), "names": list(COCO_CLASSES.names)}}
    torch.save({"model": build_detector(cfg).state_dict(), "cpvt_det": node}, path)


def time_page(browser: Any, weights: Path, photo: Path) -> dict[str, Any]:
    """Seconds to the address, and to the first boxes of a photograph; CPU seconds; milliseconds of a step of the slider."""
    words = [sys.executable, "-m", "cpvt_det", "serve", str(weights), "--port", "0", "--device", "cpu"]
    begin, used = time.perf_counter(), os.times()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    try:
        address = process.stdout.readline().split(": ")[1].split()[0]
        named = time.perf_counter()
        page = browser.new_page()
        page.goto(address)
        dropped = time.perf_counter()
        page.locator("#files").set_input_files(photo)
        page.locator(".box").first.wait_for(state="attached", timeout=120_000)
        now = time.perf_counter()
        slid = page.evaluate(SLIDE, ["threshold-0", STEPS])
        page.close()
    finally:
        process.terminate()
        process.wait()
    cpu = sum(after - before for after, before in zip(os.times()[2:4], used[2:4], strict=True))  # of the children that have ended
    seconds = {"to_the_address_s": named - begin, "from_the_command_s": now - begin, "from_the_drop_s": now - dropped, "cpu_s": cpu}
    return {**{name: round(value, 2) for name, value in seconds.items()}, **_milliseconds(slid)}


def time_report(browser: Any, photos: Sequence[Path], count: int, folder: Path) -> dict[str, Any]:
    """Megabytes of a report, seconds to write and to open it, and milliseconds of a step of its slider."""
    begin = time.perf_counter()
    path = _write_report(photos, count, folder)
    written = time.perf_counter() - begin
    page = browser.new_page()
    begin = time.perf_counter()
    page.goto(path.as_uri())
    opened = time.perf_counter() - begin
    slid = page.evaluate(SLIDE, ["threshold", STEPS])
    page.close()
    found = {"images": count, "megabytes": round(path.stat().st_size / 1e6, 2)}
    return found | {"written_s": round(written, 1), "opened_s": round(opened, 2), **_milliseconds(slid)}


def _write_report(photos: Sequence[Path], count: int, folder: Path) -> Path:
    import numpy as np
    import torch

    from cpvt_det.common.structures import Detections
    from cpvt_det.data.catalog import DatasetFiles
    from cpvt_det.data.coco import load_coco
    from cpvt_det.data.images import read_header
    from cpvt_det.evaluation.coco import CocoEvaluator
    from cpvt_det.visualize.report_page import write_report_page

    rng, images, annotations = np.random.default_rng(0), [], []
    names = [f"class {number}" for number in range(20)]
    for number in range(count):
        photo = photos[number % len(photos)]
        header, name = read_header(str(photo)), f"{number}{photo.suffix}"
        (folder / name).symlink_to(photo.resolve())  # a file may not be listed twice
        images.append({"id": number + 1, "file_name": name, "width": header.width, "height": header.height})
        for box, label in zip(_boxes(rng, images[-1], 8).tolist(), rng.integers(0, 20, 8).tolist(), strict=True):
            box = [*box[:2], box[2] - box[0], box[3] - box[1]]
            annotations.append({"id": len(annotations), "image_id": number + 1, "category_id": label, "bbox": box})
    truth = {"images": images, "annotations": annotations, "categories": [{"id": k, "name": name} for k, name in enumerate(names)]}
    (folder / "truth.json").write_text(json.dumps(truth), encoding="utf-8")
    dataset = load_coco(DatasetFiles("photographs", folder / "truth.json", folder))
    evaluator = CocoEvaluator(dataset.records, dataset.classes)
    for image in images:
        boxes, scores = torch.from_numpy(_boxes(rng, image, 100)), torch.from_numpy(rng.random(100))
        evaluator.add(image["id"], Detections(boxes, scores, torch.from_numpy(rng.integers(0, 20, 100))))
    matches = evaluator.matches()
    write_report_page(dataset, matches, matches.curves(20), evaluator.evaluate(), folder / "report.html", 0.5)
    return folder / "report.html"


def _boxes(rng: Any, image: dict[str, Any], count: int) -> Any:
    """(count, 4) float64, xyxy inside the image."""
    size = [image["width"], image["height"]] * 2
    corners = rng.uniform(0, 1, (count, 2, 2))
    corners.sort(axis=1)
    return corners.reshape(count, 4) * size


def _milliseconds(slid: Sequence[float]) -> dict[str, float]:
    ordered = sorted(slid)
    return {"slider_median_ms": round(ordered[len(ordered) // 2], 1), "slider_longest_ms": round(ordered[-1], 1)}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--photos", required=True, type=click.Path(path_type=Path), help="Folder of JPEGs.")
@click.option("--count", type=click.IntRange(min=1), default=500, show_default=True, help="Photographs in the report.")
@click.option("--config-file", "configs", multiple=True, default=CONFIGS, show_default=True, help="Models of the page.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for a JSON.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(photos: Path, count: int, configs: tuple[str, ...], output: Path | None, busy: bool) -> None:
    """Print how long a browser takes for the first boxes, and for a step of each slider."""
    load_average = check_load(busy)
    import torch

    from benchmarks.machine import machine, versions
    from benchmarks.origin import commit_of
    from benchmarks.report import file_stem

    files = sorted(photos.glob("*.jpg"))
    if not files:
        raise BadInputError(f"--photos {photos} has no .jpg")
    words = " ".join(["--photos FOLDER", f"--count {count}", *["--busy"] * busy])
    record: dict[str, Any] = {"command": f"python benchmarks/browser.py {words}", "busy": busy}
    record |= {
        "commit": commit_of(Path(__file__).parent, short=True),
        "machine": machine("cpu", load_average),
        "versions": versions(),
        "threads": torch.get_num_threads(),
    }
    with tempfile.TemporaryDirectory() as folder, open_browser() as browser:
        record["browser"] = f"Chromium {browser.version}"
        for config in configs:
            save_random(config, Path(folder) / "weights.pth")
            record.setdefault("page", {})[config] = time_page(browser, Path(folder) / "weights.pth", files[0])
            click.echo(f"{config}: {json.dumps(record['page'][config])}")
        record["report"] = time_report(browser, files, count, Path(folder))
        click.echo(f"report.html: {json.dumps(record['report'])}")
    if output:
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"{file_stem('browser', 'cpu', record['threads'], record['machine'])}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        click.echo(f"written: {path}")


if __name__ == "__main__":
    main()
