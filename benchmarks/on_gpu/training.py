# SPDX-License-Identifier: Apache-2.0
"""``cpvt-det train FOLDER`` on photographs, in a budget of seconds, and the AP50 on the validation images."""

import json
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.on_gpu import Record, Settings, draw_shapes, say
from benchmarks.peers import ROOT
from benchmarks.small_data import outcome

SHARE, MOST = 0.6, 120.0
"""Budget: share of the seconds that are left, and the most. Before it come the start and the choice, behind it an evaluation."""
SPARE = 6.0  # seconds to write what there is
TINY = {"MODEL.BACKBONE.NAME": "resnet10", "MODEL.DETR.HIDDEN_DIM": 32, "MODEL.DETR.ENC_LAYERS": 1, "MODEL.DETR.DEC_LAYERS": 1}
TINY |= {"MODEL.BACKBONE.WEIGHTS": "", "SOLVER.EPOCHS": 0, "SOLVER.MAX_ITER": 2, "SOLVER.IMS_PER_BATCH": 2}
TINY |= {"INPUT.MIN_SIZE_TRAIN": "(64,)", "INPUT.MAX_SIZE_TRAIN": 96, "INPUT.MIN_SIZE_TEST": 64, "INPUT.MAX_SIZE_TEST": 96}


def run(record: Record, settings: Settings) -> None:
    if settings.rehearse:
        with tempfile.TemporaryDirectory() as place:
            record.part("training", partial(train, draw_shapes(Path(place) / "shapes"), settings))
    elif not settings.photos:
        record.leave_out("training", "no folder of photographs given: --photos FOLDER")
    else:
        record.part("training", partial(train, Path(settings.photos).resolve(), settings))


def train(folder: Path, settings: Settings) -> dict[str, Any]:
    """The outcome as of ``benchmarks/small_data.py``; of a run that is cut, the curve until then and the end of what it printed."""
    seconds = round(min(MOST, SHARE * settings.seconds_left))
    words = [str(word) for pair in TINY.items() for word in pair] if settings.rehearse else []
    with tempfile.TemporaryDirectory() as place, Path(place, "printed.txt").open("w+") as printed:
        output = Path(place) / "run"
        command = [sys.executable, "-W", "ignore", "-m", "cpvt_det", "train", str(folder), "--budget", f"{seconds}s"]
        command += ["OUTPUT_DIR", str(output), "SEED", "0", "MODEL.DEVICE", settings.device, *words]
        process = subprocess.Popen(command, cwd=ROOT, stdout=printed, stderr=subprocess.STDOUT)
        try:
            code: int | None = process.wait(max(1.0, settings.seconds_left - SPARE))
        except subprocess.TimeoutExpired:
            code = None
            process.kill()
            process.wait()
        printed.seek(0)
        found = {"budget_seconds": seconds, "exit_code": code, **({"printed": printed.read()[-2000:]} if code else {})}
        for name, read in (("outcome", outcome), ("curve", _curve), ("results", _results)):
            try:
                found[name] = read(output)
            except Exception as error:  # a run that is cut has not everything
                found[name] = f"{type(error).__name__}: {error}"[:300]
    best = found["outcome"]
    reached = f"AP {best['AP']:.1f}, AP50 {best['AP50']:.1f}, {best['iterations']} steps" if isinstance(best, dict) else best
    say(f"training: exit code {code}, budget {seconds} s: {reached}")
    return found


def _curve(output: Path) -> dict[int, float]:
    """AP50 by the number of steps."""
    rows = [json.loads(line) for line in (output / "metrics.json").read_text(encoding="utf-8").splitlines()]
    return {row["iteration"] + 1: row["bbox/AP50"] for row in rows if "bbox/AP50" in row}


def _results(output: Path) -> Any:
    return json.loads((output / "results.json").read_text(encoding="utf-8"))
