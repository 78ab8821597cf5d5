"""Steps that are recorded once and replayed, as in a CUDA graph, and steps under torch.compile."""

import math

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD
from tests.support.strict import strict_device, waits

CASES = [
    pytest.param(make, options, id=f"{make.__name__} {' '.join(map(str, options))}")
    for make in (ClippedSGD, NormalizedSGD)
    for options in (
        {}, {"momentum": 0.9, "weight_decay": 0.1}, {"momentum": 0.9, "dampening": 0.5}, {"foreach": True},
        {"momentum": 0.9, "clip": "momentum"}, {"norm_scope": "tensor"},
    )
] + [
    pytest.param(ClippedAdamW, options, id=f"ClippedAdamW {' '.join(map(str, options))}")
    for options in ({}, {"amsgrad": True}, {"foreach": True}, {"foreach": False})
]  # fmt: skip


torchs_own_warnings = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")


class Recording(TorchDispatchMode):
    """The operations of a block. A replay does them again, on the same memory and with the same constants."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result

    def replay(self):
        for func, args, kwargs, result in self.calls:
            for old, new in zip(tree_leaves(result), tree_leaves(func(*args, **kwargs)), strict=True):
                if old is not new and old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def parameters(place):
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(shape, generator=generator) for shape in ((4, 3), (), (5,))]
    params = [nn.Parameter(t.to(place)) for t in tensors]
    for p in params:
        p.grad = torch.zeros_like(p)
    return params


def set_gradients(k, *models):
    """The same gradients, in place; the ninth is not finite and the twelfth is a spike."""
    generator = torch.Generator().manual_seed(k)
    for same in zip(*models, strict=True):
        g = 10 ** (k % 2 + 4 * (k == 12)) * torch.randn(same[0].shape, generator=generator)
        for p in same:
            p.grad.copy_(g * math.nan if k == 9 else g)


@pytest.mark.parametrize(("make", "options"), CASES)
def test_a_replayed_step_is_a_step(make, options):
    with strict_device() as device:
        away, here = parameters(device), parameters("cpu")
        lr = torch.tensor(0.05, device=device)
        ours = make(away, lr, 1.0, nonfinite="skip", capturable=True, **options)
        theirs = make(here, 0.05, 1.0, nonfinite="skip", **options)
        for k in range(16):
            set_gradients(k, away, here)
            if k < 3:
                ours.step()
            elif k == 3:
                with waits(0), Recording() as recording:
                    ours.step()
            else:
                with waits(0), torch.no_grad():
                    recording.replay()
            theirs.step()
            if k == 6:
                lr.fill_(0.02)
                theirs.param_groups[0]["lr"] = 0.02
        for p, q in zip(away, here, strict=True):
            torch.testing.assert_close(p.detach().cpu(), q.detach(), rtol=1e-6, atol=1e-6)
        assert ours.clip_stats() == pytest.approx(theirs.clip_stats(), rel=1e-6)
        assert ours.clip_stats()["skipped"] == 1


def test_torch_is_asked_whether_a_graph_is_recorded_wherever_that_can_be(monkeypatch):
    asked = []
    monkeypatch.setattr("curvestep.optim.device._check_capture", asked.append)
    with strict_device() as device:
        away, here = (ClippedSGD(parameters(place), lr=0.1, max_norm=1.0) for place in (device, "cpu"))
        away.step()
        here.step()
    assert asked == [away]


@pytest.mark.parametrize("lr", [0.1, torch.tensor(0.1)], ids=["parameters", "lr"])
def test_what_lies_on_cpu_and_elsewhere_is_no_graph(lr):
    with strict_device() as device:
        params = parameters(device) + ([] if isinstance(lr, torch.Tensor) else parameters("cpu"))
        optimizer = ClippedSGD(params, lr=lr, max_norm=1.0, nonfinite="skip", capturable=True)
        with pytest.raises(RuntimeError, match="Tensor `lr`"):
            optimizer.step()


@torchs_own_warnings
@pytest.mark.skipif(torch.__version__ < (2, 13), reason="torch.compile does not say why not")
def test_a_step_is_no_whole_graph_and_says_so():
    torch._dynamo.reset()
    optimizer = ClippedSGD(parameters("cpu"), lr=0.1, max_norm=1.0, nonfinite="skip", capturable=True)
    with pytest.raises(Exception, match="leave out `fullgraph=True`"):
        torch.compile(optimizer.step, backend="eager", fullgraph=True)()


@torchs_own_warnings
@pytest.mark.parametrize("make", [ClippedSGD, NormalizedSGD, ClippedAdamW])
def test_torch_compile_leaves_a_step_as_it_is_and_compiles_nothing_twice(make):
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    compiled, plain = parameters("cpu"), parameters("cpu")
    ours, theirs = make(compiled, 0.05, 1.0), make(plain, 0.05, 1.0)
    step, seen = torch.compile(ours.step), []
    ours.register_step_post_hook(lambda *_: seen.append(1))
    for k in range(8):
        set_gradients(k, compiled, plain)
        step()
        theirs.step()
        ours.param_groups[0]["lr"] = theirs.param_groups[0]["lr"] = 0.05 / (k + 1)
    assert all(torch.equal(p, q) for p, q in zip(compiled, plain, strict=True))
    assert ours.clip_stats() == theirs.clip_stats()
    assert len(seen) == 8
    assert sum(counters["graph_break"].values()) <= 1
    assert counters["stats"].get("unique_graphs", 0) == 0
