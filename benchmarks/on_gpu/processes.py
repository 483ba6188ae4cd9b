# SPDX-License-Identifier: Apache-2.0
"""Runs of a process group on one GPU: resumed under NCCL, and with two processes under gloo of which one is killed.

``python -m benchmarks.on_gpu.processes train WORDS`` is a process of one of these runs.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.on_gpu import Record, Settings, draw_shapes, say
from benchmarks.peers import ROOT

STEPS, PERIOD = 6, 3
CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}  # so that its products repeat bit for bit
PATIENCE = 45.0  # seconds in which a run whose process was killed has to end
MODEL = {
    "MODEL.META_ARCHITECTURE": "CPVTDeformableDetr",
    "MODEL.DETECTOR.NUM_LEVELS": 2,
    "MODEL.CRITERION.CLASSIFICATION.NAME": "focal",
    "MODEL.BACKBONE.NAME": "resnet10",
    "MODEL.BACKBONE.NORM": "BN",
    "MODEL.BACKBONE.FREEZE_AT": 0,
    "MODEL.DETR.HIDDEN_DIM": 32,
    "MODEL.DETR.NHEADS": 2,
    "MODEL.DETR.DIM_FEEDFORWARD": 32,
    "MODEL.DETR.ENC_LAYERS": 1,
    "MODEL.DETR.DEC_LAYERS": 2,
    "MODEL.DETR.NUM_OBJECT_QUERIES": 6,
    "INPUT.MIN_SIZE_TRAIN": "(64, 80)",
    "INPUT.MAX_SIZE_TRAIN": 96,
    "INPUT.RESIZE_CROP.ENABLED": False,
    "DATALOADER.NUM_WORKERS": 0,
    "SEED": 11,
    "SOLVER.EPOCHS": 0,
    "SOLVER.IMS_PER_BATCH": 2,
    "SOLVER.CHECKPOINT_PERIOD": PERIOD,
    "SOLVER.LOG_PERIOD": 1,
}
"""The smallest run: the attention with Triton's kernels, dropout, running statistics."""


def run(record: Record, settings: Settings) -> None:
    with tempfile.TemporaryDirectory() as place:
        images: list[Path] = []
        record.part("images", partial(_keep, images, Path(place)))
        if images:
            record.part("resumed", partial(resume, Path(place), images[0], settings))
            record.part("one of two processes killed", partial(kill_one, Path(place), images[0], settings))


def _keep(images: list[Path], place: Path) -> str:
    images.append(draw_shapes(place / "shapes"))
    return "drawn shapes"


def words_of(output: Path, images: Path, settings: Settings, **more: object) -> list[str]:
    """The words of ``cpvt-det train`` on the drawn images."""
    register = [["drawn", str(images / "annotations/train.json"), str(images / "train")]]
    pairs = {**MODEL, "DATASETS.REGISTER": register, "DATASETS.TRAIN": "('drawn',)", "DATASETS.TEST": "()", "OUTPUT_DIR": output}
    pairs |= {"MODEL.DEVICE": "cuda:0" if settings.device == "cuda" else "cpu"}
    pairs |= {key.replace("__", "."): value for key, value in more.items()}
    config = images / "empty.yaml"
    config.write_text("VERSION: 2\n", encoding="utf-8")
    return ["train", "--config-file", str(config), "--runner", "builtin", *(str(word) for pair in pairs.items() for word in pair)]


def group_of_one() -> dict[str, str]:
    """The variables that torchrun sets for a group of one process, which saves the start of torchrun itself."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    group = {"TORCHELASTIC_RUN_ID": "one", "TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
    group |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "0"}
    return {**_environment(), **group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def resume(place: Path, images: Path, settings: Settings) -> dict[str, Any]:
    """A run of one process in a group, and one that continues from its first checkpoint: losses and weights have to be equal."""
    import torch

    whole, cut = place / "whole", place / "cut"
    words = words_of(whole, images, settings, SOLVER__MAX_ITER=STEPS)
    found: dict[str, Any] = {"backend": "cpu:gloo,cuda:nccl" if settings.device == "cuda" else "gloo"}
    found["first"] = _run(words, settings)
    kept = f"model_{PERIOD - 1:07d}.pth"
    cut.mkdir()
    for name in (kept, "run_id", "config.yaml"):
        if (whole / name).exists():
            shutil.copy(whole / name, cut / name)
    (cut / "last_checkpoint").write_text(kept, encoding="utf-8")
    words = words_of(cut, images, settings, SOLVER__MAX_ITER=STEPS)
    found["second"] = _run([words[0], "--resume", *words[1:]], settings)
    losses = [_losses(folder, from_step=PERIOD) for folder in (whole, cut)]
    states = [torch.load(folder / "model_final.pth", weights_only=True, map_location="cpu")["model"] for folder in (whole, cut)]
    gaps = [(one.double() - states[1][name].double()).abs().max().item() for name, one in states[0].items() if one.numel()]
    found |= {"losses": losses, "equal_losses": losses[0] == losses[1], "largest_difference_of_weights": max(gaps)}
    say(f"resumed: losses {'equal' if found['equal_losses'] else losses}, weights differ by at most {max(gaps):.2g}")
    return found


def kill_one(place: Path, images: Path, settings: Settings) -> dict[str, Any]:
    """Two processes, of which the second is killed after some steps: seconds until the run ends, its exit code and its message."""
    output, printed = place / "killed", place / "printed.txt"
    words = words_of(output, images, settings, SOLVER__MAX_ITER=100_000, SOLVER__CHECKPOINT_PERIOD=100_000)
    command = [sys.executable, "-W", "ignore", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["-m", "benchmarks.on_gpu.processes", *words]
    with printed.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env=_environment())
    try:
        began = time.monotonic()
        while len(_losses(output)) < 3 and process.poll() is None:
            if time.monotonic() - began > min(90.0, settings.seconds_left - PATIENCE / 2):
                raise TimeoutError(f"no steps: {printed.read_text(errors='replace')[-1500:]}")
            time.sleep(0.2)
        if process.poll() is not None:
            raise RuntimeError(f"ended by itself: {printed.read_text(errors='replace')[-1500:]}")
        steps = len(_losses(output))
        victim = int((place / "pid1").read_text())
        os.kill(victim, signal.SIGKILL)
        start = time.monotonic()
        try:
            code: int | None = process.wait(max(5.0, min(PATIENCE, settings.seconds_left - 4)))
        except subprocess.TimeoutExpired:
            code = None
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
    text = printed.read_text(errors="replace")
    found = {"steps": steps, "hangs": code is None, "exit_code": code, "seconds": round(time.monotonic() - start, 1)}
    found |= {"named": f"SIGKILL) received by PID {victim}" in text, "printed": _last_words(text)}
    how = "HANGS" if code is None else f"ended after {found['seconds']} s, exit code {code}, named: {found['named']}"
    say(f"one of two killed after {steps} steps: {how}")
    return found


def _run(words: list[str], settings: Settings) -> dict[str, Any]:
    """Seconds of ``cpvt-det WORDS`` in a group of one process.

    Raises:
        RuntimeError: an exit code other than 0.
    """
    start = time.monotonic()
    limit = max(5.0, settings.seconds_left - 3)
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.on_gpu.processes", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit, env=group_of_one(), check=False)
    if done.returncode:
        raise RuntimeError(f"exit code {done.returncode}: {(done.stdout + done.stderr)[-1800:]}")
    return {"exit_code": 0, "seconds": round(time.monotonic() - start, 1)}


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1", **dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo"), **CUBLAS}


def _last_words(text: str) -> list[str]:
    """What names the end of a run, without the name of the host."""
    lines = [
        line for line in text.replace("\r", "\n").splitlines() if "stopped:" in line or "exitcode" in line or "SIGKILL" in line
    ]
    return [re.sub(r" on \S+\)", ")", line).strip() for line in lines][-8:]


def _losses(output: Path, from_step: int = 0) -> list[float]:
    """Total losses by step, of a file that may be written at the moment."""
    if not (output / "metrics.json").exists():
        return []
    found = []
    for line in (output / "metrics.json").read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "total_loss" in row and row["iteration"] >= from_step:
            found.append(row["total_loss"])
    return found


def main() -> None:
    """``cpvt-det`` with deterministic algorithms; in one of several processes, which share a GPU, with gloo for all tensors."""
    import torch
    import torch.distributed as dist

    from cpvt_det.cli import main as cpvt_det

    torch.use_deterministic_algorithms(True, warn_only=True)
    if os.environ["WORLD_SIZE"] != "1":
        begin = dist.init_process_group
        dist.init_process_group = lambda backend, *args, **options: begin("gloo", *args, **options)
    output = Path(sys.argv[sys.argv.index("OUTPUT_DIR") + 1])
    (output.parent / f"pid{os.environ['RANK']}").write_text(str(os.getpid()), encoding="utf-8")
    cpvt_det()


if __name__ == "__main__":
    main()
