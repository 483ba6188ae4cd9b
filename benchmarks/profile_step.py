#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""CPU time of a training step by operation, of batches without padding and with it: ``python benchmarks/profile_step.py``."""

import os
import sys
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from benchmarks.threads import thread_environment
from cpvt_det.cli import common_options, report_errors


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--bf16", is_flag=True, help="Use autocast to bfloat16.")
@click.option("--top", type=click.IntRange(min=1), default=12, show_default=True, help="Operations per table.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for a JSON and a table.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@common_options
@report_errors
def main(threads: int, bf16: bool, top: int, output: Path | None, busy: bool) -> None:
    """Print the operations that take most of a training step's time, for DETR-R50, Deformable-DETR-R50 and DINO-R50 with PEG."""
    load_average = check_load(busy)
    os.environ.update(thread_environment(threads))
    import torch

    from benchmarks.records import about_run, write_record
    from benchmarks.suites.model import MUCH, padded_shapes, shapes

    torch.set_num_threads(threads)
    cases = [shape for shape in [*shapes("default", "cpu"), *padded_shapes("default")] if shape.padding < MUCH]
    records = [profile(shape, bf16) for shape in cases if shape.passes == "training step"]
    tables = [as_text(record, top) for record in records]
    click.echo("\n\n".join(tables))
    if output:
        words = [f"profile_step.py --threads {threads} --top {top}", *["--bf16"] * bf16]
        parts = ["Where a training step's time goes", "Ours with PEG, as it ships.", *tables]
        write_record(output, "profile", about_run(" ".join(words), threads, busy, load_average), {"cases": records}, parts)


def profile(shape: Any, bf16: bool) -> dict[str, Any]:
    """CPU seconds of a step, after one that is not counted, and the calls and shares of the operations of another one.

    Shares are of the time in all operations, and the largest come first.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiled

    from benchmarks.clocks import ProcessClock
    from benchmarks.models import our_model
    from benchmarks.suites.model import make_contender, make_inputs

    inputs = make_inputs(shape, "cpu")
    step = make_contender(shape, *inputs, "step", our_model(shape.recipe, "cpu", "peg"), bf16=bf16)
    step.call()
    cpu = ProcessClock().time(step.call, 1).cpu
    with profiled(activities=[ProfilerActivity.CPU]) as recorded:
        step.call()
    events = sorted(recorded.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    total = sum(event.self_cpu_time_total for event in events)
    rows = [{"operation": one.key, "calls": one.count, "share": one.self_cpu_time_total / total} for one in events]
    return {"case": f"{shape.name}{', bf16' * bf16}", "cpu_seconds": cpu, "rows": rows}


def as_text(record: dict[str, Any], top: int) -> str:
    """A line with the CPU time, and a Markdown table of the operations that take longest."""
    lines = [f"**{record['case']}: {1e3 * record['cpu_seconds']:.0f} ms of CPU time**", ""]
    lines += ["| operation | calls | share |", "|---|---|---|"]
    return "\n".join(lines + [f"| {row['operation']} | {row['calls']} | {row['share']:.1%} |" for row in record["rows"][:top]])


if __name__ == "__main__":
    main(prog_name="benchmarks/profile_step.py")
