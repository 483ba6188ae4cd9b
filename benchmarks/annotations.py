# SPDX-License-Identifier: Apache-2.0
"""Seconds and memory of reading annotations: the first time, the second, and in data workers that go through all records.

Run as::

    python benchmarks/annotations.py FOLDER                       # of the size of COCO's training set
    python benchmarks/annotations.py FOLDER --images 1700000 --boxes 25000000
"""

import json
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
CATEGORIES = 80
READ = """
import json, resource, sys, time
from pathlib import Path
sys.path.insert(0, {root!r})
import torch
from cpvt_det.data.catalog import DatasetFiles
from cpvt_det.data.coco import read_coco
from benchmarks.annotations import memory, worker_growth
before, start = memory(), time.process_time()
dataset = read_coco(DatasetFiles("drawn", Path({path!r}), Path("images")), cache=Path({cache!r}))
seconds = time.process_time() - start
grown = {{key: value - before[key] for key, value in memory().items()}}
workers = worker_growth(dataset.records, {epochs}) if {epochs} else []
print(json.dumps({{"seconds": seconds, "images": len(dataset.records), "boxes": int(dataset.records.num_boxes.sum()),
                  "peak": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, **grown, "workers": workers}}))
"""


def draw(path: Path, images: int, boxes: int, seed: int = 0) -> None:
    """Write a COCO JSON of random boxes: ids in random order, some boxes of crowds, sections in COCO's order.

    Args:
        path: the file.
        images, boxes: numbers of them.
        seed: seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    ids = rng.permutation(3 * images)[:images].tolist()
    with path.open("w", encoding="utf-8") as file:
        file.write('{"info": {"year": 2017}, "licenses": [], "images": [')
        for number, image_id in enumerate(ids):
            image = {"license": 1, "file_name": f"{image_id:012}.jpg", "height": 480, "width": 640, "id": image_id}
            file.write(", " * (number > 0) + json.dumps(image))
        file.write('], "annotations": [')
        done = 0
        while done < boxes:
            count = min(100_000, boxes - done)
            corners = rng.random((count, 4)) * (500, 400, 130, 70) + (0, 0, 3, 3)
            owners, classes = rng.integers(images, size=count), rng.integers(1, CATEGORIES + 1, size=count)
            crowds = rng.random(count) < 0.01
            rows = zip(corners.round(2).tolist(), owners.tolist(), classes.tolist(), crowds.tolist(), strict=True)
            for number, (box, owner, category, crowd) in enumerate(rows, start=done):
                entry = {"area": round(box[2] * box[3] / 2, 4), "iscrowd": int(crowd), "image_id": ids[owner], "bbox": box}
                file.write(", " * (number > 0) + json.dumps({**entry, "category_id": category, "id": number + 1}))
            done += count
        categories = [{"supercategory": "some", "id": number, "name": f"class {number}"} for number in range(1, CATEGORIES + 1)]
        file.write('], "categories": ' + json.dumps(categories) + "}")


def memory() -> dict[str, float]:
    """GB of this process: resident, and those that it alone has written."""
    fields = dict(line.split(":") for line in Path("/proc/self/smaps_rollup").read_text().splitlines()[1:])
    sizes = {name: int(value.split()[0]) / 2**20 for name, value in fields.items()}
    return {"resident": sizes["Rss"], "private": sizes["Private_Dirty"]}


def worker_growth(records, epochs: int, workers: int = 4) -> list[float]:
    """Private GB that each forked worker gains by going through all records, as data workers do."""
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    started = [context.Process(target=_go_through, args=(records, epochs, queue)) for _ in range(workers)]
    for one in started:
        one.start()
    grown = [queue.get() for _ in started]
    for one in started:
        one.join()
    return grown


def _go_through(records, epochs: int, queue) -> None:
    before = memory()["private"]
    for epoch in range(epochs):
        for index in np.random.default_rng(epoch).permutation(len(records)):
            records[int(index)]
    queue.put(memory()["private"] - before)


@click.command(help=__doc__.partition("\n")[0])
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--images", default=118_287, show_default=True)
@click.option("--boxes", default=860_001, show_default=True)
@click.option("--epochs", default=4, show_default=True, help="Epochs of the workers.")
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of the figures.")
def main(folder: Path, images: int, boxes: int, epochs: int, output: Path | None) -> None:
    """Draw, read, read again, and go through."""
    folder.mkdir(parents=True, exist_ok=True)
    path, cache = folder / f"{images}_{boxes}.json", folder / "cache"
    if not path.is_file():
        draw(path, images, boxes)
    for old in cache.glob("*"):
        old.unlink()
    from benchmarks.origin import describe_origin

    command = f"python benchmarks/annotations.py FOLDER --images {images} --boxes {boxes} --epochs {epochs}"
    found = {"command": command, **describe_origin(), "images": images, "boxes": boxes, "json_gb": path.stat().st_size / 2**30}
    for name, rounds in (("first", 0), ("second", epochs)):
        program = READ.format(root=str(ROOT), path=str(path), cache=str(cache), epochs=rounds)
        start = time.perf_counter()
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, env=os.environ)
        found[name] = {**json.loads(done.stdout), "process_seconds": time.perf_counter() - start}
        click.echo(f"{name}: {json.dumps(found[name])}")
    found["kept_gb"] = sum(file.stat().st_size for file in cache.glob("*.columns")) / 2**30
    if output:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
