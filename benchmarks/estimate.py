# SPDX-License-Identifier: Apache-2.0
"""Estimate of what COCO, Objects365 and a billion boxes need of 8, 64 and 512 GPUs: ``python benchmarks/estimate.py``.

Constants are of records in ``results/``, each of one machine without a GPU; the rest is arithmetic.
"""

import json
import sys
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
TABLE_BYTES = 28  # of an image in the index of tar files: key, tar file, place, length
GRADIENTS_MB = 165  # of DETR-R50, by benchmarks/budget.py
NETWORK = 12.5  # GB/s of a node, 100 Gbit/s
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
        read_seconds, read_bytes: CPU seconds and memory of the first reading of a box.
        worker_bytes: memory that a data worker gains of an image.
        header_seconds: CPU seconds of looking at an image file.
        sample_seconds: CPU seconds of a training sample.
        evaluation_seconds: seconds of COCO's figures of a test image with 100 detections.
        import_gb: memory of a process that has imported torch, most of it shared between processes.
    """

    json_bytes: float
    read_seconds: float
    read_bytes: float
    kept_bytes: float
    worker_bytes: float
    header_seconds: float
    sample_seconds: float
    evaluation_seconds: float
    import_gb: float


def read(name: str) -> dict[str, Any]:
    """A record."""
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def constants() -> Constants:
    """The constants, from the records."""
    from benchmarks.budget import seconds_a_sample

    notes, shards = read("annotations_coco.json"), read("shards_cpu.json")
    boxes, first, later = notes["boxes"], notes["first"], notes["second"]
    cases = {case["name"]: case for case in read("eval_cpu_2threads.json")["cases"]}
    whole = next(row for row in cases["whole path"]["rows"] if row["name"] == "cpvt_det")
    return Constants(
        json_bytes=notes["json_gb"] * 2**30 / boxes,
        read_seconds=first["seconds"] / boxes,
        read_bytes=(first["peak"] - later["peak"]) * 2**30 / boxes,
        kept_bytes=notes["kept_gb"] * 2**30 / boxes,
        worker_bytes=max(later["workers"]) * 2**30 / notes["images"],
        header_seconds=1 / shards["headers"]["tar files"]["images_per_second"],
        sample_seconds=seconds_a_sample(),
        evaluation_seconds=whole["wall"]["median"] / cases["whole path"]["about"]["images"],
        import_gb=later["peak"],
    )


def of_data(found: Constants) -> list[list[Any]]:
    """What does not depend on the number of GPUs."""
    rows = []
    for data in DATA:
        shards = data.images * IMAGE_KB / 1e3 / SHARD_MB
        order = data.images * (8 + 8 + 4)  # of an epoch, wide or tall, sizes
        node = data.boxes * found.kept_bytes + data.images * (A_NODE * (order / data.images + TABLE_BYTES))
        workers = A_NODE * WORKERS * data.images * found.worker_bytes
        rows.append(
            [
                data.name,
                data.boxes * found.json_bytes / 1e9,
                data.boxes * found.read_seconds / 60,
                data.boxes * found.read_bytes / 1e9,
                node / 1e9,
                workers / 1e9,
                shards,
                data.images * IMAGE_KB / 1e9,
                data.images * TABLE_BYTES / 1e6,
                data.tests * found.evaluation_seconds,
            ]
        )
    return rows


def of_clusters(found: Constants) -> list[list[Any]]:
    """What depends on it."""
    rows = []
    for gpus in CLUSTERS:
        sent = 2 * (gpus - 1) / gpus * GRADIENTS_MB
        for data in DATA:
            rows.append(
                [
                    gpus,
                    data.name,
                    data.images * found.header_seconds / gpus,
                    data.images / max(32, gpus),
                    sent if gpus > A_NODE else 0,
                    sent / NETWORK if gpus > A_NODE else 0,
                    gpus * RATE,
                    A_NODE * RATE * found.sample_seconds,
                    gpus * RATE * IMAGE_KB / 1e6,
                    data.images / (gpus * RATE) / 3600,
                ]
            )
    return rows


DATA_HEAD = [
    "data",
    "JSON GB",
    "first read min",
    "and GB",
    "a node GB",
    "workers GB",
    "tar files",
    "TB",
    "index MB",
    "evaluation s",
]
CLUSTER_HEAD = ["GPUs", "data", "headers s", "steps an epoch", "MB a node sends a step", "ms", "images/s", "loader cores a node"]
CLUSTER_HEAD += ["GB/s from storage", "hours an epoch"]


def tables() -> tuple[str, str]:
    """The two tables of docs/scaling.md."""
    from tabulate import tabulate

    found = constants()
    digits = ("", ".2f", ".1f", ".1f", ".2f", ".2f", ".0f", ".2f", ".0f", ".0f")
    one = tabulate(of_data(found), DATA_HEAD, tablefmt="pipe", floatfmt=digits)
    digits = ("", "", ".0f", ".0f", ".0f", ".0f", ".0f", ".1f", ".2f", ".2f")
    return one, tabulate(of_clusters(found), CLUSTER_HEAD, tablefmt="pipe", floatfmt=digits)


@click.command(help=__doc__.partition("\n")[0])
def main() -> None:
    """Print the constants and both tables."""
    for name, value in constants()._asdict().items():
        click.echo(f"{name}: {value:.3g}")
    click.echo("\n" + "\n\n".join(tables()))


if __name__ == "__main__":
    main()
