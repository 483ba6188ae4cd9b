# SPDX-License-Identifier: Apache-2.0
"""Choose the checkpoint that a run is resumed from: among the undamaged checkpoints of the same run, the one with the highest
iteration.

A folder may contain checkpoints of several runs, one after the other. Its file ``run_id`` names the run that was last started or
resumed there, and the node ``cpvt_det`` of a checkpoint names its run.
"""

import logging
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpvt_det.checkpoint.files import read_checkpoint
from cpvt_det.common.errors import WeightsError

logger = logging.getLogger("cpvt_det")
FINAL = "model_final"
NUMBERED = re.compile(r"^model_(\d{7,})$")
RUN_ID, TAG = "run_id", "last_checkpoint"
SEEN = 60.0
"""Seconds within which a new file in a shared folder should be visible on every machine."""


@dataclass(frozen=True)
class Candidate:
    """A checkpoint file, described without reading its weights.

    Attributes:
        path: path of the file.
        run_id: id of its run, from :func:`run_id_of`.
        iteration: last iteration before it was saved.
        written: time of its last change, in nanoseconds.
    """

    path: Path
    run_id: str
    iteration: int
    written: int


def run_id_of(checkpoint: Mapping[str, Any]) -> str:
    """The id of a checkpoint's run; empty if the checkpoint contains none."""
    node = checkpoint.get("cpvt_det")
    return str(node.get("run_id", "")) if isinstance(node, Mapping) else ""


def choose_to_resume(folder: str | Path) -> tuple[Path, dict[str, Any]]:
    """The undamaged checkpoint with the highest iteration of the run that the folder names, and its content.

    If that run has no undamaged checkpoint, the newest one of another run is used, with a warning. Other warnings name skipped
    files and the reasons.

    Raises:
        WeightsError: a folder without a checkpoint, or with damaged ones only.
    """
    folder = Path(folder).expanduser()
    if not checkpoints_of(folder):
        raise WeightsError(f"there is nothing to resume in {folder}: it contains no checkpoint model_*.pth; check OUTPUT_DIR")
    candidates, skipped = _look(folder)
    named = named_run(folder)
    if not named and candidates:  # then it is the run of the newest checkpoint
        named = max(candidates, key=lambda one: one.written).run_id
    chosen = _first_whole(candidates, named, skipped)
    for why in skipped.values():
        logger.warning("Skipped a checkpoint: %s", why)
    if chosen is None:
        raise WeightsError(
            f"all checkpoints in {folder} are damaged ({', '.join(skipped)}); train again without --resume, or set MODEL.WEIGHTS"
        )
    if run_id_of(chosen[1]) != named:
        logger.warning(
            "The run that was last started in %s has no undamaged checkpoint; %s belongs to an earlier run", folder, chosen[0]
        )
    return chosen


def choose_of_run(folder: str | Path, run_id: str) -> tuple[Path, dict[str, Any]] | None:
    """The undamaged checkpoint with the highest iteration of one run, and its content; ``None`` if there is none."""
    candidates = [one for one in _look(Path(folder))[0] if one.run_id == run_id]
    return _first_whole(candidates, run_id, {})


def wait_for(path: Path) -> tuple[Path, dict[str, Any]]:
    """Wait for the checkpoint that process 0 has found at this path; return the path and the content.

    Raises:
        WeightsError: a checkpoint that does not appear in time, or is damaged.
    """
    end = time.monotonic() + SEEN
    while not path.is_file() and time.monotonic() < end:
        time.sleep(0.5)
    if not path.is_file():
        raise WeightsError(
            f"process 0 resumes from {path}, which is not on this machine; set OUTPUT_DIR to a folder that all machines share"
        )
    return path, read_checkpoint(path)


def named_run(folder: str | Path) -> str:
    """The run that was last started or resumed in a folder; empty if no file names it."""
    file = Path(folder) / RUN_ID
    return file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""


def checkpoints_of(folder: Path) -> list[Path]:
    """All checkpoints in a folder except ``model_best.pth``."""
    return [path for path in folder.glob("model_*.pth") if path.stem == FINAL or NUMBERED.match(path.stem)]


def _look(folder: Path) -> tuple[list[Candidate], dict[str, str]]:
    """The checkpoints that can be opened, and a dict of the others: file name -> reason."""
    candidates, skipped = [], {}
    for path in checkpoints_of(folder):
        try:
            content = read_checkpoint(path, only_look=True)
        except WeightsError as error:
            skipped[path.name] = str(error)
            continue
        content = content if isinstance(content, dict) else {}
        iteration = content.get("iteration") if isinstance(content.get("iteration"), int) else -1
        candidates.append(Candidate(path, run_id_of(content), iteration, path.stat().st_mtime_ns))
    return candidates, skipped


def _first_whole(candidates: list[Candidate], run_id: str, skipped: dict[str, str]) -> tuple[Path, dict[str, Any]] | None:
    """The best undamaged checkpoint and its content: that of the run with the highest iteration, or else the newest of another
    run. Damaged ones are added to ``skipped``."""
    newest_first = sorted(candidates, key=lambda one: one.written, reverse=True)
    of_run = [one for one in newest_first if one.run_id == run_id]
    others = [one for one in newest_first if one.run_id != run_id]
    for one in sorted(of_run, key=lambda one: one.iteration, reverse=True) + others:
        try:
            return one.path, read_checkpoint(one.path)
        except WeightsError as error:
            skipped[one.path.name] = str(error)
    return None
