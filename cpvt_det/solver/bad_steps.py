# SPDX-License-Identifier: Apache-2.0
"""Detect, on the device, steps whose loss or gradient is not finite. Skip these steps, count them, and log them with their
images.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpvt_det.common import distributed
from cpvt_det.common.errors import RunStoppedError
from cpvt_det.data.mapper import Sample

logger = logging.getLogger("cpvt_det")


@dataclass
class _Step:
    """A checked step that is not yet in the log.

    Attributes:
        iteration: number of the iteration.
        images: ids of this process's images.
        finite: (len(images),) bool, whether each image's predictions were finite.
        bad: () bool, whether the step is skipped. All processes have the same value.
    """

    iteration: int
    images: list[Any]
    finite: Tensor
    bad: Tensor


class NonFiniteGuard:
    """A guard that checks steps and counts the bad ones.

    A step is checked on the device. The host does not wait for the result, but reads it later, in :meth:`report`. After ``limit``
    bad steps in a row, all following steps count as bad too, so that no weights change until the host reads the result and ends
    the run.

    Args:
        limit: number of bad steps in a row after which a run ends.
        device: device of the model.

    Attributes:
        in_a_row: () float32, number of bad steps since the last good one.
        total: () float32, number of bad steps in the whole run.
    """

    def __init__(self, limit: int, device: torch.device):
        self.limit = limit
        self.in_a_row = torch.zeros((), device=device)
        self.total = torch.zeros((), device=device)
        self._unreported: list[_Step] = []

    def state_dict(self) -> dict[str, int]:
        """Both counts."""
        return {"in_a_row": int(self.in_a_row), "total": int(self.total)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore both counts."""
        self.in_a_row.fill_(state["in_a_row"])
        self.total.fill_(state["total"])

    def check(self, iteration: int, samples: Sequence[Sample], finite: Tensor, grad_norm: Tensor) -> Tensor:
        """Find out whether a step must be skipped, and store the result for :meth:`report`.

        Args:
            iteration: number of the iteration.
            samples: the B samples of this process.
            finite: (B,) bool, whether the predictions for each sample are finite.
            grad_norm: () float, norm of the gradients averaged over all processes, so that all processes get the same result.

        Returns:
            () bool, True for a step that must be skipped.
        """
        bad = ~grad_norm.isfinite() | (self.in_a_row >= self.limit)
        self.in_a_row = (self.in_a_row + 1) * bad
        self.total = self.total + bad
        self._unreported.append(_Step(iteration, [sample.get("image_id") for sample in samples], finite, bad))
        return bad

    def report(self) -> None:
        """Log the bad steps since the last call. Every process must call it after the same step.

        Raises:
            RunStoppedError: there were too many bad steps in a row.
        """
        steps, self._unreported = self._unreported, []
        if not steps:
            return
        *results, in_a_row = torch.stack([*(step.bad for step in steps), self.in_a_row]).tolist()
        for step, bad in zip(steps, results, strict=True):
            if bad:
                logger.warning("Iteration %d is skipped: %s", step.iteration, _why(step))
        if in_a_row >= self.limit:
            raise RunStoppedError(
                f"{int(in_a_row)} steps in a row were not finite (SOLVER.MAX_BAD_STEPS {self.limit}; the log names their images)"
            )


def _why(step: _Step) -> str:
    """The reason why a step is bad, with the ids of the images in all processes."""
    affected = [image for image, finite in zip(step.images, step.finite.tolist(), strict=True) if not finite]
    by_process = distributed.gather_objects((affected, step.images))
    affected, images = ([image for lists in by_process for image in lists[part]] for part in range(2))
    if affected:
        return f"the predictions are not finite for images {', '.join(map(str, affected))}"
    return f"the loss or a gradient is not finite; the images of the batch are {', '.join(map(str, images))}"
