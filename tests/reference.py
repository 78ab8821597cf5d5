"""Slow twins: the formulas as they stand, one number or one tensor at a time."""

import math

import torch


def reference_norm(tensors):
    """Euclidean norm in float64, in one go."""
    return math.sqrt(sum(float((t.detach().to_dense().abs().double() ** 2).sum()) for t in tensors))


def exact_clip_(params, max_norm):
    """`clip_grad_norm_` without the 1e-6 that it adds to the norm."""
    grads = [p.grad for p in params if p.grad is not None]
    norm = reference_norm(grads)
    for grad in grads:
        grad *= min(1.0, max_norm / norm) if norm else 1.0
    return norm


class ReferenceSGD:
    """Clipped or normalized SGD for a list of parameters, written from the formula."""

    def __init__(
        self,
        params,
        lr,
        *,
        coefficient,
        momentum=0.0,
        dampening=0.0,
        weight_decay=0.0,
        nesterov=False,
        maximize=False,
        clip="gradient",
    ):
        self.params = list(params)
        self.lr, self.coefficient, self.clip = lr, coefficient, clip
        self.momentum, self.dampening, self.nesterov = momentum, dampening, nesterov
        self.weight_decay, self.maximize = weight_decay, maximize
        self.buffers = {}

    @torch.no_grad()
    def step(self):
        sign = -1.0 if self.maximize else 1.0
        grads = [p.grad.clone() for p in self.params]
        if self.clip == "momentum" and self.momentum:
            directions = [self.averaged(p, g) for p, g in zip(self.params, grads, strict=True)]
            c = self.coefficient(reference_norm(directions))
            for p, d in zip(self.params, directions, strict=True):
                p -= self.lr * (sign * c * d + self.weight_decay * p)
            return
        c = self.coefficient(reference_norm(grads))
        for p, g in zip(self.params, grads, strict=True):
            d = sign * c * g + self.weight_decay * p
            if self.momentum:
                d = self.averaged(p, d)
            p -= self.lr * d

    def averaged(self, p, d):
        if p in self.buffers:
            self.buffers[p] = self.momentum * self.buffers[p] + (1 - self.dampening) * d
        else:
            self.buffers[p] = d.clone()
        return d + self.momentum * self.buffers[p] if self.nesterov else self.buffers[p]


def quantile_line_by_enumeration(g, smoothness, *, quantile):
    """(L0, L1) >= 0 of least check loss, by trying every corner: pairs of points, single points, zero."""
    lines = [(0.0, 0.0)]
    lines += [(y, 0.0) for y in smoothness]
    lines += [(0.0, y / x) for x, y in zip(g, smoothness, strict=True) if x > 0]
    for i in range(len(g)):
        for j in range(i):
            if g[i] != g[j]:
                slope = (smoothness[i] - smoothness[j]) / (g[i] - g[j])
                lines.append((smoothness[i] - slope * g[i], slope))

    def loss(line):
        residuals = [y - line[0] - line[1] * x for x, y in zip(g, smoothness, strict=True)]
        return sum(max(quantile * r, (quantile - 1) * r) for r in residuals)

    allowed = [line for line in lines if line[0] >= -1e-12 and line[1] >= -1e-12]
    return min(allowed, key=loss), loss
