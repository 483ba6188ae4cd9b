#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""CPU time of a training step by operation: ``python benchmarks/profile_step.py``."""

import os
import sys
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.threads import thread_environment
from cpvt_det.cli import common_options, report_errors


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--threads", type=click.IntRange(min=1), default=1, show_default=True)
@click.option("--bf16", is_flag=True, help="Use autocast to bfloat16.")
@click.option("--top", type=click.IntRange(min=1), default=10, show_default=True, help="Operations per table.")
@common_options
@report_errors
def main(threads: int, bf16: bool, top: int) -> None:
    """Print the operations that take most of a training step's time, for DETR-R50, Deformable-DETR-R50 and DINO-R50 with PEG."""
    os.environ.update(thread_environment(threads))
    import torch

    from benchmarks.suites.model import shapes

    torch.set_num_threads(threads)
    for shape in shapes("default", "cpu"):
        if shape.passes == "training step":
            click.echo(_profile(shape, bf16, top))


def _profile(shape, bf16: bool, top: int) -> str:
    """A Markdown table of one step, after a step that is not counted and one whose CPU time is printed; shares are of wall time."""
    from torch.profiler import ProfilerActivity, profile

    from benchmarks.clocks import ProcessClock
    from benchmarks.models import our_model
    from benchmarks.suites.model import make_contender, make_inputs

    inputs = make_inputs(shape, "cpu")
    step = make_contender(shape, *inputs, "step", our_model(shape.recipe, "cpu", "peg"), bf16=bf16)
    step.call()
    cpu = ProcessClock().time(step.call, 1).cpu
    with profile(activities=[ProfilerActivity.CPU]) as recorded:
        step.call()
    events = sorted(recorded.key_averages(), key=lambda event: event.self_cpu_time_total, reverse=True)
    total = sum(event.self_cpu_time_total for event in events)
    lines = [f"{shape.name}{', bf16' if bf16 else ''}: {1e3 * cpu:.0f} ms of CPU time", ""]
    lines += ["| operation | calls | share |", "|---|---|---|"]
    lines += [f"| {event.key} | {event.count} | {event.self_cpu_time_total / total:.1%} |" for event in events[:top]]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main(prog_name="benchmarks/profile_step.py")
