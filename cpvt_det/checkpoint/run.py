# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, in detectron2's layout, so that either runner resumes what the other began.

``{"model", "trainer": {"iteration", "_trainer": {"iteration", "optimizer", "grad_scaler"}}, "iteration", "cpvt_det"}``; the last
node is ours. Data order and random state need no place in it: both follow from the seed and the iteration.
"""

import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fvcore.common.checkpoint import Checkpointer
from torch import nn

from cpvt_det import distributed
from cpvt_det.checkpoint.files import (
    atomic_file,
    not_finite,
    read_checkpoint,
    remove_checkpoint,
    remove_unfinished,
    write_checkpoint,
)
from cpvt_det.config import changed_keys
from cpvt_det.data.coco import Classes
from cpvt_det.errors import BadInputError, RunStoppedError, WeightsError
from cpvt_det.solver.ema import MovingAverage
from cpvt_det.solver.step import TrainStep

logger = logging.getLogger("cpvt_det")
BEST, FINAL = "model_best", "model_final"
NUMBERED = re.compile(r"^model_(\d{7,})$")


class RunState:
    """The node ``cpvt_det`` of a checkpoint.

    Args:
        classes: what the labels mean.
        config: the run's config as YAML.
        seed: of the run.
        ema: the moving average of the weights, where there is one.

    Attributes:
        best: the best AP so far, or ``None``.
    """

    def __init__(self, classes: Classes, config: str, seed: int, ema: MovingAverage | None = None):
        self.classes = classes
        self.config = config
        self.seed = seed
        self.ema = ema
        self.best: float | None = None

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors, which load with ``weights_only=True``."""
        return {
            "classes": {"ids": list(self.classes.ids), "names": list(self.classes.names)},
            "config": self.config,
            "seed": self.seed,
            "best": self.best,
            "ema": None if self.ema is None else self.ema.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take seed, best AP and average of a checkpoint.

        Raises:
            WeightsError: a checkpoint of other classes.
        """
        names = tuple(state["classes"]["names"])
        if names != self.classes.names:
            raise WeightsError(
                f"the run to resume was trained on other classes ({len(names)}: {', '.join(names[:5])}); "
                "start a new OUTPUT_DIR with MODEL.WEIGHTS instead"
            )
        for change in changed_keys(state["config"], self.config):
            logger.warning("The resumed run goes on with another config: %s", change)
        self.seed, self.best = state["seed"], state["best"]
        if self.ema is not None and state["ema"] is not None:
            self.ema.load_state_dict(state["ema"])


class TrainerState:
    """The node ``trainer`` of a checkpoint of the built-in runner.

    Args:
        step: holds optimiser and scaler.
    """

    def __init__(self, step: TrainStep):
        self.step = step
        self.iteration = -1

    def state_dict(self) -> dict[str, Any]:
        """In the layout of detectron2's ``DefaultTrainer``."""
        return {"iteration": self.iteration, "_trainer": {"iteration": self.iteration, **self.step.state_dict()}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the iteration, the optimiser and the scaler."""
        self.iteration = state["iteration"]
        self.step.load_state_dict(state["_trainer"])


class RunCheckpointer(Checkpointer):
    """fvcore's checkpointer with our files: written whole or not at all, read without running code, the last few kept.

    Args:
        detector: whose state dict is the node ``model``.
        folder: ``OUTPUT_DIR``.
        keep: how many of the checkpoints that are numbered stay.
        checkpointables: further nodes by name; ``cpvt_det`` is a :class:`RunState`.
    """

    def __init__(self, detector: nn.Module, folder: str | Path, keep: int, **checkpointables: Any):
        super().__init__(detector, str(folder), save_to_disk=distributed.rank() == 0, **checkpointables)
        self.keep = keep
        if self.save_to_disk:
            remove_unfinished(folder)

    def save(self, name: str, iteration: int) -> None:
        """Write ``<name>.pth``; all but the best become the last checkpoint, and push out the oldest.

        Raises:
            RunStoppedError: weights that are not finite, or a file that cannot be written.
        """
        if not self.save_to_disk:
            return
        content: dict[str, Any] = {"model": self.model.state_dict()}
        content |= {key: checkpointable.state_dict() for key, checkpointable in self.checkpointables.items()}
        folder = Path(self.save_dir)
        spoilt = not_finite(content["model"]) or not_finite(content["cpvt_det"]["ema"] or {})
        if spoilt:
            raise RunStoppedError(f"the weights are not finite ({spoilt}) and are not saved; the last checkpoint is from before")
        write_checkpoint({**content, "iteration": iteration}, folder / f"{name}.pth")
        if name != BEST:
            self.tag_last_checkpoint(f"{name}.pth")
            for path in _numbered(folder, up_to=iteration)[self.keep :]:
                remove_checkpoint(path)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Write ``last_checkpoint``, all of it or nothing."""
        with atomic_file(Path(self.save_dir) / "last_checkpoint") as file:
            file.write(last_filename_basename.encode())

    def resume(self) -> int:
        """Load the newest checkpoint that is whole.

        Returns:
            The iteration to go on with; 0, with a warning, where there is no checkpoint.

        Raises:
            WeightsError: no checkpoint that can be read, or one that is not of a run like this.
        """
        if not _by_age(self.save_dir):
            if self.has_checkpoint():
                raise WeightsError(f"last_checkpoint in {self.save_dir} names {self.get_checkpoint_file()}, which is not there")
            logger.warning("Nothing to resume in %s: starting at iteration 0", self.save_dir)
            return 0
        path, checkpoint = _newest_whole(self.save_dir)
        missing = [node for node in ("model", "iteration", *self.checkpointables) if node not in checkpoint]
        if missing:
            raise WeightsError(f"{path} cannot be resumed: it has no {', '.join(missing)}; start from it with MODEL.WEIGHTS")
        try:
            self.checkpointables["cpvt_det"].load_state_dict(checkpoint["cpvt_det"])  # first: it says what the config changed
            self.model.load_state_dict(checkpoint["model"])
            for name, checkpointable in self.checkpointables.items():
                if name != "cpvt_det":
                    checkpointable.load_state_dict(checkpoint[name])
        except BadInputError:
            raise
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise WeightsError(f"{path} is of another model than the config's and cannot be resumed: {error}") from error
        state: RunState = self.checkpointables["cpvt_det"]
        if state.ema is not None and not checkpoint["cpvt_det"]["ema"]:  # switched on since
            state.ema.module.load_state_dict(checkpoint["model"])
        state.best = self._best_on_disk(state.seed)
        logger.info("Resumed from %s", path)
        return checkpoint["iteration"] + 1

    def keep_best(self, ap: float, iteration: int) -> None:
        """Save ``model_best.pth`` where the AP rose."""
        state: RunState = self.checkpointables["cpvt_det"]
        if state.best is None or ap > state.best:
            state.best = ap
            self.save(BEST, iteration)

    def _best_on_disk(self, seed: int) -> float | None:
        """The AP of this run's ``model_best.pth``: the last checkpoint is written before its own evaluation."""
        path = Path(self.save_dir) / f"{BEST}.pth"
        if not path.is_file():
            return None
        try:
            node = read_checkpoint(path)["cpvt_det"]
        except WeightsError as error:
            logger.warning("The best checkpoint is lost, the next evaluation makes another: %s", error)
            return None
        return node["best"] if node["seed"] == seed else None


def last_checkpoint(folder: str | Path) -> Path:
    """The newest checkpoint in a run's folder that is whole.

    Raises:
        WeightsError: a folder without one.
    """
    if not _by_age(folder):
        raise WeightsError(f"there is nothing to resume in {folder}: it has no checkpoint model_*.pth")
    return _newest_whole(folder)[0]


def _newest_whole(folder: str | Path) -> tuple[Path, dict[str, Any]]:
    """The newest checkpoint that can be read, and what is in it; why the newer ones were skipped is logged."""
    skipped = []
    for path in _by_age(folder):
        try:
            return path, read_checkpoint(path)
        except WeightsError as error:
            logger.warning("Skipped a checkpoint: %s", error)
            skipped.append(path.name)
    raise WeightsError(f"no checkpoint in {folder} is whole ({', '.join(skipped)}); start anew, or from other MODEL.WEIGHTS")


def _by_age(folder: str | Path) -> list[Path]:
    """The run's checkpoints but its best, the newest first: by the time they were written, as an earlier run may have left more."""
    paths = [path for path in Path(folder).expanduser().glob("model_*.pth") if path.stem == FINAL or NUMBERED.match(path.stem)]
    return sorted(paths, key=lambda path: (path.stat().st_mtime_ns, path.name), reverse=True)


def _numbered(folder: Path, up_to: int) -> list[Path]:
    """Checkpoints of iterations up to one, the highest first. Those beyond are an earlier run's, and not ours to remove."""
    found: Iterator[tuple[int, Path]] = (
        (int(match[1]), path) for path in folder.glob("model_*.pth") if (match := NUMBERED.match(path.stem))
    )
    return [path for number, path in sorted(found, reverse=True) if number <= up_to]
