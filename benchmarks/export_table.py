#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det export`` of models with random weights, as one table: ``python benchmarks/export_table.py``.

Norms have random statistics and class heads large weights, so that scores differ between queries.
"""

import json
import sys
import tempfile
from pathlib import Path

import click
import torch
from click.testing import CliRunner
from tabulate import tabulate
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from benchmarks.load import check_load
from benchmarks.records import about_run
from cpvt_det import builders
from cpvt_det.checkpoint.files import write_checkpoint
from cpvt_det.cli import common_options, report_errors
from cpvt_det.cli import main as cpvt_det
from cpvt_det.config import load_cfg
from cpvt_det.export.program import FORMATS

ENCODINGS = {"DETR": ("none", "sine", "learned", "peg"), "Deformable-DETR": ("none", "sine_offset", "learned", "peg")}
SMALL = {"DETR": "quickstart/detr_peg.yaml", "Deformable-DETR": "quickstart/deformable_peg.yaml"}
R50 = {"DETR": "coco/detr_r50_peg_50ep.yaml", "Deformable-DETR": "coco/deformable_detr_r50_official_two_stage_50ep.yaml"}
CLASSES = 5
HEADER = ("model", "encoding", "format", "images x height x width", "boxes", "scores", "seconds, model", "exported")


def write_random(config: str, encoding: str | None, path: Path) -> None:
    """A checkpoint of a model that was never trained."""
    torch.manual_seed(0)
    words = ["MODEL.NUM_CLASSES", str(CLASSES), "MODEL.DEVICE", "cpu"]
    cfg = load_cfg(config, words + (["MODEL.POSITION.NAME", encoding] if encoding else []))
    detector = builders.build_detector(cfg)
    for name, value in detector.state_dict().items():
        if "running_mean" in name:
            nn.init.uniform_(value, -0.3, 0.3)
        elif "running_var" in name:
            nn.init.uniform_(value, 0.5, 1.5)
        elif "class_embed" in name and name.endswith("weight"):
            nn.init.normal_(value, std=0.2)
        elif not value.any() and value.is_floating_point():
            nn.init.uniform_(value, -0.1, 0.1)
    classes = {"ids": list(range(CLASSES)), "names": [f"class {n}" for n in range(CLASSES)]}
    write_checkpoint({"model": detector.state_dict(), "cpvt_det": {"classes": classes, "config": cfg.dump()}}, path)


def export(path: Path, format: str, words: list[str]) -> list[list[str]]:
    """The cells of the command's table."""
    output = str(path.with_suffix(".xml" if format == "openvino" else ".exported"))
    result = CliRunner().invoke(cpvt_det, ["export", str(path), "--format", format, "--output", output, *words])
    lines = [line for line in result.output.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]] or [[result.output.strip()]]


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--r50", is_flag=True, help="Export R50 models, one per encoding, instead of the quickstart's models.")
@click.option("--format", "formats", multiple=True, type=click.Choice(FORMATS), default=FORMATS, show_default=True)
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), help="Folder for a JSON with the table.")
@click.option("--busy", is_flag=True, help="Measure although the machine has other work; the record shows it.")
@click.argument("words", nargs=-1)
@common_options
@report_errors
def main(r50: bool, formats: tuple[str, ...], output: Path | None, busy: bool, words: tuple[str, ...]) -> None:
    """Print the table; WORDS go to cpvt-det export, after two dashes: -- --half."""
    load_average = check_load(busy)
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        for model, config in (R50 if r50 else SMALL).items():
            for encoding in (None,) if r50 else ENCODINGS[model]:
                write_random(config, encoding, path)
                for format in formats:
                    for cells in export(path, format, list(words)):
                        rows.append([model, encoding or Path(config).stem, format, *cells])
                        click.echo(rows[-1], err=True)
    click.echo(tabulate(rows, HEADER, tablefmt="github", disable_numparse=True))
    if output:
        chosen = [*["--r50"] * r50, *(f"--format {name}" for name in formats), *(["--", *words] if words else [])]
        record = {**about_run(" ".join(["export_table.py", *chosen]), 1, busy, load_average), "head": HEADER, "rows": rows}
        output.mkdir(parents=True, exist_ok=True)
        path = output / f"exported_cpu{'_r50' * r50}.json"
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        click.echo(f"written: {path}")


if __name__ == "__main__":
    main(prog_name="benchmarks/export_table.py")
