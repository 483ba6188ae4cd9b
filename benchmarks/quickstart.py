#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""AP of the quickstart as it trains, with each encoding and in bf16: ``python benchmarks/quickstart.py``.

Every run is ``cpvt-det train`` in a process of one thread; a run that is done is not repeated.
"""

import json
import os
import resource
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # the folder is no part of the installed package

from benchmarks.threads import thread_environment
from cpvt_det.cli import debug_option, told_in_one_line

ROOT = Path(__file__).resolve().parent.parent
ENCODINGS = ("peg", "sine_offset", "sine_offset+peg", "learned", "none")
PERIOD = 500  # iterations between evaluations
FILE = "quickstart_cpu"


@dataclass(frozen=True)
class Run:
    """One training of ``configs/quickstart/deformable_peg.yaml``, but for this.

    Args:
        encoding: of the encoder.
        seed: of weights and data order.
        bf16: train under autocast.
    """

    encoding: str
    seed: int
    bf16: bool = False

    @property
    def label(self) -> str:
        return self.encoding + (" bf16" if self.bf16 else "")


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("output/benchmarks"), show_default=True)
@click.option("--seeds", type=click.IntRange(min=1), default=3, show_default=True, help="Of each encoding, and of PEG in bf16.")
@click.option("--report-only", is_flag=True, help="Of the runs that are done.")
@debug_option
@told_in_one_line
def main(output: Path, seeds: int, report_only: bool) -> None:
    """Train the quickstart with every encoding; write a table, JSON and the curves."""
    kinds = [("peg", False), ("peg", True), *((encoding, False) for encoding in ENCODINGS[1:])]
    runs = [Run(encoding, seed, bf16) for encoding, bf16 in kinds for seed in range(seeds)]
    found = []
    for run in runs:
        path = output / "quickstart" / f"{run.label.replace(' ', '_')}_{run.seed}" / "benchmark.json"
        if not path.exists() and not report_only:
            train(run, path)
        if path.exists():
            found.append({**asdict(run), "label": run.label, **json.loads(path.read_text(encoding="utf-8"))})
    (output / f"{FILE}.json").write_text(json.dumps(found, indent=1), encoding="utf-8")
    (output / f"{FILE}.md").write_text(table(found), encoding="utf-8")
    draw(found, output / f"{FILE}.png")
    click.echo(table(found))


def train(run: Run, path: Path) -> None:
    """Train and evaluate; ``path`` holds CPU seconds of the whole process and AP by iteration.

    Raises:
        RuntimeError: the run failed; with its last line.
    """
    words = ["MODEL.POSITION.NAME", run.encoding, "SEED", run.seed, "SOLVER.AMP.ENABLED", run.bf16]
    words += ["TEST.EVAL_PERIOD", PERIOD, "TEST.PICTURES", 0, "SOLVER.CHECKPOINT_PERIOD", 5000, "OUTPUT_DIR", path.parent]
    command = [sys.executable, "-m", "cpvt_det", "train", "--config-file", "quickstart/deformable_peg.yaml", "--runner", "builtin"]
    before = _cpu_seconds()
    environment = os.environ | thread_environment(1)
    done = subprocess.run(
        [*command, *map(str, words)], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(f"{run.label}, seed {run.seed}: {done.stderr.strip().splitlines()[-1]}")
    seconds = _cpu_seconds() - before
    lines = [json.loads(line) for line in (path.parent / "metrics.json").read_text(encoding="utf-8").splitlines()]
    curve = {line["iteration"] + 1: line["bbox/AP"] for line in lines if "bbox/AP" in line}
    results = json.loads((path.parent / "results.json").read_text(encoding="utf-8"))["bbox"]
    path.write_text(
        json.dumps({"cpu_seconds": seconds, "AP": results["AP"], "AP50": results["AP50"], "curve": curve}), encoding="utf-8"
    )


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def by_label(rows: list[dict]) -> dict[str, list[dict]]:
    return {label: [row for row in rows if row["label"] == label] for label in dict.fromkeys(row["label"] for row in rows)}


def table(rows: list[dict]) -> str:
    """Markdown: a row for each encoding, mean and single values of its seeds; then AP by iteration."""
    from tabulate import tabulate

    from benchmarks.machine import machine, versions

    told = "; ".join(f"{name} {value}" for name, value in {**machine("cpu"), **versions()}.items())
    body, curves = [], []
    for label, group in by_label(rows).items():
        aps = [row["AP"] for row in group]
        each = ", ".join(f"{ap:.1f}" for ap in aps)
        seconds = statistics.median(row["cpu_seconds"] for row in group)
        body.append(
            [label, f"{statistics.mean(aps):.1f}", each, f"{statistics.mean(row['AP50'] for row in group):.1f}", f"{seconds:.0f}"]
        )
        curves.append([label, *(f"{statistics.mean(row['curve'][at] for row in group):.1f}" for at in group[0]["curve"])])
    head = ["encoding", "AP, mean", "AP by seed", "AP50, mean", "CPU s, median"]
    parts = ["# The quickstart by encoding, cpu, 1 thread a run", "`python benchmarks/quickstart.py`", told]
    parts += [tabulate(body, head, tablefmt="pipe")]
    parts += [
        "CPU seconds are of runs one after the other: between them they tell more of the machine's other work than of the encoding."
    ]
    parts += ["## AP by iteration, mean over seeds"]
    parts += [tabulate(curves, ["encoding", *(rows[0]["curve"] if rows else ())], tablefmt="pipe")]
    return "\n\n".join(parts) + "\n"


def draw(rows: list[dict], path: Path) -> None:
    """AP by iteration: the mean of the seeds, their range as a band. A step costs the same with all (suite ``model``)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5))
    for label, group in by_label(rows).items():
        steps = list(group[0]["curve"])
        x = [int(at) for at in steps]
        values = [[row["curve"][at] for row in group] for at in steps]
        (line,) = axis.plot(x, [statistics.mean(v) for v in values], "--" if "bf16" in label else "-", marker=".", label=label)
        axis.fill_between(x, [min(v) for v in values], [max(v) for v in values], color=line.get_color(), alpha=0.15)
    axis.set(xlabel="iteration", ylabel="AP", title="make quickstart, by encoding")
    axis.grid(True, alpha=0.3)
    axis.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


if __name__ == "__main__":
    main(prog_name="benchmarks/quickstart.py")
