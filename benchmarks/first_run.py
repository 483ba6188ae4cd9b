#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Peak memory of a user's first run: ``python benchmarks/first_run.py FOLDER`` trains from a folder in a process of its own."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.machine import machine, versions
from benchmarks.origin import commit_of
from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.errors import RunStoppedError
from cpvt_det.data import read_folder

ROOT = Path(__file__).resolve().parent.parent


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(path_type=Path, exists=True, file_okay=False))
@click.option("--budget", default="60s", show_default=True, help="Budget of the run, as of cpvt-det train.")
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for first_run_memory.json.")
@common_options
@report_errors
def main(folder: Path, budget: str, output: Path | None) -> None:
    """Train from FOLDER as ``cpvt-det train FOLDER`` does, and print the largest memory of its process."""
    before = machine("cpu")
    sizes = [(record.width, record.height) for split in read_folder(folder) for record in split.records]
    command = [sys.executable, "-m", "cpvt_det", "train", str(folder.resolve()), "--budget", budget]
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as place:
        child = subprocess.Popen(command, cwd=place, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
    if os.waitstatus_to_exitcode(status):
        raise RunStoppedError(f"the run ended with exit code {os.waitstatus_to_exitcode(status)}")
    record = {
        "command": f"python benchmarks/first_run.py FOLDER --budget {budget}",
        "images": len(sizes),
        "largest_image": max(sizes, key=lambda size: size[0] * size[1]),
        "peak_gb": round(usage.ru_maxrss / 2**20, 3),  # the process alone, without data workers
        "seconds": round(time.perf_counter() - start),
        "commit": commit_of(ROOT, short=True),
        "machine": before,
        "versions": versions(),
    }
    click.echo(f"{record['peak_gb']} GB in {record['seconds']} s, {record['images']} images")
    if output is not None:
        output.mkdir(parents=True, exist_ok=True)
        (output / "first_run_memory.json").write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
