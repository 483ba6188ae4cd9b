# SPDX-License-Identifier: Apache-2.0
"""The best evaluation of a run so far, and the number of evaluations since then."""

from dataclasses import dataclass
from typing import Any


@dataclass
class BestSoFar:
    """The state that decides on ``model_best.pth`` and on early stopping; it is part of the node ``cpvt_det`` of a checkpoint.

    A resumed run may repeat evaluations: the one of its checkpoint's iteration, because the checkpoint is written before it, and
    later ones up to ``model_best.pth``, which may be newer than the checkpoint. Repeated evaluations are not counted again.

    Attributes:
        name: name of the figure in the metrics, such as ``bbox/AP``; higher is better.
        test: name of the test set that the figure is measured on, the first one.
        figure: highest value of the figure; ``None`` before the first evaluation.
        iteration: iteration of that evaluation.
        waited: number of evaluations since then, all without a higher figure.
        counted: last iteration whose evaluation is in ``waited``.
    """

    name: str = ""
    test: str = ""
    figure: float | None = None
    iteration: int = -1
    waited: int = 0
    counted: int = -1

    def take(self, figure: float, iteration: int) -> bool:
        """Take the figure of an evaluation; return whether it is the highest so far. NaN, from a test set without objects, never
        is."""
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
        """Whether the run that saved this state used the same figure on the same test set. Missing names, as in older checkpoints
        or in runs without evaluations, are not compared."""
        same_test = not self.test or state.get("best_test", self.test) == self.test
        return state.get("best_figure", self.name) == self.name and same_test

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the state of a run, or reset it if that run used a different figure or test set, which cannot be compared."""
        if not self.compares_with(state):
            self.__init__(self.name, self.test)
            return
        self.figure = state["best"]
        self.iteration = state.get("best_iteration", -1)
        self.waited, self.counted = state.get("evaluations_waited", 0), state.get("last_evaluation", -1)
