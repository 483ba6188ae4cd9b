# SPDX-License-Identifier: Apache-2.0
"""Steps whose loss or gradient is not finite: judged on the device, never taken, counted, and told with their images."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cpvt_det import distributed
from cpvt_det.data.mapper import Sample
from cpvt_det.errors import RunStoppedError

logger = logging.getLogger("cpvt_det")


@dataclass
class _Step:
    """A step that was judged and not yet told of.

    Attributes:
        iteration: its number.
        images: ids of this process's images.
        finite: (len(images),) bool, whether an image's predictions were.
        bad: () bool, the same in all processes.
    """

    iteration: int
    images: list[Any]
    finite: Tensor
    bad: Tensor


class BadSteps:
    """Judges steps and keeps count of the bad ones.

    A step is judged on the device and the host does not wait for the verdict; it is read in :meth:`tell`. From the ``limit``-th
    bad step in a row on all are bad, so that a run stands still until somebody reads that.

    Args:
        limit: bad steps in a row that end a run.
        device: of the model.

    Attributes:
        in_a_row: () float32, bad steps since the last good one.
        total: () float32, bad steps of the whole run.
    """

    def __init__(self, limit: int, device: torch.device):
        self.limit = limit
        self.in_a_row = torch.zeros((), device=device)
        self.total = torch.zeros((), device=device)
        self._untold: list[_Step] = []

    def state_dict(self) -> dict[str, int]:
        """Both counts."""
        return {"in_a_row": int(self.in_a_row), "total": int(self.total)}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Take both counts."""
        self.in_a_row.fill_(state["in_a_row"])
        self.total.fill_(state["total"])

    def judge(self, iteration: int, samples: Sequence[Sample], finite: Tensor, grad_norm: Tensor) -> Tensor:
        """Whether a step must not be taken, and one more to tell of.

        Args:
            iteration: its number.
            samples: this process's.
            finite: (B,) bool, whether each one's predictions are.
            grad_norm: () of the gradients averaged over all processes, which hence agree about the step.

        Returns:
            () bool.
        """
        bad = ~grad_norm.isfinite() | (self.in_a_row >= self.limit)
        self.in_a_row = (self.in_a_row + 1) * bad
        self.total = self.total + bad
        self._untold.append(_Step(iteration, [sample.get("image_id") for sample in samples], finite, bad))
        return bad

    def tell(self) -> None:
        """Log the bad ones among the steps since the last call; every process has to call it after the same step.

        Raises:
            RunStoppedError: too many in a row.
        """
        untold, self._untold = self._untold, []
        if not untold:
            return
        *verdicts, in_a_row = torch.stack([*(step.bad for step in untold), self.in_a_row]).tolist()
        for step, bad in zip(untold, verdicts, strict=True):
            if bad:
                logger.warning("Iteration %d is left out: %s", step.iteration, _why(step))
        if in_a_row >= self.limit:
            raise RunStoppedError(
                f"{int(in_a_row)} steps in a row were not finite (SOLVER.MAX_BAD_STEPS {self.limit}; the log names their images)"
            )


def _why(step: _Step) -> str:
    """What was not finite, and for which images of all processes."""
    spoilt = [image for image, finite in zip(step.images, step.finite.tolist(), strict=True) if not finite]
    by_process = distributed.gather_objects((spoilt, step.images))
    spoilt, images = ([image for lists in by_process for image in lists[part]] for part in range(2))
    if spoilt:
        return f"predictions that are not finite for images {', '.join(map(str, spoilt))}"
    return f"a loss or gradient that is not finite; its images are {', '.join(map(str, images))}"
