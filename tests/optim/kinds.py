"""The paths of an update, and parameters with gradients that twins share."""

import pytest
import torch
from torch import nn

PATHS = {"default": {}, "foreach": {"foreach": True}, "loop": {"foreach": False}, "fused": {"fused": True}}
every_path = pytest.mark.parametrize("path", PATHS.values(), ids=PATHS)


def parameters(*shapes, dtype=None, scale=1.0):
    """Random parameters of these shapes, with gradients of this scale."""
    params = [nn.Parameter(torch.randn(shape, dtype=dtype)) for shape in shapes]
    for p in params:
        p.grad = scale * torch.randn_like(p)
    return params


def copies(params):
    """The same parameters with the same gradients, in memory of their own."""
    twins = [nn.Parameter(p.detach().clone()) for p in params]
    for p, twin in zip(params, twins, strict=True):
        twin.grad = p.grad.clone()
    return twins


def set_gradients(k, *lists, scale=1.0):
    """The same random gradients for each list, where it is; every other step ten times as large."""
    generator = torch.Generator().manual_seed(k)
    for same in zip(*lists, strict=True):
        size = scale * 10 ** (k % 2)
        g = size * torch.randn(same[0].shape, dtype=same[0].dtype, generator=generator)
        for p in same:
            p.grad = g.to(p.device, copy=True)


def values(params):
    """What the parameters are now."""
    return [p.detach().clone() for p in params]


def assert_same(before, after):
    """Equal to the last bit."""
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
