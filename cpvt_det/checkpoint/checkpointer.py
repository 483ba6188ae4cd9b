# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a run, in detectron2's layout, so that either runner can resume the other's runs.

``{"model", "trainer": {"iteration", "_trainer": {"iteration", "optimizer", "parameters", "grad_scaler", "bad_steps"}}, "iteration",
"cpvt_det"}``; the last node and "parameters", the names in the optimizer's order, are ours. Data order and random state are not
saved: both follow from the seed and the iteration.
"""

import logging
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fvcore.common.checkpoint import Checkpointer
from torch import nn
from torch.optim.swa_utils import AveragedModel

from cpvt_det.checkpoint.files import checksum_of, not_finite, read_checkpoint, write_checkpoint, write_line
from cpvt_det.checkpoint.resume import NUMBERED, RUN_ID, TAG, checkpoints_of, choose_of_run, choose_to_resume, run_id_of, wait_for
from cpvt_det.common import distributed
from cpvt_det.common.class_names import Classes
from cpvt_det.common.errors import BadInputError, RunStoppedError, WeightsError
from cpvt_det.common.files import remove_unfinished
from cpvt_det.common.structures import Thresholds
from cpvt_det.config import changed_keys

logger = logging.getLogger("cpvt_det")
BEST = "model_best"


@dataclass
class BestSoFar:
    """The state that decides on ``model_best.pth`` and on early stopping; it is part of the node ``cpvt_det`` of a checkpoint.

    A resumed run may repeat evaluations. It repeats the evaluation at its checkpoint's iteration, because the checkpoint is written
    before that evaluation. If ``model_best.pth`` is newer than the checkpoint, it also repeats the evaluations up to that
    iteration. Repeated evaluations are not counted again.

    Attributes:
        name: name of the metric that decides, such as ``bbox/AP``; higher is better.
        test: name of the test set that the metric is measured on, which is the first test set.
        figure: highest value of the metric so far; ``None`` before the first evaluation.
        iteration: iteration of that evaluation.
        waited: number of evaluations since then, none of which had a higher value.
        counted: last iteration whose evaluation is in ``waited``.
    """

    name: str = ""
    test: str = ""
    figure: float | None = None
    iteration: int = -1
    waited: int = 0
    counted: int = -1

    def take(self, figure: float, iteration: int) -> bool:
        """Take the metric of an evaluation, and return whether it is the highest so far. NaN, the result on a test set without
        objects, never counts as the highest."""
        better = figure == figure and (self.figure is None or figure > self.figure)
        if better:
            self.figure, self.iteration = figure, iteration
        if iteration <= self.iteration:
            self.waited = 0
        elif iteration > self.counted:
            self.waited += 1
        self.counted = max(self.counted, iteration)
        return better

    def compares_with(self, saved: "BestSoFar") -> bool:
        """Whether ``saved`` is of the same metric on the same test set. A run without a test set takes any."""
        return saved.name == self.name and self.test in ("", saved.test)

    def continued(self, saved: "BestSoFar") -> "BestSoFar":
        """The state of a run that resumes ``saved``; without its values if they cannot be compared."""
        return replace(saved, test=self.test) if self.compares_with(saved) else BestSoFar(self.name, self.test)


@dataclass
class RunState:
    """The node ``cpvt_det`` of a checkpoint.

    Attributes:
        classes: classes that the labels stand for.
        config: the run's config as YAML.
        seed: seed of the run.
        run_id: id of the run; a resumed run keeps it.
        data: description of the training data, from :func:`cpvt_det.data.coco.describe_records`.
        ema: moving average of the weights; ``None`` if the run has none.
        best: the best evaluation so far, with the metric and the test set that define "best".
        thresholds: score thresholds of the last evaluation; ``None`` before the first evaluation, and for a task without
            thresholds.
    """

    classes: Classes
    config: str
    seed: int
    run_id: str
    data: dict[str, Any]
    ema: AveragedModel | None = None
    best: BestSoFar = field(default_factory=BestSoFar)
    thresholds: Thresholds | None = None

    def state_dict(self) -> dict[str, Any]:
        """The state as plain values and tensors, which load with ``weights_only=True``."""
        return {
            "classes": {"ids": list(self.classes.ids), "names": list(self.classes.names)},
            "config": self.config,
            "seed": self.seed,
            "run_id": self.run_id,
            "data": self.data,
            "processes": distributed.world_size(),
            "best": asdict(self.best),
            "thresholds": None if self.thresholds is None else self.thresholds.state_dict(),
            "ema": None if self.ema is None else self.ema.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore seed, id, best evaluation, thresholds and average from a checkpoint, and log what has changed since it was
        written.

        Raises:
            WeightsError: a checkpoint with different classes.
        """
        names = tuple(state["classes"]["names"])
        if names != self.classes.names:
            raise WeightsError(
                f"the run to resume was trained on different classes ({len(names)}: {', '.join(names[:5])}); "
                "start a new run in another OUTPUT_DIR, with MODEL.WEIGHTS set to this checkpoint"
            )
        for change in changed_keys(state["config"], self.config):
            logger.warning("The config of the resumed run has changed: %s", change)
            if change.startswith("SOLVER.IMS_PER_BATCH "):
                changes = "its images and the number of epochs change; SOLVER.ACCUMULATE saves memory without that"
                logger.warning("A run counts iterations, not images: with a different SOLVER.IMS_PER_BATCH %s", changes)
        before = state["data"]
        if before != self.data:
            told = "The training data of the resumed run has changed: %d images before, %d now; so will its result"
            logger.warning(told, before["images"], self.data["images"])
        before, now = state["processes"], distributed.world_size()
        if before != now:
            changes = "dropout, denoising, the statistics of BN and the rounding of sums change"
            told = "The run to resume used %d process(es), and there are now %d: batches and their order stay the same, but %s"
            logger.warning(told, before, now, changes)
        self.seed, self.run_id = state["seed"], run_id_of({"cpvt_det": state})
        self.best = self.best.continued(BestSoFar(**state["best"]))
        self.thresholds = state.get("thresholds") and Thresholds.from_state_dict(state["thresholds"], len(names))
        if self.ema is not None and state["ema"] is not None:
            self.ema.load_state_dict(state["ema"])


class RunCheckpointer(Checkpointer):
    """fvcore's checkpointer for our files, which are written completely or not at all and read without running code.

    Args:
        detector: model whose state dict becomes the node ``model``.
        folder: ``OUTPUT_DIR``.
        keep: number of numbered checkpoints to keep; older ones are removed.
        step: training step, whose state is that of optimiser and gradient scaler.
        state: content of the node ``cpvt_det``.
    """

    def __init__(self, detector: nn.Module, folder: str | Path, keep: int, step: Any, state: RunState):
        super().__init__(detector, str(folder), save_to_disk=distributed.rank() == 0)
        self.step, self.state = step, state
        self.keep = keep
        if self.save_to_disk:
            remove_unfinished(folder)

    def save(self, name: str, iteration: int) -> None:
        """Write ``<name>.pth``, in the first process. Unless it is ``model_best.pth``, record it as the last checkpoint, and
        remove the oldest numbered ones.

        Raises:
            RunStoppedError: weights with a NaN or an infinity, or a file that cannot be written.
        """
        if not self.save_to_disk:
            return
        trainer = {"iteration": iteration, "_trainer": {"iteration": iteration, **self.step.state_dict()}}
        content = {"model": self.model.state_dict(), "trainer": trainer, "cpvt_det": self.state.state_dict()}
        folder = Path(self.save_dir)
        broken = not_finite(content["model"]) or not_finite(content["cpvt_det"]["ema"] or {})
        if broken:
            raise RunStoppedError(f"the weights are not finite ({broken}) and are not saved; earlier checkpoints are unchanged")
        write_checkpoint({**content, "iteration": iteration}, folder / f"{name}.pth")
        if name != BEST:
            write_line(f"{name}.pth", folder / TAG)
            matches = (NUMBERED.match(path.stem) for path in folder.glob("model_*.pth"))
            paths = {int(match[1]): folder / f"{match[0]}.pth" for match in matches if match}
            # Checkpoints with higher numbers belong to an earlier run and must not be removed.
            for number in sorted((number for number in paths if number <= iteration), reverse=True)[self.keep :]:
                for file in (checksum_of(paths[number]), paths[number]):
                    file.unlink(missing_ok=True)

    def begin(self, resume: bool) -> int:
        """Resume or start a run, and record it as the one that the folder belongs to.

        Args:
            resume: ``True`` resumes the run that the folder belongs to. ``False`` resumes only from checkpoints with this run's own
                id, which exist if torchrun has restarted the processes. Checkpoints of other runs in the folder are then ignored.

        Returns:
            The next iteration; 0 if there is no checkpoint, with a warning if ``resume`` is True.

        Raises:
            WeightsError: no readable checkpoint, or a checkpoint of a different model or different classes.
        """
        chosen = None
        if self.save_to_disk:  # the others take the same, even if their machines see the folder some seconds later
            chosen = self._choose() if resume else choose_of_run(self.save_dir, self.state.run_id)
        name = distributed.broadcast_object(chosen and chosen[0].name)
        if name is not None and chosen is None:
            chosen = wait_for(Path(self.save_dir) / name)
        if chosen is not None:
            self._take(*chosen)
        if self.save_to_disk:
            write_line(self.state.run_id, Path(self.save_dir) / RUN_ID)  # the folder belongs to this run from now on
        return 0 if chosen is None else chosen[1]["iteration"] + 1

    def _choose(self) -> tuple[Path, dict[str, Any]] | None:
        if checkpoints_of(Path(self.save_dir)):
            return choose_to_resume(self.save_dir)
        if self.has_checkpoint():
            raise WeightsError(
                f"{TAG} in {self.save_dir} names {self.get_checkpoint_file()}, which does not exist; put that file back, or remove "
                f"{TAG} to start at iteration 0"
            )
        logger.warning("Nothing to resume in %s: starting at iteration 0", self.save_dir)
        return None

    def _take(self, path: Path, checkpoint: dict[str, Any]) -> None:
        """Load everything in a checkpoint."""
        missing = [node for node in ("model", "iteration", "trainer", "cpvt_det") if node not in checkpoint]
        if missing:
            raise WeightsError(
                f"{path} cannot be resumed: it does not contain {', '.join(missing)}; start a new run from it with MODEL.WEIGHTS"
            )
        try:
            self.state.load_state_dict(checkpoint["cpvt_det"])  # first: it logs changes of the config
            self.model.load_state_dict(checkpoint["model"])
            self.step.load_state_dict(checkpoint["trainer"]["_trainer"])
        except BadInputError:
            raise
        except (RuntimeError, KeyError, ValueError, TypeError, AttributeError) as error:
            raise WeightsError(
                f"{path} cannot be resumed, because it does not match the model in the config: {error}; set the MODEL keys to the "
                "values that it was trained with"
            ) from error
        if self.state.ema is not None and not checkpoint["cpvt_det"]["ema"]:  # SOLVER.EMA was enabled after it was written
            self.state.ema.module.load_state_dict(checkpoint["model"])
        self._take_best()
        logger.info("Resumed from %s", path)

    def keep_best(self, figure: float, iteration: int) -> None:
        """Save ``model_best.pth`` if the deciding metric is higher than in all earlier evaluations."""
        if self.state.best.take(figure, iteration):
            self.save(BEST, iteration)

    def _take_best(self) -> None:
        """Take the best evaluation from ``model_best.pth``, because the last checkpoint was written before the evaluation at its
        iteration."""
        best, found = self.state.best, self._saved_best() if self.save_to_disk else None
        had_one = best.figure is not None
        best.figure, best.iteration = distributed.broadcast_object(found)
        if had_one and best.figure is None:  # the best evaluation is lost
            best.waited, best.counted = 0, -1

    def _saved_best(self) -> tuple[float | None, int]:
        """Metric and iteration of the best evaluation; ``None`` and -1 if there is no comparable evaluation."""
        path = Path(self.save_dir) / f"{BEST}.pth"
        if not path.is_file():
            return None, -1
        try:
            best = read_checkpoint(path)
        except WeightsError as error:
            logger.warning("The best checkpoint cannot be read; the next evaluation writes a new one: %s", error)
            return None, -1
        if run_id_of(best) != self.state.run_id:
            return None, -1
        saved, now = BestSoFar(**best["cpvt_det"]["best"]), self.state.best
        if not now.compares_with(saved):
            told = "The best checkpoint so far was selected by %s on %s, but this run selects by %s on %s, and will replace it"
            logger.warning(told, saved.name, saved.test, now.name, now.test)
            return None, -1
        return saved.figure, saved.iteration
