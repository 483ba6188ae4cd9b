# SPDX-License-Identifier: Apache-2.0
"""One training step: samples -> losses -> gradients -> new weights. Both runners take it.

The global random state is set from (seed, iteration, process) before every step, so dropout repeats in a resumed run, and in the
other runner, without being saved.
"""

import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from cpvt_det import distributed
from cpvt_det.data.loader import mix_seed
from cpvt_det.data.mapper import Sample
from cpvt_det.losses import Losses, Normalizers, SetCriterion
from cpvt_det.solver.schedule import LearningRate
from cpvt_det.structures import Targets


class TrainingModel(nn.Module):
    """A detector and its criterion as one module, so that one call of a wrapper (DDP) makes the losses.

    Args:
        detector: its state dict is what checkpoints hold.
        criterion: without parameters.
    """

    def __init__(self, detector: nn.Module, criterion: SetCriterion):
        super().__init__()
        self.detector = detector
        self.criterion = criterion

    def forward(self, samples: Sequence[Sample], normalizers: Normalizers | None = None) -> Losses:
        """The losses of samples with ``image`` and ``targets``; ``normalizers`` as in :class:`SetCriterion`."""
        return compute_losses(self.detector, self.criterion, samples, normalizers)


def wrap_for_processes(model: TrainingModel) -> nn.Module:
    """DDP where there are several processes, on GPUs or CPUs; the model itself in one."""
    if distributed.world_size() == 1:
        return model
    device = model.detector.pixel_mean.device
    return DistributedDataParallel(model, device_ids=[device.index] if device.type == "cuda" else None, broadcast_buffers=False)


def compute_losses(
    detector: nn.Module, criterion: SetCriterion, samples: Sequence[Sample], normalizers: Normalizers | None = None
) -> Losses:
    """Samples -> losses, in one process.

    Args:
        detector: any detector with ``preprocess``.
        criterion: of the same classification.
        samples: each with ``image`` (3, h, w) in [0, 255] and ``targets``.
        normalizers: of the whole step, where these samples are a part of it.
    """
    batch = detector.preprocess([sample["image"] for sample in samples])
    targets = [sample["targets"].to(batch.images.device) for sample in samples]
    predictions = detector(batch.images, batch.padding_mask)
    return criterion(predictions, targets, normalizers)


@dataclass
class StepOptions:
    """How a step is taken.

    Attributes:
        clip_norm: bound on the norm of all gradients together; ``None`` for no clipping.
        accumulate: parts that a process's samples are worked through in; the result is that of one part, but for norms that look
            at the batch and for metrics, which are means over parts.
        amp_dtype: of autocast; ``None`` for full precision.
    """

    clip_norm: float | None = 0.1
    accumulate: int = 1
    amp_dtype: torch.dtype | None = None


class TrainStep:
    """Takes steps.

    Args:
        model: a :class:`TrainingModel`, or DDP around one.
        optimizer: over the detector's parameters.
        learning_rate: factor on the groups' learning rates at this point.
        options: clipping, accumulation, precision.
        seed: of the run.
        ema: updated after every step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        learning_rate: LearningRate,
        options: StepOptions,
        seed: int = 0,
        ema: AveragedModel | None = None,
    ):
        self.model = model
        self.training_model: TrainingModel = model.module if isinstance(model, DistributedDataParallel) else model
        self.optimizer = optimizer
        self.learning_rate = learning_rate
        self.options = options
        self.seed = seed
        self.ema = ema
        device = self.training_model.detector.pixel_mean.device
        self.scaler = torch.amp.GradScaler(device.type, enabled=options.amp_dtype == torch.float16)
        self._base_lrs = [group["lr"] for group in optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Optimiser and scaler, under detectron2's names."""
        return {"optimizer": self.optimizer.state_dict(), "grad_scaler": self.scaler.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take both; a run without a scaler may go on with one."""
        self.optimizer.load_state_dict(state["optimizer"])
        if state.get("grad_scaler"):
            self.scaler.load_state_dict(state["grad_scaler"])

    @property
    def lr(self) -> float:
        """The current learning rate of the group with the highest."""
        return max(group["lr"] for group in self.optimizer.param_groups)

    def __call__(self, samples: Sequence[Sample], iteration: int) -> dict[str, Tensor]:
        """Take the step of one iteration.

        Args:
            samples: this process's share of the batch.
            iteration: from 0.

        Returns:
            ``total_loss``, every loss, every metric and ``grad_norm``: detached scalars on the device, of this process.
        """
        self.model.train()
        torch.manual_seed(mix_seed(self.seed, iteration, distributed.rank()))
        factor = self.learning_rate.factor(iteration)
        for group, base_lr in zip(self.optimizer.param_groups, self._base_lrs, strict=True):
            group["lr"] = base_lr * factor
        self.optimizer.zero_grad(set_to_none=True)
        record = self._backward(samples)
        record["grad_norm"] = self._clip()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        if self.ema is not None:
            self.ema.update_parameters(self.training_model.detector)
        return record

    def _backward(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        """Gradients of all parts; the sums of their losses, the means of their metrics."""
        parts = _split(samples, self.options.accumulate)
        normalizers = self._normalizers(samples) if len(parts) > 1 else None
        device = self.training_model.detector.pixel_mean.device
        record: dict[str, Tensor] = {}
        for number, part in enumerate(parts):
            last = number == len(parts) - 1
            wait = contextlib.nullcontext() if last or not hasattr(self.model, "no_sync") else self.model.no_sync()
            with wait:
                with torch.autocast(device.type, self.options.amp_dtype, enabled=self.options.amp_dtype is not None):
                    result = self.model(part, normalizers)
                total = sum(result.losses.values())
                self.scaler.scale(total).backward()
            metrics = {name: value / len(parts) for name, value in result.metrics.items()}
            for name, value in {"total_loss": total, **result.losses, **metrics}.items():
                record[name] = record.get(name, 0) + value.detach()
        return record

    def _normalizers(self, samples: Sequence[Sample]) -> Normalizers:
        detector, criterion = self.training_model.detector, self.training_model.criterion
        targets: list[Targets] = [sample["targets"].to(detector.pixel_mean.device) for sample in samples]
        return criterion.normalizers(targets, detector.num_queries)

    def _clip(self) -> Tensor:
        """Bound the gradients; the norm they had."""
        self.scaler.unscale_(self.optimizer)
        parameters = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        bound = float("inf") if self.options.clip_norm is None else self.options.clip_norm
        return nn.utils.clip_grad_norm_(parameters, bound).detach()


def _split(samples: Sequence[Sample], parts: int) -> list[Sequence[Sample]]:
    """Samples in parts of nearly equal length, none of them empty."""
    parts = min(parts, len(samples))
    borders = [round(number * len(samples) / parts) for number in range(parts + 1)]
    return [samples[start:end] for start, end in itertools.pairwise(borders)]
