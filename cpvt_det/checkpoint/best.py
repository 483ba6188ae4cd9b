# SPDX-License-Identifier: Apache-2.0
"""The best evaluation of a run so far, and the number of evaluations since then."""

from dataclasses import dataclass
from typing import Any


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

    def state_dict(self) -> dict[str, Any]:
        """The state; older checkpoints contain only ``best``."""
        return {
            "best": self.figure,
            "best_figure": self.name,
            "best_test": self.test,
            "best_iteration": self.iteration,
            "evaluations_waited": self.waited,
            "last_evaluation": self.counted,
        }

    def compares_with(self, state: dict[str, Any]) -> bool:
        """Whether the run that saved this state used the same metric on the same test set. A name that is missing, as in older
        checkpoints or in runs without evaluations, is not compared."""
        same_test = not self.test or state.get("best_test", self.test) == self.test
        return state.get("best_figure", self.name) == self.name and same_test

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a run, or reset it if that run used a different metric or test set, because its values cannot be
        compared."""
        if not self.compares_with(state):
            self.__init__(self.name, self.test)
            return
        self.figure = state["best"]
        self.iteration = state.get("best_iteration", -1)
        self.waited, self.counted = state.get("evaluations_waited", 0), state.get("last_evaluation", -1)
