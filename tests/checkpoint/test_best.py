# SPDX-License-Identifier: Apache-2.0
"""The best evaluation so far, and the count of those that were waited, in a run and in one that is resumed."""

import math
from dataclasses import replace

import pytest

from cpvt_det.checkpoint.checkpointer import BestSoFar, RunState
from cpvt_det.common.class_names import Classes
from cpvt_det.common.structures import Thresholds

FIGURES = {9: 10.0, 19: 30.0, 29: 20.0, 39: 30.0, 49: 25.0}


def follow(best, *iterations):
    """The iterations that were the best when they came."""
    return [iteration for iteration in iterations if best.take(FIGURES[iteration], iteration)]


def test_evaluations_without_a_higher_figure_are_counted():
    best = BestSoFar("bbox/AP")
    assert follow(best, *FIGURES) == [9, 19]
    assert (best.figure, best.iteration, best.waited) == (30.0, 19, 3)


def test_nan_is_never_the_best_and_is_waited():
    best = BestSoFar()
    assert not best.take(math.nan, 1) and best.take(0.0, 3) and not best.take(math.nan, 5)
    assert (best.figure, best.iteration, best.waited) == (0.0, 3, 1)


@pytest.mark.parametrize("stop", FIGURES)
@pytest.mark.parametrize("best_on_disk", FIGURES)
def test_a_resumed_run_counts_as_the_run_never_interrupted(stop, best_on_disk):
    """Killed after the evaluation of ``best_on_disk`` or later, resumed from the checkpoint of ``stop``, which is older than its
    own evaluation; as the checkpointer does, the best so far is taken from ``model_best.pth``.
    """
    seen = [iteration for iteration in FIGURES if iteration <= max(stop, best_on_disk)]
    whole, saved, disk = BestSoFar(), None, None
    for iteration in FIGURES:
        if iteration == stop:
            saved = replace(whole)
        if whole.take(FIGURES[iteration], iteration) and iteration in seen:
            disk = replace(whole)
    resumed = BestSoFar().continued(saved)
    resumed.figure, resumed.iteration = disk.figure, disk.iteration
    follow(resumed, *(iteration for iteration in FIGURES if iteration >= stop))
    assert resumed == whole


def test_an_evaluation_that_is_repeated_after_an_early_stop_is_not_counted_again():
    best = BestSoFar()
    follow(best, 9, 19, 29, 39)
    again = BestSoFar().continued(best)
    follow(again, 39)
    assert again.waited == best.waited == 2


@pytest.mark.parametrize("now", [("AP50", "cards"), ("bbox/AP", "pets")], ids=["figure", "test set"])
def test_the_count_of_a_run_that_chose_by_another_figure_or_test_set_is_dropped(now):
    best = BestSoFar("bbox/AP", "cards")
    follow(best, *FIGURES)
    assert BestSoFar(*now).continued(best) == BestSoFar(*now)


def test_a_run_that_evaluates_nothing_keeps_what_was_best():
    best = BestSoFar("bbox/AP", "cards")
    follow(best, *FIGURES)
    other = BestSoFar("bbox/AP").continued(best)
    assert (other.figure, other.iteration) == (30.0, 19)


def test_best_and_thresholds_travel_in_the_node_of_a_run():
    state = RunState(Classes((0, 4), ("cat", "dog")), "VERSION: 2\n", 1, "a", {}, best=BestSoFar("AP50"))
    state.best.take(50.0, 7)
    state.thresholds = Thresholds(0.25, (0.5, None))
    other = RunState(Classes((0, 4), ("cat", "dog")), "VERSION: 2\n", 1, "b", {}, best=BestSoFar("AP50"))
    other.load_state_dict(state.state_dict())
    assert (other.best, other.thresholds) == (state.best, state.thresholds)
