# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, in detectron2's layout, so that either runner resumes what the other began.

``{"model", "trainer": {"iteration", "_trainer": {"iteration", "optimizer", "grad_scaler"}}, "iteration", "cpvt_det"}``; the last
node is ours. Data order and random state need no place in it: both follow from the seed and the iteration.
"""

import logging
from pathlib import Path
from typing import Any

from fvcore.common.checkpoint import Checkpointer
from torch import nn
from torch.optim.swa_utils import AveragedModel

from cpvt_det import distributed
from cpvt_det.checkpoint.files import atomic_file, read_checkpoint, write_atomically
from cpvt_det.data.coco import Classes
from cpvt_det.errors import BadInputError, WeightsError
from cpvt_det.solver.step import TrainStep

logger = logging.getLogger("cpvt_det")
BEST = "model_best"


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

    def __init__(self, classes: Classes, config: str, seed: int, ema: AveragedModel | None = None):
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
    """fvcore's checkpointer with our files: written whole or not at all, read without running code.

    Args:
        detector: whose state dict is the node ``model``.
        folder: ``OUTPUT_DIR``.
        checkpointables: further nodes by name; ``cpvt_det`` is a :class:`RunState`.
    """

    def __init__(self, detector: nn.Module, folder: str | Path, **checkpointables: Any):
        super().__init__(detector, str(folder), save_to_disk=distributed.rank() == 0, **checkpointables)

    def save(self, name: str, **kwargs: Any) -> None:
        """Write ``<name>.pth``; all but the best become the last checkpoint, which ``resume`` takes."""
        if not self.save_to_disk:
            return
        nodes = {key: checkpointable.state_dict() for key, checkpointable in self.checkpointables.items()}
        path = Path(self.save_dir) / f"{name}.pth"
        write_atomically({"model": self.model.state_dict(), **nodes, **kwargs}, path)
        if name != BEST:
            self.tag_last_checkpoint(path.name)

    def tag_last_checkpoint(self, last_filename_basename: str) -> None:
        """Write ``last_checkpoint``, all of it or nothing."""
        with atomic_file(Path(self.save_dir) / "last_checkpoint") as file:
            file.write(last_filename_basename.encode())

    def resume(self) -> int:
        """Load the last checkpoint.

        Returns:
            The iteration to go on with; 0, with a warning, where there is no checkpoint.

        Raises:
            WeightsError: a checkpoint that cannot be read, or is not one of a run like this.
        """
        if not self.has_checkpoint():
            logger.warning("Nothing to resume in %s: starting at iteration 0", self.save_dir)
            return 0
        path = self.get_checkpoint_file()
        checkpoint = read_checkpoint(path)
        missing = [node for node in ("model", "iteration", *self.checkpointables) if node not in checkpoint]
        if missing:
            raise WeightsError(f"{path} cannot be resumed: it has no {', '.join(missing)}; start from it with MODEL.WEIGHTS")
        try:
            self.model.load_state_dict(checkpoint["model"])
            for name, checkpointable in self.checkpointables.items():
                checkpointable.load_state_dict(checkpoint[name])
        except BadInputError:
            raise
        except (RuntimeError, KeyError, ValueError) as error:
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
            self.save(BEST, iteration=iteration)

    def _best_on_disk(self, seed: int) -> float | None:
        """The AP of this run's ``model_best.pth``: the last checkpoint is written before its own evaluation."""
        path = Path(self.save_dir) / f"{BEST}.pth"
        if not path.is_file():
            return None
        node = read_checkpoint(path)["cpvt_det"]
        return node["best"] if node["seed"] == seed else None


def last_checkpoint(folder: str | Path) -> Path:
    """The checkpoint that ``last_checkpoint`` in a run's folder names.

    Raises:
        WeightsError: a folder without one.
    """
    tag = Path(folder).expanduser() / "last_checkpoint"
    if not tag.is_file():
        raise WeightsError(f"there is nothing to resume in {folder}: it has no file last_checkpoint")
    return tag.parent / tag.read_text(encoding="utf-8").strip()
