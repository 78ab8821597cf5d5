"""What torch tests of its own optimizers, asked of each of ours.

torch's suite (test/test_optim.py of 2.13), with the settings that torch tries and each of its
implementations, in fewer steps. Not here: what needs CUDA, what looks at torch's own tables, at Adam and at
LBFGS, sparse gradients, and whether the loss goes in the right direction under schedules and groups, since
steps are compared number by number with torch's in the other files.
"""

import copy
from itertools import zip_longest

import pytest
import torch
from torch.nn import Parameter

from curvestep import ClippedAdamW, ClippedSGD, NormalizedSGD
from curvestep.optim.sgd import ScaledSGD


class SoftSGD(ScaledSGD):
    """A rule of a user: lr/(1 + (g/bend)^2)^(1/2)."""

    threshold = "bend"

    def __init__(self, params, lr, bend, **options):
        super().__init__(params, {"lr": lr, "bend": bend}, **options)

    def coefficient(self, norm, group):
        return (1 + (norm / group["bend"]) ** 2) ** -0.5


def with_defaults(made_by):
    """The class with a default learning rate and threshold, which torch's tests leave out."""

    class WithDefaults(made_by):
        def __init__(self, params, lr=1e-3, threshold=1.0, **options):
            super().__init__(params, lr, threshold, **options)

    return WithDefaults


SGD_SETTINGS = [
    {},
    {"lr": 1e-2},
    {"lr": torch.tensor(0.001)},
    {"weight_decay": 0.5},
    {"momentum": 0.9},
    {"weight_decay": 0.1, "maximize": True},
    {"momentum": 0.9, "dampening": 0.5},
    {"momentum": 0.9, "weight_decay": 0.1},
    {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1},
]
ADAMW_SETTINGS = [
    {},
    {"lr": 0.01},
    {"weight_decay": 0.1},
    {"weight_decay": 0.1, "maximize": True},
    {"weight_decay": 0.1, "amsgrad": True},
]
CLASSES = {
    "ClippedSGD": (with_defaults(ClippedSGD), SGD_SETTINGS),
    "NormalizedSGD": (with_defaults(NormalizedSGD), SGD_SETTINGS),
    "ScaledSGD": (with_defaults(SoftSGD), SGD_SETTINGS),
    "ClippedAdamW": (with_defaults(ClippedAdamW), ADAMW_SETTINGS),
}
PATHS = ("foreach", "fused")

every_class = pytest.mark.parametrize(("make", "settings"), CLASSES.values(), ids=CLASSES)
named = pytest.mark.parametrize("is_named", [True, False], ids=["named", "unnamed"])
loaded_into_named = pytest.mark.parametrize("is_named_too", [True, False], ids=["into named", "into unnamed"])


@pytest.fixture(autouse=True)
def as_torch_tests():
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float32)


def on_every_path(settings, *left_out):
    """Each of the settings with every path off, and with each path on."""
    paths = [path for path in PATHS if path not in left_out]
    off = dict.fromkeys(paths, False)
    return [copy.deepcopy(s) | off | on for s in settings for on in ({}, *({path: True} for path in paths))]


def weight_and_bias(rows=10, columns=5, dtype=torch.float32):
    return Parameter(torch.randn(rows, columns, dtype=dtype)), Parameter(torch.randn(rows, dtype=dtype))


def backward(optimizer, weight, bias, x):
    optimizer.zero_grad()
    loss = (weight.mv(x) + bias).square().sum()
    loss.backward()
    return loss


def names(params, is_named):
    return [(f"name{i}", p) for i, p in enumerate(params)] if is_named else list(params)


def without_names(state_dict):
    state_dict = copy.deepcopy(state_dict)
    for group in state_dict["param_groups"]:
        group.pop("param_names", None)
    return state_dict


def assert_equal(found, expected):
    """Of tensors, lists, dictionaries and what is in them."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert_equal(found[name], value)
    elif isinstance(expected, (list, tuple)):
        for ours, theirs in zip_longest(found, expected):
            assert_equal(ours, theirs)
    elif isinstance(expected, torch.Tensor) and expected.dtype == torch.float16:
        # Two units in the last place: the loop rounds the scaled gradient, the other paths do not.
        torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-5)
    elif isinstance(expected, torch.Tensor):
        torch.testing.assert_close(found, expected)
    else:
        assert found == expected


# --- learning rates and paths -----------------------------------------------------------------------


# --- complex tensors ---------------------------------------------------------------------


@every_class
def test_complex_and_real_parameters_together(make, settings):
    for options in on_every_path(settings, "fused"):
        kinds = [(torch.complex64, (10, 5)), (torch.complex64, (10,)), (torch.float32, (10, 5))]
        params = [torch.randn(shape, dtype=dtype, requires_grad=True) for dtype, shape in kinds]

        def real(tensors):
            return [torch.view_as_real(t) if t.is_complex() else t for t in tensors]

        twins = [t.clone().requires_grad_() for t in real([p.detach() for p in params])]
        ours, theirs = make(params, **options), make(twins, **options)
        for _ in range(3):
            for p, q in zip(params, twins, strict=True):
                p.grad = torch.randn_like(p)
                (q.grad,) = real([p.grad.clone()])
            ours.step()
            theirs.step()
            assert_equal(real([p.data for p in params]), [q.data for q in twins])


# --- steps that do nothing, and what a step leaves alone --------------------------------------------


@every_class
def test_a_step_without_gradients_does_nothing(make, settings):
    params = [torch.randn(2, 3) for _ in range(2)]
    before = copy.deepcopy(params)
    for options in on_every_path(settings):
        optimizer = make(params, **options)
        assert optimizer.step(lambda: torch.tensor([1.0])) == 1
        assert optimizer.clip_stats()["steps"] == 0
    assert_equal(params, before)


# --- state dicts ------------------------------------------------------------------------------------


@every_class
@named
@loaded_into_named
def test_state_dicts_are_deterministic(make, settings, is_named, is_named_too):
    for options in on_every_path(settings):
        params, x = weight_and_bias(2, 3), torch.randn(3)
        optimizer = make(names(params, is_named), **options)
        for _ in range(4):
            backward(optimizer, *params, x)
            optimizer.step()
        twins = [Parameter(p.detach().clone()) for p in params]
        twin = make(names(twins, is_named_too), **options)
        twin.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        for _ in range(4):
            for each, pair in ((optimizer, params), (twin, twins)):
                backward(each, *pair, x)
                each.step()
            assert_equal([p.data for p in twins], [p.data for p in params])
        ours, theirs = without_names(twin.state_dict()), without_names(optimizer.state_dict())
        assert_equal(ours, theirs)
        if is_named or is_named_too:
            assert twin.state_dict()["param_groups"][0]["param_names"] == ["name0", "name1"]
        # A group that is listed twice looks the same the second time, all but the counters of the first.
        twin.param_groups.extend(twin.param_groups)
        repeated = without_names(twin.state_dict())["param_groups"][-1]
        assert_equal(repeated["params"], theirs["param_groups"][-1]["params"])
        assert_equal({n: repeated[n] for n in options}, {n: theirs["param_groups"][-1][n] for n in options})


def stepped(make, settings):
    """Optimizers on every path after three steps, and their parameters."""
    for options in on_every_path(settings):
        params, x = weight_and_bias(2, 3), torch.randn(3)
        optimizer = make(params, **options)
        backward(optimizer, *params, x)
        for _ in range(3):
            optimizer.step()
        yield optimizer, params


@every_class
def test_a_step_that_is_a_number_and_groups_without_later_flags_load(make, settings):
    for optimizer, params in stepped(make, settings):
        saved = copy.deepcopy(optimizer.state_dict())
        for flag in ("foreach", "fused", "maximize", "capturable", "nonfinite"):
            saved["param_groups"][0].pop(flag)
        for state in saved["state"].values():
            if "step" in state:
                state["step"] = state["step"].item()
        optimizer.load_state_dict(saved)
        with torch.device("meta"):
            optimizer.step()
        assert all(optimizer.state[p].get("step", 4) == 4 for p in params)
        assert optimizer.clip_stats()["steps"] == 4


@every_class
def test_copies_are_whole_no_state_is_empty_and_options_are_printed(make, settings):
    for optimizer, _ in stepped(make, settings):
        public = [{k for k in vars(o) if k[0] != "_"} for o in (optimizer, copy.deepcopy(optimizer))]
        assert public[0] == public[1]
        assert all(optimizer.state.values())
        options = optimizer.defaults.items()
        assert all(f"{name}: {value}" in repr(optimizer) for name, value in options)
        assert "recent" not in repr(optimizer)


# --- hooks ------------------------------------------------------------------------------------------


def optimizers_of(make, settings):
    for options in on_every_path(settings):
        yield make([torch.rand(2, 3, requires_grad=True)], **options)


@every_class
def test_hooks_run_before_and_after_saving_and_loading(make, settings):
    seen = []

    def unmark(_optimizer, state_dict):
        return state_dict | {"was_marked": state_dict["state"].pop("test", None) is not None}

    def replace(_optimizer, state_dict):
        return state_dict | {"param_groups": [state_dict["param_groups"][0] | {"lr": 0.003}]}

    for optimizer in optimizers_of(make, settings):
        optimizer.register_state_dict_pre_hook(lambda optimizer: optimizer.state.update(test=1))
        optimizer.register_state_dict_post_hook(unmark)
        state_dict = optimizer.state_dict()
        assert "test" not in state_dict["state"]
        assert state_dict["was_marked"] is True
        optimizer.register_load_state_dict_pre_hook(replace)
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.param_groups[0]["lr"]))
        optimizer.load_state_dict(state_dict)
        assert seen.pop() == 0.003


# --- errors -----------------------------------------------------------------------------------------
