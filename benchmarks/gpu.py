#!/usr/bin/env python
# SPDX-License-Identifier: Apache-2.0
"""Everything that a GPU has to show, in one command: ``python benchmarks/gpu.py --output DIR``."""

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # this folder is not part of the installed package

from cpvt_det.cli import common_options, report_errors
from cpvt_det.common.errors import BadInputError, UnknownNameError

ROOT = Path(__file__).resolve().parent.parent
STEPS = {
    "correctness": 90,
    "deformable_op": 90,
    "whole_models": 150,
    "loader": 25,
    "training": 175,
    "processes": 60,
}
"""Steps in the order of their worth, and the seconds of each; of fewer steps, each gets more."""
NEED_OP = ("deformable_op", "whole_models")
REHEARSAL = 170  # the most seconds of a step
FOR_BUILD = 45.0  # seconds that the first step with the official op waits for its compiler, which has worked beside earlier steps
TAIL = 2500  # characters of errors that the summary keeps


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--output", type=click.Path(path_type=Path, file_okay=False), default=Path("output/gpu"), show_default=True)
@click.option("--steps", default=",".join(STEPS), show_default=True, help="Steps to run, by names with commas.")
@click.option("--peer", "peers", multiple=True, metavar="NAME=PATH", help="Checkout of a peer, as of run.py; repeat for more.")
@click.option("--photos", type=click.Path(path_type=Path), help="Folder to train on.")
@click.option("--seconds", type=click.IntRange(min=20), default=540, show_default=True, help="The most seconds of all steps.")
@click.option("--commit", default="", help="Commit of this tree, where git does not know it.")
@click.option("--more", is_flag=True, help="More sizes, and float32; then --seconds should be more, too.")
@click.option("--rehearse", is_flag=True, help="Run every line on the CPU, with tiny sizes.")
@common_options
@report_errors
def main(
    output: Path,
    steps: str,
    peers: tuple[str, ...],
    photos: Path | None,
    seconds: int,
    commit: str,
    more: bool,
    rehearse: bool,
) -> None:
    """Check and time everything on a GPU: kernels, models beside the peers' code, the loader, a training, several processes.

    Each step is a process of its own with a bound of time, and writes OUTPUT/STEP.json after each of its parts, so a run that is
    cut keeps what it has. summary.json tells how the steps ended. The official CUDA op is compiled from the checkout given by
    --peer deformable_detr=PATH while the first step runs, outside of the checkout.

    \b
    Example:
      python benchmarks/gpu.py --rehearse
      python benchmarks/gpu.py --peer deformable_detr=PATH --peer detr=PATH --peer dino=PATH --photos FOLDER
    """
    chosen = steps.split(",")
    for name in chosen:
        if name not in STEPS:
            raise UnknownNameError("step", name, STEPS)
    begin = time.time()
    os.environ["CPVT_DET_GPU_BEGIN"] = str(begin)
    settings = _settings(output, peers, photos, commit, more, rehearse, chosen)
    output.mkdir(parents=True, exist_ok=True)
    summary: dict[str, Any] = {"command": settings.command, "commit": commit, "steps": {}}
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        settings = replace(settings, built=str(Path(place) / "built"))
        build = None if rehearse or not set(chosen) & set(NEED_OP) else _start_build(settings)
        for number, name in enumerate(chosen):
            if name in NEED_OP:
                _wait_for_build(build, settings, summary)
            left = begin + seconds - time.time()
            share = STEPS[name] / sum(STEPS[one] for one in chosen[number:])  # what steps leave over is for those after them
            limit = min(REHEARSAL if rehearse else max(STEPS[name], share * left), left)
            if limit < 10:
                summary["steps"][name] = {"left_out": "no time was left"}
                _say(begin, f"{name}: left out, no time was left")
            else:
                summary["steps"][name] = _run_step(name, replace(settings, end=time.time() + limit - 2), limit, begin)
            summary["seconds"] = round(time.time() - begin, 1)
            (output / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")
        _end(build)
    _say(begin, f"written: {', '.join(sorted(path.name for path in output.glob('*.json')))}")
    bad = [name for name, step in summary["steps"].items() if step.get("exit_code") != 0]
    if bad:
        raise RuntimeError(f"steps that did not come to their end: {', '.join(bad)}; see summary.json")


def _settings(
    output: Path, peers: tuple[str, ...], photos: Path | None, commit: str, more: bool, rehearse: bool, chosen: list[str]
) -> Any:
    import torch

    from benchmarks.on_gpu import Settings
    from benchmarks.peers import find_peers

    if photos and not photos.is_dir():
        raise BadInputError(f"there is no folder {photos}")
    if not rehearse and not torch.cuda.is_available():
        raise BadInputError("torch finds no GPU; --rehearse runs every line on the CPU")
    words = ["python benchmarks/gpu.py --steps", ",".join(chosen)]
    words += [f"--peer {text.partition('=')[0]}=PATH" for text in peers]
    words += [*["--photos FOLDER"] * bool(photos), *["--more"] * more, *["--rehearse"] * rehearse]
    return Settings(
        device="cpu" if rehearse else "cuda",
        rehearse=rehearse,
        more=more or rehearse,
        peers={name: path and str(path) for name, path in find_peers(peers).items()},
        photos=str(photos.resolve()) if photos else "",
        commit=commit,
        command=" ".join(words),
        output=str(output.resolve()),
    )


def _run_step(name: str, settings: Any, limit: float, begin: float) -> dict[str, Any]:
    """Run one step as a group of processes, all of which are killed at the limit."""
    command = [sys.executable, "-u", "-W", "ignore", "-m", "benchmarks.on_gpu", name, json.dumps(asdict(settings))]
    environment = {**os.environ, "KINETO_LOG_LEVEL": "5", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"), settings.built)))
    if settings.rehearse:
        environment["CPVT_DET_WITHOUT"] = "all"  # the fast paths of a CPU, which a GPU does not take, and which compile for a while
        if name == "correctness":
            environment["TRITON_INTERPRET"] = "1"  # before Triton is imported
    _say(begin, f"{name}: at most {limit:.0f} s")
    start = time.time()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=errors, **_group())
        try:
            code: int | None = process.wait(limit)
        except subprocess.TimeoutExpired:
            code = None
        _end(process)
        errors.seek(0)
        told = errors.read()[-TAIL:]
    found = {"exit_code": code, "timed_out": code is None, "limit": round(limit), "seconds": round(time.time() - start, 1)}
    _say(begin, f"{name}: {'cut' if code is None else f'exit code {code}'} after {found['seconds']} s")
    if code != 0:
        found["errors"] = told
        click.echo(told[-1200:])
    return found


def _group() -> dict[str, Any]:
    """Options of a process that leads a group of its own, so that its children can be ended with it."""
    return {} if platform.system() == "Windows" else {"preexec_fn": os.setpgrp}


def _end(process: subprocess.Popen | None) -> None:
    """End a process and its group: first asked, as torchrun then ends processes in groups of their own, then killed."""
    if process is None:
        return
    if platform.system() == "Windows":
        process.kill()
    else:
        for signum, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signum)
                _wait_for_group(process, patience)
    process.wait()


def _wait_for_group(process: subprocess.Popen, seconds: float) -> None:
    """Wait until no process of a group is left, which is an error of ``killpg``."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        process.poll()
        os.killpg(process.pid, 0)
        time.sleep(0.05)


def _start_build(settings: Any) -> subprocess.Popen | None:
    checkout = settings.peers.get("deformable_detr")
    if not checkout:
        return None
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.on_gpu.build", checkout, settings.built]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))}
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, **_group())


def _wait_for_build(build: subprocess.Popen | None, settings: Any, summary: dict[str, Any]) -> None:
    """Wait for the compiler and keep its outcome; after a while it is stopped, as it would change the times."""
    if build is None or "build" in summary:
        return
    try:
        build.wait(FOR_BUILD)
    except subprocess.TimeoutExpired:
        _end(build)
    outcome = Path(settings.built) / "build.json"
    missing = {"built": False, "reason": "not ready in time, or ended without a word"}
    summary["build"] = json.loads(outcome.read_text(encoding="utf-8")) if outcome.is_file() else missing
    told = summary["build"]
    reason = "" if told["built"] else f"{str(told.get('reason'))[-700:]}: "
    click.echo(f"official CUDA op: {reason}{'built' if told['built'] else 'left out'}, {told.get('seconds')} s")


def _say(begin: float, text: str) -> None:
    click.echo(f"[{time.time() - begin:6.1f} s] {text}")


if __name__ == "__main__":
    main(prog_name="benchmarks/gpu.py")
