#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""What ``cpvt-det train FOLDER`` reaches on a folder of images in a given time, as a record::

    python benchmarks/small_data.py aquarium FOLDER --budget 30m --output benchmarks/results/small_data
    python benchmarks/small_data.py aquarium FOLDER --budget 30m MODEL.POSITION.NAME peg --output benchmarks/results/small_data
    python benchmarks/small_data.py aquarium FOLDER --budget 10m --label without_nms TEST.NMS 1.0
    python benchmarks/small_data.py aquarium FOLDER --budget 10m --images 50
    python benchmarks/small_data.py deeppcb FOLDER --budget 15m --import my_format

Words after the folder replace what the command would choose; what they replace but the encoding, which is in the record's name
anyway, is named by ``--label``. ``--images`` trains on some of the training images, the same for every seed; the fewer are
among the more. The record keeps the choice whole, so that the run can be repeated with ``--config-file``.
``docs/small_data_tables.py`` makes tables of the records in ``benchmarks/results/small_data``.
"""

import json
import resource
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import yaml
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from benchmarks.machine import machine, versions
from benchmarks.origin import commit_of
from cpvt_det.builders.datasets import check_datasets
from cpvt_det.cli import common_options, report_errors
from cpvt_det.cli.folder import folder_config
from cpvt_det.common.errors import ConfigError
from cpvt_det.common.files import write_json
from cpvt_det.common.memory import usable_cores
from cpvt_det.common.registry import import_words
from cpvt_det.data.coco import CocoDataset
from cpvt_det.evaluation.matches import GroundTruth

ROOT = Path(__file__).resolve().parent.parent
OF_A_PLACE = ("OUTPUT_DIR", "DATASETS")
"""What a choice says of folders: left out of the record."""


def write_part(folder: Path, count: int, place: Path) -> Path:
    """A folder of ``count`` of the training images and all validation images: links to them, and a COCO JSON of each split.

    Raises:
        ConfigError: fewer training images than that.
    """
    data = check_datasets(folder_config(folder, place / "split", ())[0])
    train, val = data.train[0], data.tests[0]
    if len(train.records) < count:
        raise ConfigError(f"--images {count}: there are only {len(train.records)} training images")
    order = np.random.default_rng(0).permutation(np.sort(train.records.image_ids))
    train.leave_out(set(order[count:].tolist()))
    for split, dataset in (("train", train), ("valid", val)):
        write_split(place / folder.name / split, [dataset])
    return place / folder.name


def write_split(root: Path, datasets: list[CocoDataset]) -> None:
    """One folder of the images of several data sets: links to them, and a COCO JSON in which classes of one name are one."""
    root.mkdir(parents=True)
    names = list(dict.fromkeys(name for dataset in datasets for name in dataset.classes.names))
    found: dict[str, list[dict[str, Any]]] = {"images": [], "annotations": []}
    for dataset in datasets:
        first_image, first_annotation = len(found["images"]), len(found["annotations"])
        id_of = {}
        for number, one in enumerate(dataset.records, start=first_image + 1):
            name = f"{number}{Path(one.file_name).suffix}"
            (root / name).symlink_to(Path(one.file_name).resolve())
            found["images"].append({"id": number, "file_name": name, "height": one.height, "width": one.width})
            id_of[one.image_id] = number
        ids = [names.index(name) for name in dataset.classes.names]
        for one in GroundTruth(dataset.records.image_ids, *dataset.records.boxes()).annotations(ids):
            found["annotations"].append(one | {"id": first_annotation + one["id"], "image_id": id_of[one["image_id"]]})
    categories = [{"id": number, "name": name} for number, name in enumerate(names)]
    write_json(found | {"categories": categories}, root / "_annotations.coco.json")


def train(folder: Path, output: Path, budget: str, seed: int, start: str, words: tuple[str, ...]) -> dict[str, float]:
    """Run the command in a process of its own; its wall and CPU seconds, starting and choosing included."""
    command = [sys.executable, "-W", "ignore", "-m", "cpvt_det", "train", str(folder), "--budget", budget]
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    command += [*(["--start", start] if start else []), *import_words().split()]
    subprocess.run([*command, "OUTPUT_DIR", str(output), "SEED", str(seed), *words], check=True, cwd=ROOT)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": round(time.perf_counter() - begin, 1), "cpu_seconds": round(cpu, 1)}


def outcome(output: Path) -> dict[str, Any]:
    """The figures at the end, the curve of AP50 by iteration, and the choice."""
    rows = [json.loads(line) for line in (output / "metrics.json").read_text(encoding="utf-8").splitlines()]
    evaluations = [row for row in rows if "bbox/AP50" in row]
    last = evaluations[-1]
    figures = {name: last[f"bbox/{name}"] for name in ("AP", "AP50", "AP75", "APs", "APm", "APl")}
    by_class = {name.removeprefix("bbox/AP-"): value for name, value in last.items() if name.startswith("bbox/AP-")}
    chosen = yaml.safe_load((output / "chosen.yaml").read_text(encoding="utf-8"))
    return {
        **figures,
        "iterations": last["iteration"] + 1,
        "curve": {row["iteration"] + 1: row["bbox/AP50"] for row in evaluations},
        "AP of classes": by_class,
        "chosen": {key: value for key, value in chosen.items() if key not in OF_A_PLACE},
    }


@click.command(context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True})
@click.argument("name")
@click.argument("folder", type=click.Path(path_type=Path, resolve_path=True))
@click.argument("words", nargs=-1)
@click.option("--budget", default="30m", show_default=True, help="As of cpvt-det train.")
@click.option("--seed", default=0, show_default=True)
@click.option("--start", default="", help="As of cpvt-det train.")
@click.option("--label", default="", help="What the words change, for the record's name.")
@click.option("--images", type=click.IntRange(1), help="Number of training images, drawn by a fixed seed.  [default: all]")
@click.option("--picture", is_flag=True, help="Keep detections beside the ground truth, as a JPEG beside the record.")
@click.option("--output", type=click.Path(path_type=Path), default=Path("output/small_data"), show_default=True)
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(
    name: str,
    folder: Path,
    words: tuple[str, ...],
    budget: str,
    seed: int,
    start: str,
    label: str,
    images: int | None,
    picture: bool,
    output: Path,
    busy: bool,
) -> None:
    """Train on FOLDER, and write OUTPUT/NAME_BUDGET_ENCODING[_LABEL][_IMAGES_images]_SEED.json."""
    load = check_load(busy)
    options = ["--budget", budget, "--seed", str(seed), *(["--start", start] if start else [])]
    options += ["--label", label] if label else []
    options += [*(["--images", str(images)] if images else []), *["--busy"] * busy, *import_words().split()]
    command = shlex.join(["python", "benchmarks/small_data.py", name, "FOLDER", *options, *words])
    found = {"command": command, "commit": commit_of(ROOT), "machine": machine("cpu", load), "versions": versions()}
    found |= {"cores": usable_cores(), "seed": seed, "budget": budget, "images": images}
    found |= {"label": label, "words": list(words)}
    with tempfile.TemporaryDirectory() as place:
        source = write_part(folder, images, Path(place)) if images else folder
        seconds = train(source, Path(place) / "run", budget, seed, start, words)
        found |= seconds | outcome(Path(place) / "run")
        encoding = found["chosen"]["MODEL"]["POSITION"]["NAME"].replace("sine_offset", "sine")
        parts = filter(None, (name, budget, encoding, label, f"{images}_images" if images else "", str(seed)))
        path = output / f"{'_'.join(parts)}.json"
        if picture:
            path.parent.mkdir(parents=True, exist_ok=True)
            drawn = Image.open(Path(place) / "run/pictures/detections.png").convert("RGB")
            drawn.thumbnail((1600, 1600))
            drawn.save(path.with_suffix(".jpg"), quality=85)
    write_json(found, path)
    click.echo(f"{path}: AP {found['AP']:.1f}, AP50 {found['AP50']:.1f}, {found['seconds']:.0f} s")


if __name__ == "__main__":
    main(prog_name="benchmarks/small_data.py")
