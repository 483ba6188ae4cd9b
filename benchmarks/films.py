#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""A film beside its frames as images, and the memory of long films::

    python benchmarks/films.py output/quickstart/model_best.pth --threads 2 --output benchmarks/results

Frames a second of ``Predictor.stream`` stand beside those of ``Predictor`` with the same frames in memory, in equal batches.
Then an hour at one frame in 50, and five minutes of it in full, are drawn and written as ``cpvt-det predict`` does. The films are
drawn here: a picture that moves across the frame, 25 frames a second.
"""

import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.clocks import clock_of, fixed_threads
from benchmarks.harness import ROUNDS, Contender, Plan, Spread, Work, ratios, run_rounds
from benchmarks.load import check_load
from benchmarks.records import about_run, write_record
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.memory import resident
from cpvt_det.predict import Predictor
from cpvt_det.predict.detect_files import predict_film
from cpvt_det.predict.films import FilmReader, FilmWriter, Frame

RATE = 25
MEGABYTE = 1e6
HEADER = "| film | frames taken | s | frames/s | MB after a tenth | MB at the end | most MB after a tenth |"


def draw_film(path: Path, seconds: float, size: tuple[int, int]) -> Path:
    """A film of smooth colours, which move by a pixel a frame, and blocks upon them."""
    generator = np.random.default_rng(0)
    small = Image.fromarray(generator.integers(0, 255, (6, 8, 3), dtype=np.uint8))
    pixels = np.asarray(small.resize(size, Image.Resampling.BICUBIC)).copy()
    for _ in range(6):
        x, y = (int(generator.integers(0, side - side // 6)) for side in size)
        pixels[y : y + size[1] // 6, x : x + size[0] // 6] = generator.integers(0, 255, 3)
    writer = FilmWriter(path)
    for number in range(round(seconds * RATE)):
        writer.add(Image.fromarray(np.roll(pixels, number % size[0], axis=1)), number / RATE)
    writer.close()
    return path


class WatchedReader(FilmReader):
    """A reader that notes the memory of the process at each frame that is taken."""

    def __iter__(self) -> Iterator[Frame]:
        self.memory: list[float] = []
        for frame in super().__iter__():
            self.memory.append(resident() / MEGABYTE)
            yield frame


def speed(predictor: Predictor, film: Path, batch_size: int, rounds: int) -> dict[str, Any]:
    """Frames a second of the film and of its frames as images, and how they compare, paired by round."""
    frames = [frame.pixels for frame in FilmReader(film)]

    def images() -> list[list[float]]:
        parts = (frames[start : start + batch_size] for start in range(0, len(frames), batch_size))
        return [one.scores.tolist() for part in parts for one in predictor(part, batch_size=batch_size)]

    def streamed() -> list[list[float]]:
        return [one.detections.scores.tolist() for one in predictor.stream(film, batch_size=batch_size)]

    if images() != streamed():
        raise click.ClickException("a film's detections are not those of its frames: the work is not the same")
    work = Work([Contender("images", images), Contender("film", streamed)])
    plan = Plan(rounds=rounds, most_rounds=rounds, sample_seconds=0.0)
    _, samples = run_rounds(work, plan, clock_of("cpu"))
    ratio, _ = ratios(samples["images"], samples["film"])
    rates = {name: vars(Spread.of([len(frames) / one.wall for one in taken])) for name, taken in samples.items()}
    return {"frames": len(frames), "batch_size": batch_size, "frames_per_second": rates, "film_over_images": vars(ratio)}


def long_film(predictor: Predictor, film: Path, every: int, batch_size: int, output: Path) -> dict[str, Any]:
    """Detect in a film as ``cpvt-det predict`` does; time and memory."""
    reader = WatchedReader(film, every)
    work = Work([Contender("film", lambda: predict_film(predictor, reader, output, predictor.threshold, batch_size))])
    _, samples = run_rounds(work, Plan(warm_up=0, rounds=1, most_rounds=1, sample_seconds=0.0), clock_of("cpu"))
    seconds, count = samples["film"][0].wall, len(reader.memory)
    begun = count // 10  # models, canvases and the codec have their memory by then
    memory = {"after_a_tenth": reader.memory[begun], "at_the_end": reader.memory[-1], "most": max(reader.memory[begun:])}
    return {"every": every, "frames": count, "seconds": seconds, "frames_per_second": count / seconds, "megabytes": memory}


def as_row(name: str, row: dict[str, Any]) -> str:
    memory = " | ".join(f"{row['megabytes'][key]:.0f}" for key in ("after_a_tenth", "at_the_end", "most"))
    return f"| {name} | {row['frames']:,} | {row['seconds']:.0f} | {row['frames_per_second']:.1f} | {memory} |"


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("checkpoint", type=click.Path(exists=True, dir_okay=False))
@click.option("--minutes", default=60.0, show_default=True, help="Length of the long film.")
@click.option("--full-minutes", default=5.0, show_default=True, help="Length of the film that is taken in full.")
@click.option("--every", default=50, show_default=True, help="Take the first of this many frames of the long film.")
@click.option("--size", nargs=2, default=(320, 240), show_default=True, help="Width and height of a frame.")
@click.option("--batch-size", default=8, show_default=True, help="Frames of a batch.")
@click.option("--rounds", default=ROUNDS, show_default=True, help="Rounds of timing.")
@click.option("--threads", default=1, show_default=True, help="Threads of the model.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for a JSON and a Markdown file.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(
    checkpoint: str,
    minutes: float,
    full_minutes: float,
    every: int,
    size: tuple[int, int],
    batch_size: int,
    rounds: int,
    threads: int,
    output: Path | None,
    busy: bool,
) -> None:
    """Print the speed and the memory of CHECKPOINT with films."""
    load_average = check_load(busy)
    with fixed_threads(threads), tempfile.TemporaryDirectory() as place:
        predictor, folder = Predictor.from_checkpoint(checkpoint, "cpu"), Path(place)
        found = speed(predictor, draw_film(folder / "short.mp4", 8, size), batch_size, rounds)
        films = {
            f"{minutes:g} minutes, 1 frame in {every}": (draw_film(folder / "long.mp4", 60 * minutes, size), every),
            f"{full_minutes:g} minutes in full": (draw_film(folder / "full.mp4", 60 * full_minutes, size), 1),
        }
        rows = {name: long_film(predictor, film, step, batch_size, folder / "out") for name, (film, step) in films.items()}
    ratio, rates = Spread(**found["film_over_images"]), found["frames_per_second"]
    said = (
        f"{found['frames']} frames of {size[0]} x {size[1]} in batches of {batch_size}: "
        f"{rates['film']['median']:.1f} frames/s as a film, {rates['images']['median']:.1f} as images in memory, "
        f"{ratio.median:.2f} ({ratio.q1:.2f} to {ratio.q3:.2f}) times as fast"
    )
    table = "\n".join([HEADER, "|---|---|---|---|---|---|---|", *(as_row(*row) for row in rows.items())])
    click.echo(f"{said}\n\n{table}")
    if output:
        given = [f"--minutes {minutes:g} --full-minutes {full_minutes:g} --every {every} --size {size[0]} {size[1]}"]
        given += [f"--batch-size {batch_size} --rounds {rounds} --threads {threads}"]
        about = about_run(" ".join(["films.py CHECKPOINT", *given]), threads, busy, load_average)
        paths = write_record(output, "films", about, {"speed": found, "films": rows}, ["Films", said + ".", table])
        click.echo(f"written: {', '.join(map(str, paths))}")


if __name__ == "__main__":
    main(prog_name="benchmarks/films.py")
