#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Two checkouts of this package side by side, the models of the suite ``model``: ``python benchmarks/before_after.py CHECKOUT``.

Every round starts a process for each checkout, one after the other, and each process does all cases with the same weights and
images. A ratio is formed within a round: seconds of CHECKOUT / seconds of this tree, above 1 where this tree is faster. The figure
is the median over rounds with its quartiles. Peak memory is that of the whole process.
"""

import importlib
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
from tabulate import tabulate

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.house_road import find

sys.path.append(sys.path.pop(0))  # last: the package is that of PYTHONPATH, perhaps of another checkout
ROOT = Path(__file__).resolve().parent.parent
CANVAS = (320, 480)
SIZES = {"none": [(320, 480), (320, 480)], "29 %": [(320, 480), (288, 224)]}
"""Padding of the batch -> (height, width) of its images."""
DETECTORS = {
    "DETR-R50": {"META_ARCHITECTURE": "CPVTDetr"},
    "Deformable-DETR-R50": {
        "META_ARCHITECTURE": "CPVTDeformableDetr",
        "BACKBONE.STAGES": "(3, 4, 5)",
        "DETR.DIM_FEEDFORWARD": "1024",
    },
}
ENCODINGS = ("sine", "peg")
Seconds = dict[str, float]


def measure(package: Path, repeats: int, weights: Path) -> dict[str, Any]:
    """Seconds of every case, the best of ``repeats`` after one that does not count, and peak memory, in this process.

    Args:
        package: folder of the package.
        repeats: number of timed calls.
        weights: folder with the initial weights of each model; a model without a file there writes its own.
    """
    import torch

    found: Seconds = {}
    outcomes: dict[str, float] = {}
    for name, keys in DETECTORS.items():
        for encoding in ENCODINGS:
            torch.manual_seed(0)
            step, answer = prepare(package, {**keys, "POSITION.NAME": encoding}, weights / f"{name}_{encoding}.pth")
            for padding, sizes in SIZES.items():
                case = f"{name}, {encoding}, padding {padding}"
                for what, call in (("inference", answer), ("training", step)):
                    call(sizes)
                    found[f"{case}, {what}"] = min(timed(lambda call=call, sizes=sizes: call(sizes)) for _ in range(repeats))
                outcomes[case] = answer(sizes)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
    return {"seconds": found, "outcomes": outcomes, "peak_mib": round(peak)}


def prepare(
    package: Path, keys: dict[str, str], weights: Path | None = None
) -> tuple[Callable[[Any], float], Callable[[Any], float]]:
    """A call that takes a training step, forward and backward, and one that infers; both on images of given sizes."""
    import torch

    words = [word for key, value in keys.items() for word in (f"MODEL.{key}", value)]
    cfg = importlib.import_module("cpvt_det.config").load_cfg("", [*words, "MODEL.NUM_CLASSES", "80", "MODEL.DEVICE", "cpu"])
    detector, criterion = find("build_detector", package)(cfg), find("build_criterion", package)(cfg)
    if weights and weights.is_file():  # from the same seed, other checkouts may draw other weights
        detector.load_state_dict(torch.load(weights))
    elif weights:
        torch.save(detector.state_dict(), weights)
    targets_of = importlib.import_module("cpvt_det.losses.matcher").Targets  # where every CHECKOUT has it

    def batch_of(sizes: Any) -> tuple[Any, list[Any]]:
        generator = torch.Generator().manual_seed(1)
        images = [torch.randint(256, (3, *size), dtype=torch.uint8, generator=generator) for size in sizes]
        boxes = [0.25 + 0.25 * torch.rand(10, 4, generator=generator) for _ in sizes]
        labels = [torch.randint(80, (10,), generator=generator) for _ in sizes]
        return detector.preprocess(images), [targets_of(*pair) for pair in zip(labels, boxes, strict=True)]

    def step(sizes: Any) -> float:
        batch, targets = batch_of(sizes)
        detector.train().zero_grad(set_to_none=True)
        total = sum(criterion(detector(batch.images, batch.padding_mask), targets).losses.values())
        total.backward()
        return total.item()

    def answer(sizes: Any) -> float:
        batch, _ = batch_of(sizes)
        detector.eval()
        with torch.no_grad():
            predictions = detector(batch.images, batch.padding_mask)
        return float(predictions.logits.double().sum() + predictions.boxes.double().sum())

    return step, answer


def timed(call: Callable[[], Any]) -> float:
    """CPU seconds of a call; with one thread, other processes do not count."""
    start = time.process_time()
    call()
    return time.process_time() - start


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkout", type=click.Path(path_type=Path, exists=True))
@click.option("--rounds", default=7, show_default=True, help="Pairs of processes.")
@click.option("--repeats", default=2, show_default=True, help="Timed calls of a case in a process; the best one counts.")
@click.option("--output", type=click.Path(path_type=Path), help="Folder for a JSON and a table.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@click.option("--worker", type=click.Path(path_type=Path), hidden=True, help="Folder of initial weights.")
def main(checkout: Path, rounds: int, repeats: int, output: Path | None, busy: bool, worker: Path | None) -> None:
    """Compare the speed of this tree's models with that of another CHECKOUT of the package."""
    if worker:
        print(json.dumps(measure(checkout.resolve() / "cpvt_det", repeats, worker)))
        return
    from benchmarks.load import check_load
    from cpvt_det.cli import report_errors  # here: a worker may have the package of an old CHECKOUT

    load_average = report_errors(check_load)(busy)
    trees = {commit_of(root): root for root in (checkout.resolve(), ROOT)}
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as weights:
        for _ in range(rounds):
            for name, root in trees.items():
                environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
                command = [sys.executable, __file__, str(root), "--worker", weights, "--repeats", str(repeats)]
                done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=root)
                runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    from benchmarks.records import about_run, write_record

    text = table(*runs.items())
    click.echo(text)
    if output:
        about = about_run(f"before_after.py CHECKOUT --rounds {rounds} --repeats {repeats}", 1, busy, load_average)
        content = {"canvas": CANVAS, "rounds": rounds, "runs": runs}
        write_record(output, "before_after", about, content, ["Before and after", f"{rounds} rounds, 1 thread.", text])


def table(before: tuple[str, list[dict[str, Any]]], after: tuple[str, list[dict[str, Any]]]) -> str:
    """A row per case: median seconds of both, ratio with quartiles; last, peak memory."""
    rows = []
    for case in before[1][0]["seconds"]:
        pairs = [(old["seconds"][case], new["seconds"][case]) for old, new in zip(before[1], after[1], strict=True)]
        rows.append(
            [case, *(f"{statistics.median(side):.3f}" for side in zip(*pairs, strict=True)), quartiles([a / b for a, b in pairs])]
        )
    peaks = [(old["peak_mib"], new["peak_mib"]) for old, new in zip(before[1], after[1], strict=True)]
    rows.append(
        [
            "peak memory, MiB",
            *(f"{statistics.median(side):.0f}" for side in zip(*peaks, strict=True)),
            quartiles([a / b for a, b in peaks]),
        ]
    )
    pairs = [(value, after[1][0]["outcomes"][case]) for case, value in before[1][0]["outcomes"].items()]
    furthest = max(abs(old - new) / abs(old) for old, new in pairs)
    same = f"differ by at most {furthest:.1e} of themselves" if furthest else "are equal to the last digit"
    found = tabulate(rows, ("case", before[0], after[0], "ratio (quartiles)"), tablefmt="pipe", disable_numparse=True)
    return f"{found}\n\nSums of all logits and boxes {same}."


def quartiles(values: list[float]) -> str:
    """The median and the first and third quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def commit_of(root: Path) -> str:
    """The short commit of a checkout."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=root, capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()
