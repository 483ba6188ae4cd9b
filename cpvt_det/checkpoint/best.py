# SPDX-License-Identifier: Apache-2.0
"""The best evaluation of a run so far, and how long it has been waited for a better one."""

from dataclasses import dataclass
from typing import Any


@dataclass
class BestSoFar:
    """What decides on ``model_best.pth`` and on early stopping; part of the node ``cpvt_det`` of a checkpoint.

    A resumed run repeats evaluations: that of its checkpoint, which is older than its evaluation, and those up to
    ``model_best.pth``, which may be younger than the checkpoint. They are not counted again.

    Attributes:
        name: name of the figure in the metrics, such as ``bbox/AP``; higher is better.
        test: name of the test set that it is measured on: the first one.
        figure: its highest value; ``None`` before the first evaluation.
        iteration: iteration of that evaluation.
        waited: evaluations since then, all of them with a lower figure or the same.
        counted: last iteration whose evaluation is in ``waited``.
    """

    name: str = ""
    test: str = ""
    figure: float | None = None
    iteration: int = -1
    waited: int = 0
    counted: int = -1

    def take(self, figure: float, iteration: int) -> bool:
        """Take the figure of one evaluation; whether it is the highest so far. NaN, from a test set without objects, never is."""
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
        """The state; ``best`` was the whole of it in older checkpoints."""
        return {
            "best": self.figure,
            "best_figure": self.name,
            "best_test": self.test,
            "best_iteration": self.iteration,
            "evaluations_waited": self.waited,
            "last_evaluation": self.counted,
        }

    def compares_with(self, state: dict[str, Any]) -> bool:
        """Whether the run of a state chose by the same figure of the same test set; older checkpoints lack one or both names, and
        a run that evaluates nothing has none to compare."""
        same_test = not self.test or state.get("best_test", self.test) == self.test
        return state.get("best_figure", self.name) == self.name and same_test

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the state of a run; of one that chose by another figure or test set, nothing: the numbers cannot be compared."""
        if not self.compares_with(state):
            self.__init__(self.name, self.test)
            return
        self.figure = state["best"]
        self.iteration = state.get("best_iteration", -1)
        self.waited, self.counted = state.get("evaluations_waited", 0), state.get("last_evaluation", -1)
