# SPDX-License-Identifier: Apache-2.0
"""Estimate of what COCO, Objects365 and a billion boxes need of 8, 64 and 512 GPUs: ``python benchmarks/estimate.py``.

Constants are of records in ``results/``, each of one machine without a GPU; the rest is arithmetic.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # this folder is not part of the installed package
RESULTS = Path(__file__).resolve().parent / "results"
A_NODE = 8  # GPUs, and processes
WORKERS = 4  # of each process, the default
CLUSTERS = (8, 64, 512)
IMAGE_KB = 160  # of a COCO photograph: 19 GB of 118,287
SHARD_MB = 256  # the default of cpvt-det pack
INDEX_BYTES = 28  # of an image in the index of tar files: key, tar file, place, length
GRADIENTS_MB = 165  # of DETR-R50, by benchmarks/budget.py
NETWORK = 12.5  # GB/s of a node, 100 Gbit/s
BATCH = 32  # images of a step in the recipe; an image for each GPU where there are more
RATE = 8.6  # images/s of a GPU: COCO in 50 epochs and 24 hours on 8


class Data(NamedTuple):
    """A data set by its size."""

    name: str
    images: float
    boxes: float
    tests: float


DATA = (Data("COCO", 118_287, 860_001, 5000), Data("Objects365", 1.7e6, 25e6, 80_000), Data("a billion boxes", 68e6, 1e9, 80_000))


class Constants(NamedTuple):
    """What was measured.

    Attributes:
        json_bytes, kept_bytes: of a box, in the JSON and in what is kept of it.
        read_seconds: CPU seconds of the first reading of a box.
        read_fixed, read_bytes: memory of the first reading, whatever the size, and more for each box.
        worker_fixed, worker_bytes: memory that a data worker gains by going through all images, and more for each image.
        header_seconds: CPU seconds of looking at an image file.
        sample_seconds: CPU seconds of a training sample.
        evaluation_seconds: seconds of COCO's figures of a test image with 100 detections.
    """

    json_bytes: float
    read_seconds: float
    read_fixed: float
    read_bytes: float
    kept_bytes: float
    worker_fixed: float
    worker_bytes: float
    header_seconds: float
    sample_seconds: float
    evaluation_seconds: float


def read(name: str) -> dict[str, Any]:
    """A record."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def constants() -> Constants:
    """The constants, from the records."""
    from benchmarks.budget import seconds_a_sample

    small, large, shards = read("annotations_coco.json"), read("annotations_large.json"), read("shards_cpu.json")
    read_fixed, read_bytes = _line(small, large, "boxes", lambda notes: notes["first"]["peak"] - notes["second"]["peak"])
    worker_fixed, worker_bytes = _line(small, large, "images", lambda notes: max(notes["second"]["workers"]))
    cases = {case["name"]: case for case in read("eval_cpu_2threads.json")["cases"]}
    whole = next(row for row in cases["whole path"]["rows"] if row["name"] == "cpvt_det")
    return Constants(
        json_bytes=small["json_gb"] * 2**30 / small["boxes"],
        read_seconds=max(notes["first"]["seconds"] / notes["boxes"] for notes in (small, large)),
        read_fixed=read_fixed,
        read_bytes=read_bytes,
        kept_bytes=small["kept_gb"] * 2**30 / small["boxes"],
        worker_fixed=worker_fixed,
        worker_bytes=worker_bytes,
        header_seconds=1 / shards["headers"]["tar files"]["images_per_second"],
        sample_seconds=seconds_a_sample(),
        evaluation_seconds=whole["wall"]["median"] / cases["whole path"]["about"]["images"],
    )


def _line(small: dict, large: dict, size: str, gigabytes: Callable[[dict], float]) -> tuple[float, float]:
    """What two records have in common whatever their size, and what each of its units adds, in bytes; neither is below 0."""
    one, other = (gigabytes(notes) * 2**30 for notes in (small, large))
    slope = max(0.0, (other - one) / (large[size] - small[size]))
    return max(0.0, one - slope * small[size], other - slope * large[size]), slope


def of_data() -> list[list[str]]:
    """Head and rows of what does not depend on the number of GPUs."""
    found = constants()
    head = ["data", "JSON", "first read", "its memory", "memory of a node", "of its workers", "tar files"]
    head += ["index", "evaluation"]
    rows = []
    for data in DATA:
        order = 8 + 8 + 4  # bytes of an image in each process: the order of an epoch, wide or tall, the size
        node = data.boxes * found.kept_bytes + A_NODE * data.images * (order + INDEX_BYTES)
        workers = A_NODE * WORKERS * (found.worker_fixed + data.images * found.worker_bytes)
        gigabytes = [data.boxes * found.json_bytes, found.read_fixed + data.boxes * found.read_bytes, node, workers]
        json_gb, read_gb, node_gb, workers_gb = (f"{_short(size / 1e9)} GB" for size in gigabytes)
        minutes = f"{_short(data.boxes * found.read_seconds / 60)} min"
        tars = f"{data.images * IMAGE_KB / 1e3 / SHARD_MB:,.0f}"
        index = f"{data.images * INDEX_BYTES / 1e6:.0f} MB"
        evaluation = f"{data.tests * found.evaluation_seconds:.0f} s"
        rows.append([data.name, json_gb, minutes, read_gb, node_gb, workers_gb, tars, index, evaluation])
    return [head, *rows]


def of_clusters() -> list[list[str]]:
    """Head and rows of what does."""
    found = constants()
    head = ["GPUs", "data", "headers", "steps per epoch", "hours", "sent per step", "over the network"]
    head += ["loader cores per node", "read"]
    rows = []
    for gpus in CLUSTERS:
        sent = 2 * (gpus - 1) / gpus * GRADIENTS_MB
        network = [f"{sent:.0f} MB", f"{sent / NETWORK:.0f} ms" if gpus > A_NODE else "none"]
        for data in DATA:
            headers = f"{_short(data.images * found.header_seconds / gpus)} s"
            steps, hours = f"{data.images / max(BATCH, gpus):,.0f}", _short(data.images / (gpus * RATE) / 3600)
            rest = [_short(A_NODE * RATE * found.sample_seconds), f"{_short(gpus * RATE * IMAGE_KB / 1e6)} GB/s"]
            rows.append([str(gpus), data.name, headers, steps, hours, *network, *rest])
    return [head, *rows]


def _short(value: float) -> str:
    """Two digits that matter, or all before the point."""
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


@click.command(help=__doc__.partition("\n")[0])
def main() -> None:
    """Print the constants and both tables."""
    from tabulate import tabulate

    for name, value in constants()._asdict().items():
        click.echo(f"{name}: {value:.3g}")
    for rows in (of_data(), of_clusters()):
        click.echo("\n" + tabulate(rows[1:], rows[0], tablefmt="pipe", disable_numparse=True))


if __name__ == "__main__":
    main()
