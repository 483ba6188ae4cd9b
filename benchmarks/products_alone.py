#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""The share of inference that its products and convolutions take alone: ``python benchmarks/products_alone.py``.

One forward is watched, and every convolution, linear layer, matrix product and attention in it is noted with its shapes. Then
each distinct one is timed by itself on drawn numbers, in every way that there is, in the same rounds as the whole inference. The
time of a kind is that of its fastest way, times how often it occurs. What the whole takes beyond the sum is everything else:
norms, activations, sums, sampling, and copies between layouts. Alone, an operation finds its inputs in the cache if they fit, so
the sum is a limit and not a target.
"""

import os
import statistics
import sys
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from benchmarks.threads import thread_environment
from cpvt_det.cli import common_options, report_errors

DETECTORS = ("DETR", "Deformable-DETR")
WHOLE = "whole"


def measure(detector: str, plan: Any, threads: int) -> dict[str, Any]:
    """The record of a detector: seconds of the whole, of the sum of its kinds, their share, and a row for each kind."""
    import torch

    from benchmarks.clocks import clock_of, fixed_threads
    from benchmarks.harness import Contender, Spread, Work, run_rounds
    from benchmarks.models import our_model
    from benchmarks.products import Kind, watched, ways_of
    from benchmarks.suites.model import PASSES, make_contender, make_inputs, shapes

    (shape,) = (one for one in shapes("default", "cpu") if (one.recipe.detector, one.passes) == (detector, PASSES[0]))
    with fixed_threads(threads), torch.no_grad():
        whole = make_contender(shape, *make_inputs(shape, "cpu"), WHOLE, our_model(shape.recipe))
        counts = watched(whole.call)
        ways = {(kind, way): call for kind in counts for way, call in ways_of(kind).items()}
        contenders = [Contender(f"{kind}: {way}", call) for (kind, way), call in ways.items()]
        samples = run_rounds(Work([whole, *contenders]), plan, clock_of("cpu"))[1]
    # As in the suites: with one thread CPU time, in which the load of other processes does not count.
    seconds = {name: [one.cpu if threads == 1 else one.wall for one in own] for name, own in samples.items()}
    best: dict[Kind, tuple[float, str]] = {}
    for kind, way in ways:
        best[kind] = min(best.get(kind, (float("inf"), "")), (statistics.median(seconds[f"{kind}: {way}"]), way))
    alone = [sum(counts[k] * seconds[f"{k}: {way}"][n] for k, (_, way) in best.items()) for n in range(len(seconds[WHOLE]))]
    took = statistics.median(seconds[WHOLE])
    rows = [{"kind": str(k), "times": counts[k], "way": way, "seconds": counts[k] * one} for k, (one, way) in best.items()]
    return {
        "case": shape.name,
        "rounds": len(alone),
        "whole": took,
        "alone": statistics.median(alone),
        "share": vars(Spread.of([part / whole for part, whole in zip(alone, seconds[WHOLE], strict=True)])),
        "rows": sorted(rows, key=lambda row: -row["seconds"]),
    }


def as_text(record: dict[str, Any], top: int | None = None) -> str:
    """A sentence, and a Markdown table of the kinds that take longest."""
    share, whole = record["share"], record["whole"]
    lines = [
        f"{record['case']}: products and convolutions alone take {1e3 * record['alone']:.0f} of {1e3 * whole:.0f} ms, "
        f"{share['median']:.0%} ({share['q1']:.0%}-{share['q3']:.0%}), {record['rounds']} rounds.",
        "",
        "| operation | times | fastest way | ms | of the whole |",
        "|---|---|---|---|---|",
    ]
    for row in record["rows"][:top]:
        cells = (row["kind"], row["times"], row["way"], f"{1e3 * row['seconds']:.2f}", f"{row['seconds'] / whole:.1%}")
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--detector", "detectors", multiple=True, type=click.Choice(DETECTORS), help="[default: both]")
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=7, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for a JSON and a table.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(detectors: tuple[str, ...], threads: int, rounds: int, output: Path | None, busy: bool) -> None:
    """Print how much of our inference the products and convolutions would take, each alone and in its fastest way."""
    load_average = check_load(busy)
    os.environ.update(thread_environment(threads))
    from benchmarks.harness import Plan
    from benchmarks.records import about_run, write_record

    words = [f"products_alone.py --threads {threads} --rounds {rounds}", *(f"--detector {name}" for name in detectors)]
    about = about_run(" ".join(words), threads, busy, load_average)
    plan = Plan(rounds=rounds, most_rounds=rounds, sample_seconds=0.02)
    records = [measure(detector, plan, threads) for detector in detectors or DETECTORS]
    for record in records:
        click.echo(as_text(record, top=15) + "\n")
    if output:
        parts = ["Products and convolutions alone, and the whole inference", *map(as_text, records)]
        click.echo(f"written: {', '.join(map(str, write_record(output, 'products_alone', about, {'cases': records}, parts)))}")


if __name__ == "__main__":
    main(prog_name="benchmarks/products_alone.py")
