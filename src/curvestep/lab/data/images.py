"""Labelled images as whole tensors, their normalisation and augmentation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn import functional as F


@dataclass(frozen=True, kw_only=True, eq=False)
class Images:
    """A set of labelled images, held in memory."""

    name: str  # short name, for file names and titles
    train_x: Tensor  # training images, uint8, shaped (images, channels, height, width)
    train_y: Tensor  # their classes, int64
    test_x: Tensor  # test images, uint8
    test_y: Tensor  # their classes, int64
    classes: tuple[str, ...]  # the name of each class
    source: str  # where the images came from, in words for the report

    @cached_property
    def mean_and_std(self) -> Tensor:
        """Mean and standard deviation of each channel of the training images, on the scale 0 to 1."""
        whole = self.train_x.permute(1, 0, 2, 3).flatten(1)
        # Counting the 256 values keeps the sums exact and needs no floating copy of all images.
        counts = torch.stack([torch.bincount(channel.int(), minlength=256) for channel in whole]).double()
        levels = torch.arange(256, dtype=torch.float64) / 255
        mean = counts @ levels / whole.shape[1]
        variance = counts @ levels**2 / whole.shape[1] - mean**2
        return torch.stack([mean, variance.clamp(min=0).sqrt()])


def normalise(images: Images, x: Tensor) -> Tensor:
    r"""Pixels with mean 0 and deviation 1 over the training set, channel by channel.

    .. math::
        z = (x / 255 - \mu) / \sigma

    In the default float type, on the device and in the memory format of ``x``.
    """
    x = x.to(torch.get_default_dtype())
    mean, std = images.mean_and_std.to(x).view(2, 1, -1, 1, 1)
    return (x / 255 - mean) / std


def augment(x: Tensor, generator: torch.Generator, *, padding: int = 4) -> Tensor:
    """Each image shifted by up to ``padding`` pixels (black comes in at the edge) and flipped half the time.

    The random crop and flip of He et al., for a whole batch of uint8 images at once; the same state of the
    generator gives the same images.

    Example:
        >>> x = torch.arange(12, dtype=torch.uint8).view(1, 3, 2, 2)
        >>> augment(x, torch.Generator().manual_seed(0), padding=0).shape
        torch.Size([1, 3, 2, 2])
    """
    num, _, height, width = x.shape
    top = torch.randint(0, 2 * padding + 1, (num, 1), generator=generator)
    left = torch.randint(0, 2 * padding + 1, (num, 1), generator=generator)
    flip = torch.rand(num, 1, generator=generator) < 0.5
    rows, columns = top + torch.arange(height), torch.arange(width)
    columns = left + torch.where(flip, columns.flip(0), columns)
    padded = F.pad(x, (padding,) * 4).permute(0, 2, 3, 1)
    picked = padded[torch.arange(num)[:, None, None], rows[:, :, None], columns[:, None, :]]
    return picked.permute(0, 3, 1, 2).contiguous()


def first_of_each_class(y: Tensor, count: int) -> Tensor:
    """Positions of the first ``count`` members of each class, ascending."""
    one_hot = F.one_hot(y)
    rank = (one_hot.cumsum(0) * one_hot).sum(1)
    return (rank <= count).nonzero().flatten()


def load_digits() -> Images:
    """The stand-in for CIFAR-10 that is always there: scikit-learn's 1,797 handwritten digits.

    The 8 x 8 grey images are magnified four times and repeated over three channels, so every model for
    CIFAR-10 takes them. The first 1,437 are for training, the last 360 (by other writers) for testing.
    """
    from sklearn.datasets import load_digits as bundled

    features, target = bundled(return_X_y=True)
    levels = torch.as_tensor(features).view(-1, 1, 8, 8)  # 0 to 16
    pixels = (levels * (255 / 16)).round().to(torch.uint8)
    x = pixels.repeat_interleave(4, 2).repeat_interleave(4, 3).repeat(1, 3, 1, 1)
    y = torch.as_tensor(target).long()
    return Images(
        name="digits",
        train_x=x[:1437],
        train_y=y[:1437],
        test_x=x[1437:],
        test_y=y[1437:],
        classes=tuple(map(str, range(10))),
        source="stand-in for CIFAR-10: the digits of scikit-learn, magnified to 3 x 32 x 32",
    )
