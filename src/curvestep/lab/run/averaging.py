"""Averaged SGD that starts when validation stops improving (NT-ASGD of AWD-LSTM)."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim.swa_utils import AveragedModel

from curvestep._checks import check_count


def no_longer_improves(losses: list[float], *, window: int = 5) -> bool:
    """Whether the latest loss is worse than the best of all that are more than ``window`` checks older.

    Example:
        >>> no_longer_improves([5.0, 4.0, 4.1, 4.2], window=2)
        False
        >>> no_longer_improves([4.0, 3.9, 3.8, 4.1], window=2)
        True
    """
    *before, latest = losses
    return len(before) > window and latest > min(before[: -check_count("window", window)])


class NonMonotoneAveraging:
    """Keeps the mean of the iterates from the moment that validation no longer improves.

    Training goes on as before; only what is evaluated and kept at the end changes from the last iterate to
    the mean. This is averaged SGD with a constant step, for any optimizer: ``torch.optim.ASGD`` with
    ``lambd=0, t0=0`` gives the same mean for plain SGD.

    For the published fine-tuning stage, start again from the saved mean with ``start=True`` and end the run
    when `finished`.

    Args:
        model: The model in training, not wrapped.
        window: Number of latest validation losses that do not count as the best so far.
        start: Average from the first step.

    Example:
        >>> from torch import nn
        >>> averaging = NonMonotoneAveraging(nn.Linear(2, 1), window=1)
        >>> [averaging.after_validation(loss) for loss in (3.0, 2.0, 4.0)]
        [False, False, True]
    """

    def __init__(self, model: nn.Module, *, window: int = 5, start: bool = False) -> None:
        self._model = model
        self.window = check_count("window", window)
        self.losses: list[float] = []
        self.average: AveragedModel | None = AveragedModel(model) if start else None
        self.finished = False

    def after_step(self) -> None:
        """Count the model's parameters into the mean, if averaging has begun."""
        if self.average is not None:
            self.average.update_parameters(self._model)

    def after_validation(self, loss: float) -> bool:
        """Take note of a validation loss; True where averaging begins now."""
        self.losses.append(float(loss))
        if not no_longer_improves(self.losses, window=self.window):
            return False
        if self.average is not None:
            self.finished = True
            return False
        self.average = AveragedModel(self._model)
        # As published, the losses of the averaged model are compared among themselves and with the past.
        return True

    @property
    def evaluated(self) -> nn.Module:
        """The model to validate and keep: the mean once there is one, the model itself before."""
        if self.average is None or int(self.average.n_averaged) == 0:
            return self._model
        return self.average.module

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs."""
        average = None if self.average is None else self.average.state_dict()
        return {"losses": list(self.losses), "finished": self.finished, "average": average}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from `state_dict`."""
        self.losses = [float(loss) for loss in state["losses"]]
        self.finished = bool(state["finished"])
        self.average = None
        if state["average"] is not None:
            self.average = AveragedModel(self._model)
            self.average.load_state_dict(state["average"])
