"""ResNet20 of He et al. (2016), for 32 x 32 images."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

Norm = Callable[[int], nn.Module]


class Block(nn.Module):
    """Two 3 x 3 convolutions and a way around them (He et al., option A).

    Where the shape changes, the way around is every second pixel with zeros for the new channels.
    """

    def __init__(self, before: int, after: int, *, stride: int, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, after, 3, stride, 1, bias=False)
        self.norm1 = norm(after)
        self.conv2 = nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norm2 = norm(after)
        self.stride = stride
        self.new_channels = after - before

    def forward(self, x: Tensor) -> Tensor:
        """The block's output, for images shaped (images, channels, height, width)."""
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self._shortcut(x))

    def _shortcut(self, x: Tensor) -> Tensor:
        if not self.new_channels:
            return x
        half = self.new_channels // 2
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, half, self.new_channels - half))


class ResNet20(nn.Module):
    """ResNet20 of He et al. for CIFAR-10: 3 stages of 3 blocks, 16 to 64 channels, 269,722 parameters.

    Each stage but the first halves the image. ``norm`` makes a batch norm of so many channels;
    `GlobalBatchNorm2d` is the one over all processes.

    Example:
        >>> import torch
        >>> ResNet20()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    def __init__(self, *, norm: Norm = nn.BatchNorm2d) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 16, 3, 1, 1, bias=False)
        self.norm = norm(16)
        stages = []
        for before, width, stride in ((16, 16, 1), (16, 32, 2), (32, 64, 2)):
            stages.append(Block(before, width, stride=stride, norm=norm))
            stages += [Block(width, width, stride=1, norm=norm) for _ in range(2)]
        self.blocks = nn.Sequential(*stages)
        self.linear = nn.Linear(64, 10)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the classes, for normalised images shaped (images, 3, height, width)."""
        x = F.relu(self.norm(self.conv(x)))
        return self.linear(self.blocks(x).mean(dim=(2, 3)))


class GlobalBatchNorm2d(nn.BatchNorm2d):
    r"""Batch norm with mean and variance over the batches of all processes together.

    .. math::
        \mu = \frac{1}{N}\sum x, \qquad \sigma^2 = \frac{1}{N}\sum (x - \mu)^2

    with both sums over every process, in two passes so that nothing cancels. Torch's own ``SyncBatchNorm``
    does not run on CPUs.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Normalised input; in evaluation mode exactly ``BatchNorm2d``."""
        if not self.training:
            return super().forward(input)
        count = input.numel() / input.shape[1] * dist.get_world_size()
        summed: Any = _AllReduce.apply
        mean = summed(input.sum((0, 2, 3))) / count
        centred = input - mean.view(1, -1, 1, 1)
        variance = summed(centred.square().sum((0, 2, 3))) / count
        self._update_running(mean.detach(), variance.detach() * (count / (count - 1)))
        scale = torch.rsqrt(variance + self.eps) * self.weight
        return centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)

    @torch.no_grad()
    def _update_running(self, mean: Tensor, variance: Tensor) -> None:
        buffers: Any = self  # which are there by torch's defaults
        buffers.num_batches_tracked.add_(1)
        buffers.running_mean.lerp_(mean, self.momentum)
        buffers.running_var.lerp_(variance, self.momentum)


class _AllReduce(torch.autograd.Function):
    """The sum over processes; every process's loss depends on it, so its gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total)
        return total
