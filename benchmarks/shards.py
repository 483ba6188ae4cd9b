# SPDX-License-Identifier: Apache-2.0
"""Images per second from tar files against files: bytes alone, and with decoding and augmentation.

Drawn JPEGs of 640x480 in the page cache, read in the same random order by the same code, alternately; CPU seconds of one process.
webdataset's own reader goes through the tar files from front to end, as it always does: an order of its own. Run as::

    python benchmarks/shards.py FOLDER --output benchmarks/results/shards_cpu.json
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from cpvt_det.cli import report_errors

SIZE = (480, 640)
PART = 4  # samples are made of one image in four


@click.command(help=__doc__.partition("\n")[0])
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--images", default=1000, show_default=True)
@click.option("--rounds", default=7, show_default=True)
@click.option("--output", type=click.Path(path_type=Path), help="JSON file of the figures.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@report_errors
def main(folder: Path, images: int, rounds: int, output: Path | None, busy: bool) -> None:
    """Draw, pack, and read."""
    from benchmarks.records import about_run

    words = f"shards.py FOLDER --images {images} --rounds {rounds}"
    found = {**about_run(words, 1, busy, check_load(busy)), "images": images}
    names = [f"{number:06}.jpg" for number in range(images)]
    files = folder / "files"
    if not files.is_dir():
        draw(files, names)
    shards = folder / "shards"
    if shards.is_dir():
        root = f"{shards}/{{000000..{len(list(shards.glob('*.tar'))) - 1:06}}}.tar"
    else:
        from cpvt_det.cli.pack import write_shards

        shards.mkdir()
        root = write_shards([(name, str(files / name)) for name in names], shards, 32 * 2**20)
    found["megabytes"] = sum(path.stat().st_size for path in shards.glob("*.tar")) / 2**20
    for what, readers in readers_of(str(files), root, names).items():
        seconds = alternate(readers, rounds)
        number = images // (PART if what == "samples" else 1)
        found[what] = {
            name: {"seconds": one, "images_per_second": number / statistics.median(one)} for name, one in seconds.items()
        }
        pairs = [file / shard for file, shard in zip(seconds["files"], seconds["tar files"], strict=True)]
        found[what]["speed of tar files over files"] = {"median": statistics.median(pairs), "rounds": pairs}
        click.echo(f"{what}: {json.dumps(found[what])}")
    if output:
        output.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def draw(folder: Path, names: list[str]) -> None:
    """Write JPEGs of smooth noise, of about the size of photographs: 100 kB."""
    import numpy as np
    from PIL import Image

    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        rng = np.random.default_rng(number)
        coarse = Image.fromarray(rng.integers(0, 256, (60, 80, 3), dtype=np.uint8)).resize(SIZE[::-1])
        noise = rng.integers(-12, 13, (*SIZE, 3))
        Image.fromarray((np.asarray(coarse, dtype=int) + noise).clip(0, 255).astype(np.uint8)).save(folder / name, quality=90)


def readers_of(files: str, root: str, names: list[str]) -> dict[str, dict[str, Callable[[], object]]]:
    """What is compared: by kind of work and place of the images, a function that goes through all of them."""
    import numpy as np
    import torch

    from cpvt_det.data.images import open_image, read_header
    from cpvt_det.data.mapper import Mapper, train_transform
    from cpvt_det.data.records import ImageRecord

    order = np.random.default_rng(0).permutation(len(names)).tolist()
    boxes, labels = np.array([[40, 40, 300, 200]], dtype=np.float32), np.zeros(1, dtype=np.int64)
    mapper = Mapper(train_transform((480, 512, 544), 1333), with_targets=True)

    def read(place: str) -> None:
        for index in order:
            with open_image(f"{place}/{names[index]}") as file:
                file.read()

    def sample(place: str) -> None:
        for index in order[: len(order) // PART]:
            torch.manual_seed(index)
            mapper(ImageRecord(f"{place}/{names[index]}", index, *SIZE, boxes, labels))

    def look(place: str) -> None:
        for index in order:
            read_header(f"{place}/{names[index]}")

    def through() -> None:
        import webdataset

        for one in webdataset.WebDataset(root, shardshuffle=False):
            one["jpg"]

    places = {"files": files, "tar files": root}
    return {
        "bytes": {**{name: lambda place=place: read(place) for name, place in places.items()}, "webdataset, in sequence": through},
        "headers": {name: lambda place=place: look(place) for name, place in places.items()},
        "samples": {name: lambda place=place: sample(place) for name, place in places.items()},
    }


def alternate(readers: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of every reader in every round, after a round that is not counted; who begins changes."""
    seconds: dict[str, list[float]] = {name: [] for name in readers}
    for number in range(rounds + 1):
        for name in list(readers)[:: 1 if number % 2 else -1]:
            start = time.process_time()
            readers[name]()
            seconds[name] += [time.process_time() - start] if number else []
    return seconds


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    main()
