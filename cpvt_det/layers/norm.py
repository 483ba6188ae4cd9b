# SPDX-License-Identifier: Apache-2.0
"""Norms for padded maps, under the names that configs use.

If a padded batch is normalised over all cells, the result depends on the amount of padding: if there is a lot of padding, its zeros
dominate the mean and the variance. The norms here count only valid cells.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torchvision.ops import FrozenBatchNorm2d

from cpvt_det.common import distributed
from cpvt_det.common.errors import UnknownNameError


class MaskedBatchNorm2d(nn.BatchNorm2d):
    """Batch norm whose statistics come from valid cells only.

    Weights, running statistics and state dict are those of ``nn.BatchNorm2d``, and the arithmetic in evaluation is the same. With
    a single valid cell, the variance is 0, and the running variance is updated without the factor n / (n - 1). With no valid
    cell, the running statistics do not change.
    """

    synchronised = False

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalise.

        Args:
            x: (B, C, H, W) float; must also be finite in padded cells.
            valid: (B, 1, H, W) bool, True = counted; ``None`` counts every cell.

        Returns:
            (B, C, H, W), all cells normalised with the statistics of the valid ones.
        """
        if not self.training:
            return super().forward(x)
        has_running = self.track_running_stats and self.momentum is not None
        if valid is None and not self.synchronised and x[:, 0].numel() > 1 and has_running:
            # torch's own batch norm. Maps are passed as rows, because torch 2.15's CPU gradient is wrong for channels-last views of
            # width 1. Maps with channels first and a larger width are passed as they are, because rows would need a copy, which
            # takes a third of a network's time. Autograd stores the running statistics that it is given. Our running statistics
            # change in place, so autograd gets copies of them.
            mean, variance = self.running_mean.clone(), self.running_var.clone()
            is_plain = x.ndim == 4 and x.shape[-1] > 1 and x.is_contiguous()
            is_plain = is_plain and not x.is_contiguous(memory_format=torch.channels_last)
            cells = x if is_plain else x.movedim(1, -1).reshape(-1, x.shape[1])
            out = F.batch_norm(cells, mean, variance, self.weight, self.bias, True, self.momentum, self.eps)
            with torch.no_grad():
                self.num_batches_tracked += 1
                self.running_mean.copy_(mean)
                self.running_var.copy_(variance)
            return out if is_plain else out.view(len(x), *x.shape[2:], -1).movedim(-1, 1)
        counted = x.new_ones(x[:, :1].shape) if valid is None else valid
        over_processes = self.synchronised and distributed.is_initialized()
        out, mean, variance, count = _Normalise.apply(x, counted, self.weight, self.bias, self.eps, over_processes)
        if self.track_running_stats:
            self.num_batches_tracked += 1
            momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
            momentum = momentum * (count > 0).to(self.running_mean.dtype)
            unbiased = variance * (count / (count - 1).clamp(min=1))
            self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
            self.running_var.lerp_(unbiased.to(self.running_var.dtype), momentum)
        return out


class MaskedSyncBatchNorm2d(MaskedBatchNorm2d):
    """:class:`MaskedBatchNorm2d` with statistics over all processes together."""

    synchronised = True


class MaskedGroupNorm(nn.GroupNorm):
    """Group norm whose statistics, for each image, come from its valid cells only."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Normalise; arguments and result as in :meth:`MaskedBatchNorm2d.forward`."""
        if valid is None and x[0].numel() == self.num_groups:  # one number per group, which torch's norm refuses in training
            valid = x.new_ones(x[:, :1].shape)
        if valid is None:
            # torch 2.15's CPU kernel for channels_last loses digits where a mean is large: errors of 3e-4 instead of 4e-6.
            return super().forward(x.contiguous())
        weight = valid.to(torch.promote_types(x.dtype, torch.float32))[:, :, None]  # (B, 1, 1, H, W)
        groups = x.unflatten(1, (self.num_groups, -1))  # (B, C, H, W) -> (B, groups, C / groups, H, W)
        count = (weight.sum((2, 3, 4), keepdim=True) * groups.shape[2]).clamp(min=1)
        mean = (groups * weight).sum((2, 3, 4), keepdim=True) / count
        variance = ((groups - mean).square() * weight).sum((2, 3, 4), keepdim=True) / count
        scale = self.weight.view(self.num_groups, -1) * torch.rsqrt(variance + self.eps).flatten(2)  # (B, groups, C / groups)
        shift = self.bias.view(self.num_groups, -1) - mean.flatten(2) * scale
        return x * scale.flatten(1)[..., None, None] + shift.flatten(1)[..., None, None]


class NoNorm(nn.Identity):
    """The identity, called like a norm."""

    def forward(self, x: Tensor, valid: Tensor | None = None) -> Tensor:
        """Return ``x``."""
        return x


def make_norm(name: str, channels: int) -> nn.Module:
    """A norm for (B, C, H, W) maps, called with the map and, if cells are padded, the mask of the valid cells.

    Args:
        name: ``BN``, ``SyncBN``, ``GN`` (32 groups, or the largest smaller number that divides the channels) or ``none``.
        channels: C.

    Raises:
        UnknownNameError: an unknown name.
    """
    if name not in NORMS:
        raise UnknownNameError("norm", name, NORMS)
    return NORM_LAYERS[name](channels)


def folded(convolution: nn.Conv2d, norm: nn.BatchNorm2d | FrozenBatchNorm2d) -> tuple[Tensor, Tensor]:
    """The weight and bias of a convolution after folding in the norm that follows it. The norm is a batch norm in evaluation mode
    or a frozen norm.
    """
    weight, bias = convolution.weight, convolution.bias
    scale = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
    shift = norm.bias - norm.running_mean * scale
    return weight * scale[:, None, None, None], shift if bias is None else shift + bias * scale


@torch.no_grad()
def fold_norm(convolution: nn.Conv2d, norm: nn.BatchNorm2d) -> None:
    """Fold the norm that follows a convolution into its weight and bias, in place, for inference; arguments as in
    :func:`folded`."""
    weight, bias = folded(convolution, norm)
    convolution.weight.copy_(weight)
    convolution.bias = nn.Parameter(bias)


def group_count(channels: int) -> int:
    """The largest number of groups up to 32 that divides the channels."""
    return max(groups for groups in range(1, 33) if channels % groups == 0)


NORM_LAYERS: dict[str, Callable[[int], nn.Module]] = {
    "FrozenBN": FrozenBatchNorm2d,
    "BN": MaskedBatchNorm2d,
    "SyncBN": MaskedSyncBatchNorm2d,
    "GN": lambda channels: MaskedGroupNorm(group_count(channels), channels),
    "none": lambda channels: NoNorm(),
}
"""Name of a norm in a config -> function that builds it for a number of channels."""
NORMS = ("BN", "SyncBN", "GN", "none")
BACKBONE_NORMS = ("FrozenBN", "BN", "SyncBN", "GN")


class _Normalise(torch.autograd.Function):
    """Batch norm that normalises every cell with the statistics of the cells that count. Half-precision values are summed in
    float32.

    The gradient is written by hand, because autograd would store four maps for the backward pass instead of one.
    """

    @staticmethod
    def forward(ctx, x: Tensor, valid: Tensor, weight: Tensor, bias: Tensor, eps: float, over_processes: bool):
        """Arguments as in :meth:`MaskedBatchNorm2d.forward`; returns the result, mean (C,), biased variance (C,) and count ()."""
        rows = _rows(x)
        counted = _rows(valid.to(rows.dtype))
        count = counted.sum()
        safe = count.clamp(min=1)
        mean = (rows * counted).sum(0) / safe
        # Two passes: the mean of squares minus the square of the mean cancels in float32.
        variance = ((rows - mean).square_() * counted).sum(0) / safe
        if over_processes:  # one all-reduce, in float64, because the one-pass formula loses too many digits in float32
            mean, variance, count = mean.double(), variance.double(), count.double()
            sums = distributed.all_reduce_sum(torch.cat((count * mean, count * (variance + mean.square()), count[None])))
            total, square, count = sums.split((len(mean), len(mean), 1))
            count = count.squeeze(0)
            mean = total / count.clamp(min=1)
            variance = (square / count.clamp(min=1) - mean.square()).clamp(min=0)
        inverse = torch.rsqrt(variance + eps).to(rows.dtype)
        # Not from the rows: a map that is a view of them could not be written to in place, as the backbone does.
        centred = x.to(rows.dtype) - mean.to(rows.dtype)[:, None, None]
        out = torch.addcmul(bias[:, None, None], centred, (weight * inverse)[:, None, None]).to(x.dtype)
        ctx.save_for_backward(x, valid, weight, mean.to(rows.dtype), inverse, count)
        ctx.over_processes = over_processes
        ctx.mark_non_differentiable(mean, variance, count)
        return out, mean, variance, count

    @staticmethod
    def backward(ctx, grad: Tensor, *_: None):
        """With g the gradient and n the normalised cells: w / std * (g - counted / count * (sum g + n * sum g n))."""
        x, valid, weight, mean, inverse, count = ctx.saved_tensors
        grad, normalised = _rows(grad), (_rows(x) - mean) * inverse
        counted = _rows(valid.to(grad.dtype))
        of_bias, of_weight = grad.sum(0), (grad * normalised).sum(0)
        sums = torch.stack((of_bias, of_weight))
        sums = (distributed.all_reduce_sum(sums) if ctx.over_processes else sums) / count.clamp(min=1).to(sums.dtype)
        of_rows = torch.addcmul(sums[0], normalised, sums[1]).mul_(counted).neg_().add_(grad).mul_(weight * inverse)
        of_x = of_rows.view(len(x), *x.shape[2:], -1).movedim(-1, 1).to(x.dtype)  # (B * H * W, C) -> (B, C, H, W)
        return of_x, None, of_weight.to(weight.dtype), of_bias.to(weight.dtype), None, None


def _rows(x: Tensor) -> Tensor:
    """(B, C, H, W) -> (B * H * W, C), because sums over such rows are fastest. A channels-last map is not copied."""
    return x.movedim(1, -1).reshape(-1, x.shape[1]).to(torch.promote_types(x.dtype, torch.float32))
