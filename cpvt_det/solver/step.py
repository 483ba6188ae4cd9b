# SPDX-License-Identifier: Apache-2.0
"""One training step, from samples to losses, gradients and new weights. Both runners use it.

The global random state is set from (seed, iteration, process) before every step. So a resumed run repeats the same dropout
without a saved random state, and so does the other runner.

A step that yields a NaN or an infinity is skipped: weights, optimiser, running statistics and moving average do not change. The
decision is made on the device, and the host does not wait for it.
"""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from cpvt_det.common import distributed
from cpvt_det.common.errors import RunStoppedError
from cpvt_det.common.structures import Sample, split_samples
from cpvt_det.solver.memory_check import out_of_memory_explained, require_memory
from cpvt_det.solver.optimizer import LRSchedule, MovingAverage

logger = logging.getLogger("cpvt_det")


def wrap_for_processes(model: nn.Module) -> nn.Module:
    """The training model in DDP if there are several processes, on GPUs or CPUs; otherwise the model itself."""
    if distributed.world_size() == 1:
        return model
    device = model.detector.pixel_mean.device
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None, broadcast_buffers=False)


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
        self._unreported: list[tuple[int, list[Any], Tensor, Tensor]] = []  # iteration, ids of images, finite, bad

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
        self._unreported.append((iteration, [sample.get("image_id") for sample in samples], finite, bad))
        return bad

    def report(self) -> None:
        """Log the bad steps since the last call, with the images of all processes. Every process must call it after the same step.

        Raises:
            RunStoppedError: there were too many bad steps in a row.
        """
        steps, self._unreported = self._unreported, []
        if not steps:
            return
        *results, in_a_row = torch.stack([*(bad for *_, bad in steps), self.in_a_row]).tolist()
        for (iteration, images, finite, _), bad in zip(steps, results, strict=True):
            if bad:
                affected = [image for image, is_finite in zip(images, finite.tolist(), strict=True) if not is_finite]
                by_process = distributed.gather_objects((affected, images))
                affected, images = ([image for lists in by_process for image in lists[part]] for part in range(2))
                why = f"the loss or a gradient is not finite; the images of the batch are {', '.join(map(str, images))}"
                if affected:
                    why = f"the predictions are not finite for images {', '.join(map(str, affected))}"
                logger.warning("Iteration %d is skipped: %s", iteration, why)
        if in_a_row >= self.limit:
            raise RunStoppedError(
                f"{int(in_a_row)} steps in a row were not finite (SOLVER.MAX_BAD_STEPS {self.limit}; the log names their images)"
            )


@dataclass
class StepOptions:
    """Options of a training step.

    Attributes:
        clip_norm: bound on the norm of all gradients together; ``None`` for no clipping.
        accumulate: number of parts into which a process's samples are split. The result is the same as with one part, with three
            exceptions: norms with batch statistics; dropout and denoising, which draw random numbers part by part; and metrics,
            which are means over parts.
        amp_dtype: dtype of autocast; ``None`` for full precision.
        max_bad_steps: number of non-finite steps in a row that ends a run.
    """

    clip_norm: float | None = 0.1
    accumulate: int = 1
    amp_dtype: torch.dtype | None = None
    max_bad_steps: int = 10


class TrainStep:
    """A callable that takes training steps.

    Args:
        model: training model, such as :class:`cpvt_det.losses.TrainingModel`, or DDP around one.
        optimizer: fused optimizer of the detector's parameters. It changes nothing in a step if its ``found_inf`` is set.
        learning_rate: schedule that gives the factor by which the groups' learning rates are multiplied at an iteration.
        options: clipping, accumulation, precision.
        seed: seed of the run.
        ema: moving average of the weights, updated after every step; ``None`` for no average.

    Attributes:
        bad_steps: counter of skipped steps, read at log time.
        done: last iteration after which the weights are complete. ``None`` before the first iteration, and after an error while
            the weights were being changed.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        learning_rate: LRSchedule,
        options: StepOptions,
        seed: int = 0,
        ema: MovingAverage | None = None,
    ):
        self.model = model
        self.training_model = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.options = options
        self.seed = seed
        self.ema = ema
        self.done: int | None = None
        device = self.training_model.detector.pixel_mean.device
        self.bad_steps = NonFiniteGuard(options.max_bad_steps, device)
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.amp_dtype == torch.float16)
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]
        names = {id(parameter): name for name, parameter in self.training_model.detector.named_parameters()}
        self._names = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
        self._fits = False

    def state_dict(self) -> dict[str, Any]:
        """Optimiser and scaler, under detectron2's names, the optimiser's parameters in its order, and the count of bad steps."""
        return {
            "optimizer": self.optimizer.state_dict(),
            "parameters": self._names,
            "grad_scaler": self.scaler.state_dict(),
            "bad_steps": self.bad_steps.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore optimiser, scaler and count. A run that had no scaler may continue with one.

        Learning rates and weight decays stay as they are, and each parameter gets its own state back, whatever group it is in now.
        """
        of_name = {name: place for place, name in enumerate(state.get("parameters", self._names))}  # older files have no names
        saved, groups = state["optimizer"]["state"], self.optimizer.state_dict()["param_groups"]
        places = ((place, of_name.get(name)) for place, name in enumerate(self._names))
        of_place = {place: saved[before] for place, before in places if before in saved}
        self.optimizer.load_state_dict({"state": of_place, "param_groups": groups})
        if state.get("grad_scaler"):
            self.scaler.load_state_dict(state["grad_scaler"])
        self.bad_steps.load_state_dict(state["bad_steps"])

    @property
    def lr(self) -> float:
        """The highest current learning rate of any group."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def __call__(self, samples: Sequence[Sample], iteration: int) -> dict[str, Tensor]:
        """Take the training step of one iteration.

        Args:
            samples: this process's share of the batch.
            iteration: number of the step, from 0.

        Returns:
            ``total_loss``, every loss, every metric, ``grad_norm``, and ``skipped``, which is 1 for a skipped step. All are this
            process's values, as detached scalars on the device.

        Raises:
            ConfigError: a step does not fit into memory. On a CPU, only the first step is checked.
        """
        self.model.train()
        if not self._fits:
            largest = max(split_samples(samples, self.options.accumulate), key=len)
            require_memory(self.training_model.detector, largest, len(samples), self.options.amp_dtype)
            self._fits = True
        torch.manual_seed(distributed.mix_seed(self.seed, iteration, distributed.rank()))
        factor = self.learning_rate.factor(iteration)
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * factor
        self.optimizer.zero_grad(set_to_none=True)
        statistics = _running_statistics(self.training_model.detector)
        before = [buffer.clone() for buffer in statistics]
        try:
            with out_of_memory_explained(len(samples), self.options.accumulate):
                record, finite = self._backward(samples)
        except BaseException:  # for example because another process ended; restore the state after the previous step
            for buffer, old in zip(statistics, before, strict=True):
                buffer.copy_(old)
            raise
        self.done = None
        record["grad_norm"] = self._clip()
        bad = self.bad_steps.check(iteration, samples, finite, record["grad_norm"])
        # Not scaler.step: it would search for non-finite values again, and see only this process's gradients.
        self.optimizer.found_inf = bad.float()  # weights stay after a bad step, and the scale of float16 losses is halved
        self.optimizer.step()
        self.scaler.update()
        for buffer, old in zip(statistics, before, strict=True):
            if buffer.is_floating_point():
                buffer.copy_(torch.where(bad, old, buffer))
        if self.ema is not None:
            self.ema.update_parameters(self.training_model.detector, ~bad)
        self.done = iteration
        return {**record, "skipped": bad.float()}

    def _backward(self, samples: Sequence[Sample]) -> tuple[dict[str, Tensor], Tensor]:
        """Compute the gradients of all parts. Return summed losses and mean metrics, and (B,) bool, True for finite predictions."""
        parts = split_samples(samples, self.options.accumulate)
        normalizers = self.training_model.normalizers(samples) if len(parts) > 1 else None
        device = self.training_model.detector.pixel_mean.device
        record: dict[str, Tensor] = {}
        finite = []
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            wait = contextlib.nullcontext() if last or not hasattr(self.model, "no_sync") else self.model.no_sync()
            with wait:
                with torch.autocast(device.type, self.options.amp_dtype, enabled=self.options.amp_dtype is not None):
                    result = self.model(part, normalizers)
                total = sum(result.losses.values())
                # With NaN, all gradients are NaN and, after averaging, those of every process: all of them skip the step.
                is_finite = result.finite.all() & total.detach().isfinite()
                self.scaler.scale(total * torch.where(is_finite, 1.0, torch.nan)).backward()
            metrics = {name: value / len(parts) for name, value in result.metrics.items()}
            for name, value in {"total_loss": total, **result.losses, **metrics}.items():
                record[name] = record.get(name, 0) + value.detach()
            finite.append(result.finite)
        return record, torch.cat(finite)

    def _clip(self) -> Tensor:
        """Clip the gradients, and return their norm before clipping."""
        self.scaler.unscale_(self.optimizer)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        bound = float("inf") if self.options.clip_norm is None else self.options.clip_norm
        return nn.utils.clip_grad_norm_(parameters, bound).detach()


def _running_statistics(model: nn.Module) -> list[Tensor]:
    """Buffers that norms update in training: counters, and means and variances, which a single NaN would corrupt for good."""
    norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training]
    return [buffer for norm in norms for buffer in norm.buffers(recurse=False)]
