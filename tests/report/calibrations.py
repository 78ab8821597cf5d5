"""A calibration to keep, read and show."""

import torch

from curvestep.calibration.calibrate import calibrate


def make_calibration(**options):
    """A real calibration of a small model whose batches differ in curvature."""
    model = torch.nn.Linear(3, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 0.5)
    scales = [1.0, 1.3, 1.7, 1.1, 1.2, 1.4]
    return calibrate(model, lambda scale: scale * model.weight.square().sum().cosh(), scales, **options)
