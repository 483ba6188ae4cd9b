# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint of a folder a run goes on from: one of the same run, the furthest of those that are whole.

A folder may hold checkpoints of several runs, one after the other. Its file ``run_id`` names the last that was started or resumed
there, and a checkpoint's node ``cpvt_det`` the run that it is of. In checkpoints of before there were ids the seed stands for it.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cpvt_det.checkpoint.files import read_checkpoint, write_line
from cpvt_det.errors import WeightsError

logger = logging.getLogger("cpvt_det")
FINAL = "model_final"
NUMBERED = re.compile(r"^model_(\d{7,})$")
RUN_ID, TAG = "run_id", "last_checkpoint"


@dataclass(frozen=True)
class Candidate:
    """What a checkpoint file says of itself, its weights not looked at.

    Attributes:
        path: of the file.
        run_id: as :func:`run_id_of`.
        iteration: the last that it has taken.
        is_tagged: it is the one that ``last_checkpoint`` names.
        written: when, in nanoseconds.
    """

    path: Path
    run_id: str
    iteration: int
    is_tagged: bool
    written: int


def run_id_of(checkpoint: Mapping[str, Any]) -> str:
    """The id of the run that a checkpoint is of, or else its seed; empty where nothing tells."""
    node = checkpoint.get("cpvt_det")
    return str(node.get("run_id", node.get("seed", ""))) if isinstance(node, Mapping) else ""


def last_checkpoint(folder: str | Path) -> Path:
    """The checkpoint that a run in this folder would be resumed from.

    Raises:
        WeightsError: a folder without one.
    """
    return choose_to_resume(folder)[0]


def choose_to_resume(folder: str | Path) -> tuple[Path, dict[str, Any]]:
    """The furthest whole checkpoint of the run that the folder names, and what is in it.

    Where that run has none, it is the newest of another run; that, and which were skipped and why, is logged.

    Raises:
        WeightsError: a folder without a checkpoint, or without one that is whole.
    """
    folder = Path(folder).expanduser()
    if not checkpoints_of(folder):
        raise WeightsError(f"there is nothing to resume in {folder}: it has no checkpoint model_*.pth")
    candidates, skipped = _look(folder)
    named = _named_run(folder, candidates)

    def order(one: Candidate) -> tuple:
        is_named = one.run_id == named
        return is_named, one.iteration if is_named else 0, one.is_tagged, one.written

    chosen = _first_whole(sorted(candidates, key=order, reverse=True), skipped)
    for why in skipped.values():
        logger.warning("Skipped a checkpoint: %s", why)
    if chosen is None:
        raise WeightsError(f"no checkpoint in {folder} is whole ({', '.join(skipped)}); start anew, or from other MODEL.WEIGHTS")
    if run_id_of(chosen[1]) != named:
        logger.warning("The run that was last started in %s left no whole checkpoint; %s is of an earlier one", folder, chosen[0])
    return chosen


def choose_of_run(folder: str | Path, run_id: str) -> tuple[Path, dict[str, Any]] | None:
    """The furthest whole checkpoint of one run, where there is one, and what is in it."""
    candidates = [one for one in _look(Path(folder))[0] if one.run_id == run_id]
    return _first_whole(sorted(candidates, key=lambda one: (one.iteration, one.is_tagged, one.written), reverse=True), {})


def name_run(folder: str | Path, run_id: str) -> None:
    """Write down which run a folder is of from now on."""
    write_line(run_id, Path(folder) / RUN_ID)


def checkpoints_of(folder: Path) -> list[Path]:
    """The runs' checkpoints in a folder but the best."""
    return [path for path in folder.glob("model_*.pth") if path.stem == FINAL or NUMBERED.match(path.stem)]


def _look(folder: Path) -> tuple[list[Candidate], dict[str, str]]:
    """The checkpoints that open, and by name why others do not."""
    tag = folder / TAG
    tagged = tag.read_text(encoding="utf-8", errors="replace").strip() if tag.is_file() else ""
    candidates, skipped = [], {}
    for path in checkpoints_of(folder):
        try:
            told = read_checkpoint(path, only_look=True)
        except WeightsError as error:
            skipped[path.name] = str(error)
            continue
        iteration = told.get("iteration") if isinstance(told, dict) else None
        number = iteration if isinstance(iteration, int) else -1
        run_id = run_id_of(told) if isinstance(told, dict) else ""
        candidates.append(Candidate(path, run_id, number, path.name == tagged, path.stat().st_mtime_ns))
    return candidates, skipped


def _named_run(folder: Path, candidates: list[Candidate]) -> str:
    """The run that the folder is of: by its file, else that of the checkpoint that is tagged, else of the newest."""
    file = folder / RUN_ID
    if file.is_file():
        return file.read_text(encoding="utf-8", errors="replace").strip()
    newest = max(candidates, key=lambda one: (one.is_tagged, one.written), default=None)
    return "" if newest is None else newest.run_id


def _first_whole(candidates: list[Candidate], skipped: dict[str, str]) -> tuple[Path, dict[str, Any]] | None:
    for one in candidates:
        try:
            return one.path, read_checkpoint(one.path)
        except WeightsError as error:
            skipped[one.path.name] = str(error)
    return None
