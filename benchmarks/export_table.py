# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det export`` on models of random weights, as one table: python benchmarks/export_table.py [--r50]

Norms have drawn statistics and class heads large weights, so that scores differ from query to query.
"""

import argparse
import tempfile
from pathlib import Path

import torch
from click.testing import CliRunner
from tabulate import tabulate
from torch import nn

from cpvt_det import build
from cpvt_det.checkpoint.files import write_checkpoint
from cpvt_det.cli import main
from cpvt_det.config import load_cfg

ENCODINGS = {"DETR": ("none", "sine", "learned", "peg"), "Deformable-DETR": ("none", "sine_offset", "learned", "peg")}
SMALL = {"DETR": "quickstart/detr_peg.yaml", "Deformable-DETR": "quickstart/deformable_peg.yaml"}
R50 = {"DETR": "coco/detr_r50_peg_50ep.yaml", "Deformable-DETR": "coco/deformable_detr_r50_official_two_stage_50ep.yaml"}
CLASSES = 5
HEADER = ("model", "encoding", "format", "images x height x width", "boxes", "scores", "seconds, model", "exported")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--r50", action="store_true", help="Models of R50, with one encoding each, instead of the quickstart's.")
    parser.add_argument("--formats", nargs="+", default=["torch_export", "onnx"])
    parser.add_argument("--words", nargs="*", default=[], help="More of cpvt-det export, as in --words=--half.")
    return parser.parse_args()


def write_random(config: str, encoding: str | None, path: Path) -> None:
    """A checkpoint of a model that was never trained."""
    torch.manual_seed(0)
    words = ["MODEL.NUM_CLASSES", str(CLASSES), "MODEL.DEVICE", "cpu"]
    cfg = load_cfg(config, words + (["MODEL.POSITION.NAME", encoding] if encoding else []))
    detector = build.build_detector(cfg)
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
    output = str(path.with_suffix(".exported"))
    result = CliRunner().invoke(main, ["export", str(path), "--format", format, "--output", output, *words])
    lines = [line for line in result.output.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]] or [[result.output.strip()]]


def run() -> None:
    """Print the table."""
    arguments = parse()
    torch.set_num_threads(1)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.pth"
        for model, config in (R50 if arguments.r50 else SMALL).items():
            for encoding in (None,) if arguments.r50 else ENCODINGS[model]:
                write_random(config, encoding, path)
                for format in arguments.formats:
                    for cells in export(path, format, arguments.words):
                        rows.append([model, encoding or Path(config).stem, format, *cells])
                        print(rows[-1], flush=True)
    print(tabulate(rows, HEADER, tablefmt="github", disable_numparse=True))


if __name__ == "__main__":
    run()
