"""Fused AdamW, mixed precision and clipping together, where Lightning's own clipping raises."""

import warnings

import pytest
import torch

pytest.importorskip("lightning", reason="needs the extra `lightning`")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from lightning.pytorch.plugins import MixedPrecision

import curvestep as cs
from curvestep.integrations.lightning import ClipCallback
from tests.integrations.runs import classes
from tests.integrations.test_lightning import Plain, trainer_of

pytestmark = pytest.mark.filterwarnings("ignore")
MAX_NORM = 0.3


def fused(params):
    return torch.optim.AdamW(params, lr=1e-2, fused=True)


def fused_with_clip(params):
    optimizer = fused(params)
    cs.clip(optimizer, MAX_NORM)
    return optimizer


OPTIMIZERS = {
    "cs.clip(fused AdamW)": fused_with_clip,
    "ClippedAdamW": lambda p: cs.ClippedAdamW(p, lr=1e-2, max_norm=MAX_NORM),
    "ClippedAdamW(fused=True)": lambda p: cs.ClippedAdamW(p, lr=1e-2, max_norm=MAX_NORM, fused=True),
}
PRECISIONS = {
    "fp32": lambda: {"precision": "32-true"},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "fp16, CPU scaler": lambda: {
        "plugins": [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=1024.0))]
    },
}


class Model(Plain):
    def __init__(self, make):
        super().__init__()
        self.make = make

    def configure_optimizers(self):
        return self.make(self.parameters())


def fit(folder, make, **options):
    """The optimizer after twelve steps, and the norms before clipping."""
    torch.manual_seed(0)
    norms = []

    class Norms(ClipCallback):
        def on_train_batch_end(self, *_, **__):
            norms.append(self._numbers()["curvestep/grad_norm"])

    data = torch.utils.data.DataLoader(classes(), batch_size=8)
    trainer = trainer_of(folder, [Norms()], **options)
    trainer.fit(Model(make), data)
    return trainer.optimizers[0], norms


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_fused_adamw_is_clipped_in_mixed_precision(kind, precision, tmp_path):
    optimizer, norms = fit(tmp_path, OPTIMIZERS[kind], **PRECISIONS[precision]())
    _, expected = fit(tmp_path, OPTIMIZERS["ClippedAdamW"], **PRECISIONS["fp32"]())
    stats = optimizer.clip_stats()
    assert stats["steps"] == 12
    assert stats["clipped_fraction"] > 0.9
    assert stats["coefficient"] * stats["grad_norm"] == pytest.approx(MAX_NORM, rel=1e-4)
    assert stats["grad_norm"] == pytest.approx(norms[-1], rel=1e-4)  # without the scale of fp16
    assert norms[0] == pytest.approx(expected[0], rel=2e-2)


@pytest.mark.parametrize("precision", list(PRECISIONS)[1:])
def test_lightning_still_refuses_to_clip_fused_adamw_in_mixed_precision(precision, tmp_path):
    """When this fails, pytorch-lightning#21435 is closed: then it leaves docs/clip_questions.md."""
    with pytest.raises(RuntimeError, match="does not allow for gradient clipping"):
        fit(tmp_path, fused, gradient_clip_val=MAX_NORM, **PRECISIONS[precision]())
