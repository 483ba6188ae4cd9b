# SPDX-License-Identifier: Apache-2.0
"""Norms for padded maps, by the names that configs use.

A padded batch normalised over all its cells depends on how much padding it got: with much of it the zeros dominate mean and
variance. The norms here count valid cells alone.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cpvt_det import distributed
from cpvt_det.errors import UnknownNameError

NORMS = ("BN", "SyncBN", "GN", "none")


class MaskedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose statistics come from valid cells only.

    Weights, running statistics and state dict are those of ``nn.BatchNorm2d``; in evaluation, so is the arithmetic. With one
    valid cell the variance is 0 and the running variance takes it without the factor n / (n - 1); with none the running
    statistics stay as they are.
    """

    synchronised = False

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalise.

        Args:
            x: (B, C, H, W) float; finite under the padding.
            valid: (B, 1, H, W) bool, True = counted; ``None`` counts every cell.

        Returns:
            (B, C, H, W), every cell normalised, padded ones with the statistics of the valid.
        """
        if not self.training:
            return super().forward(x)
        if valid is None and not self.synchronised and x[:, 0].numel() > 1 and self.momentum is not None:
            return self._over_all(x)
        mean, variance, count = self._statistics(x, valid)
        self._update_running(mean.detach(), variance.detach(), count)
        scale = self.weight * torch.rsqrt(variance + self.eps).to(x.dtype)
        shift = self.bias - mean.to(x.dtype) * scale
        return x * scale[:, None, None] + shift[:, None, None]

    def _over_all(self, x: Tensor) -> Tensor:
        """torch's own. Autograd keeps the running statistics that it is given, and those of ours change in place: so, copies."""
        if not self.track_running_stats:
            return super().forward(x)
        mean, variance = self.running_mean.clone(), self.running_var.clone()
        out = F.batch_norm(x, mean, variance, self.weight, self.bias, True, self.momentum, self.eps)
        with torch.no_grad():
            self.num_batches_tracked += 1
            self.running_mean.copy_(mean)
            self.running_var.copy_(variance)
        return out

    def _statistics(self, x: Tensor, valid: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Mean (C,), biased variance (C,) and number of valid cells (), over all processes where synchronised."""
        weight = torch.ones_like(x[:, :1]) if valid is None else valid
        weight = weight.to(_accumulation_dtype(x))
        count = weight.sum()
        safe = count.clamp(min=1)
        mean = (x * weight).sum((0, 2, 3)) / safe
        # Two passes: the mean of squares less the square of the mean cancels in float32.
        variance = ((x - mean[:, None, None]).square() * weight).sum((0, 2, 3)) / safe
        if self.synchronised and distributed.is_initialized():
            return _over_processes(mean, variance, count)
        return mean, variance, count

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        if not self.track_running_stats:
            return
        self.num_batches_tracked += 1
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        momentum = momentum * (count > 0).to(self.running_mean.dtype)
        unbiased = variance * (count / (count - 1).clamp(min=1))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)


class MaskedSyncBatchNorm2d(MaskedBatchNorm2d):
    """:class:`MaskedBatchNorm2d` with the statistics of all processes together."""

    synchronised = True


class MaskedGroupNorm(nn.GroupNorm):
    """Group norm whose statistics, for each image, come from its valid cells only."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalise; arguments and result as in :meth:`MaskedBatchNorm2d.forward`."""
        if valid is None:
            # torch 2.15's CPU kernel for channels_last loses digits where a mean is large: errors of 3e-4 instead of 4e-6.
            return super().forward(x.contiguous())
        weight = valid.to(_accumulation_dtype(x))[:, :, None]  # (B, 1, 1, H, W)
        groups = x.unflatten(1, (self.num_groups, -1))  # (B, C, H, W) -> (B, groups, C / groups, H, W)
        count = (weight.sum((2, 3, 4), keepdim=True) * groups.shape[2]).clamp(min=1)
        mean = (groups * weight).sum((2, 3, 4), keepdim=True) / count
        variance = ((groups - mean).square() * weight).sum((2, 3, 4), keepdim=True) / count
        scale = self.weight.view(self.num_groups, -1) * torch.rsqrt(variance + self.eps).flatten(2)  # (B, groups, C / groups)
        shift = self.bias.view(self.num_groups, -1) - mean.flatten(2) * scale
        return x * scale.flatten(1)[..., None, None] + shift.flatten(1)[..., None, None]


class NoNorm(nn.Identity):
    """No norm, with the call of one."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return ``x``."""
        return x


def make_norm(name: str, channels: int) -> nn.Module:
    """A norm for (B, C, H, W) maps, called with the map and, where cells are padded, the mask of the valid ones.

    Args:
        name: ``BN``, ``SyncBN``, ``GN`` (32 groups, or as many as divide the channels) or ``none``.
        channels: C.

    Raises:
        UnknownNameError: another name.
    """
    if name == "BN":
        return MaskedBatchNorm2d(channels)
    if name == "SyncBN":
        return MaskedSyncBatchNorm2d(channels)
    if name == "GN":
        return MaskedGroupNorm(group_count(channels), channels)
    if name == "none":
        return NoNorm()
    raise UnknownNameError("norm", name, NORMS)


def group_count(channels: int) -> int:
    """The largest number of groups up to 32 that divides the channels."""
    return max(groups for groups in range(1, 33) if channels % groups == 0)


def _over_processes(mean: Tensor, variance: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Join the statistics of all processes by one differentiable all-reduce of sum, sum of squares and count.

    In float64, since here one pass has to do; a process without a valid cell adds nothing.
    """
    from torch.distributed.nn.functional import all_reduce  # needs torch built with distributed

    mean, variance, count = mean.double(), variance.double(), count.double().detach()
    sums = torch.cat((count * mean, count * (variance + mean.square()), count[None]))
    total, square, count = all_reduce(sums).split((len(mean), len(mean), 1))
    count = count.squeeze(0).detach()
    mean = total / count.clamp(min=1)
    return mean, (square / count.clamp(min=1) - mean.square()).clamp(min=0), count


def _accumulation_dtype(x: Tensor) -> torch.dtype:
    return torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype
