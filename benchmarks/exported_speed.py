#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""A checkpoint beside files that ``cpvt-det export`` wrote of it: AP, and time of an image, in one table of one run.

``python benchmarks/exported_speed.py output/quickstart/model_best.pth float32.onnx int8.onnx float32.xml``. Each model
takes the same prepared images, one at a time; preparing them is not timed, decoding is. Each has a process of its own: in one
process the threads of a library that wait, and spin, take the cores from the others.
"""

import itertools
import multiprocessing
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import click
import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.clocks import clock_of, fixed_threads
from benchmarks.harness import ROUNDS, Contender, Plan, Spread, Work, ratios, run_rounds
from benchmarks.load import check_load
from benchmarks.records import about_run, write_record
from cpvt_det import builders
from cpvt_det.builders.trained import Trained, load_model
from cpvt_det.checkpoint.exported import EXPORTED, is_exported
from cpvt_det.cli import common_options, report_errors
from cpvt_det.training.evaluate import evaluate
from cpvt_det.training.tasks.task import build_task, figure_of

HEADER = "| | MB | AP | ms an image | times as fast as the checkpoint |"


def prepared_images(trained: Trained, count: int) -> list[Tensor]:
    """(3, h, w) each, as they are prepared in evaluation: the first of the first test set; of a small one, again and again."""
    task = build_task(trained.cfg)
    samples = itertools.chain.from_iterable(task.build_test_loader(task.load_tests()[0]))
    return [sample["image"] for sample in itertools.islice(itertools.cycle(samples), count)]


def detect(path: str, trained: Trained, images: list[Tensor]) -> Callable[[], Any]:
    """One call for every image, pixels to decoded boxes."""
    model = trained.detector
    batches = [model.preprocess([image]) for image in images]
    decode = (lambda answers: answers) if is_exported(path) else builders.build_output_decoder(trained.cfg).decode

    def call() -> None:
        with torch.inference_mode():
            for batch in batches:
                decode(model(batch.images, batch.padding_mask))

    return call


def average_precision(trained: Trained) -> float:
    task = build_task(trained.cfg)
    with tempfile.TemporaryDirectory() as folder:
        return figure_of(task.main_figure, evaluate(task, trained.detector, task.load_tests(), Path(folder)))


def answer(pipe: Connection, path: str, checkpoint: str, overrides: Sequence[str], images: int, threads: int) -> None:
    """In a process of its own: for every True one call for every image; at the end, for False, the AP."""
    with fixed_threads(threads):
        source = load_model(checkpoint, "cpu", "", overrides)
        model = load_model(path, "cpu") if is_exported(path) else source
        call = detect(path, model, prepared_images(source, images))
        while pipe.recv():
            call()
            pipe.send(None)
        pipe.send(average_precision(model))


@contextmanager
def asked(path: str, *arguments: Any) -> Iterator[Callable[[bool], Any]]:
    """What asks the process of a model; arguments as of :func:`answer`."""
    pipe, other = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=answer, args=(other, path, *arguments), daemon=True)
    process.start()
    other.close()

    def ask(again: bool) -> Any:
        try:
            pipe.send(again)
            return pipe.recv()
        except (EOFError, OSError) as error:
            raise click.ClickException(f"{path}: its process has ended, see above") from error

    try:
        yield ask
    finally:
        process.kill()
        process.join()


def megabytes(path: str) -> float:
    parts = {Path(path), Path(path).with_suffix(".bin")} if path.endswith(".xml") else {Path(path)}
    return sum(part.stat().st_size for part in parts) / 1e6


def as_row(row: dict[str, Any]) -> str:
    time, ratio = Spread(**row["ms"]), Spread(**row["times_as_fast"])
    spread = f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f})"
    return f"| {row['name']} | {row['MB']:.1f} | {row['AP']:.2f} | {time.median:.1f} | {spread} |"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkpoint", type=click.Path(exists=True, dir_okay=False))
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False))
@click.option("--images", default=20, show_default=True, help="Images of a call.")
@click.option("--rounds", default=ROUNDS, show_default=True, help="Rounds of timing.")
@click.option("--threads", default=1, show_default=True, help="Threads of each model.")
@click.option("--name", default="exported_speed", show_default=True, help="Name of the record's files.")
@click.option("--set", "words", nargs=2, multiple=True, metavar="KEY VALUE", help="Of the checkpoint's config; more than once.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for a JSON and a Markdown file.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(
    checkpoint: str,
    files: tuple[str, ...],
    images: int,
    rounds: int,
    threads: int,
    name: str,
    words: tuple[tuple[str, str], ...],
    output: Path | None,
    busy: bool,
) -> None:
    """Print the table of CHECKPOINT and FILES, .onnx or .xml."""
    load_average = check_load(busy)
    overrides = list(itertools.chain.from_iterable(words))
    with ExitStack() as processes:
        given = checkpoint, overrides, images, threads
        models = {path: processes.enter_context(asked(path, *given)) for path in (checkpoint, *files)}
        work = Work([Contender(path, partial(ask, True)) for path, ask in models.items()])
        plan = Plan(rounds=rounds, most_rounds=rounds, sample_seconds=0.0)
        _, samples = run_rounds(work, plan, clock_of("cpu"))
        rows = []
        for path, ask in models.items():
            times = [1000 * sample.wall / images for sample in samples[path]]
            faster, _ = ratios(samples[checkpoint], samples[path])
            called = f"{EXPORTED[Path(path).suffix]}, {Path(path).stem}" if is_exported(path) else "checkpoint"
            figures = {"ms": vars(Spread.of(times)), "times_as_fast": vars(faster)}
            rows.append({"name": called, "MB": megabytes(path), "AP": ask(False), **figures})
    table = "\n".join([HEADER, "|---|---|---|---|---|", *map(as_row, rows)])
    click.echo(table)
    if output:
        given = [
            f"--images {images}",
            f"--rounds {rounds}",
            f"--threads {threads}",
            *(f"--set {key} {value}" for key, value in words),
        ]
        about = about_run(" ".join(["exported_speed.py CHECKPOINT FILES", *given]), threads, busy, load_average)
        title = "A checkpoint and its exported files"
        paths = write_record(output, name, about, {"rows": rows}, [title, table])
        click.echo(f"written: {', '.join(map(str, paths))}")


if __name__ == "__main__":
    main(prog_name="benchmarks/exported_speed.py")
