"""Modules that keep state in an odd place: does a measurement leave the run as it was?

    python benchmarks/odd_modules.py [--only NAME …] [--modes watch …] [--optimizers SGD …] [--words]

Each module is trained alone, then with the probe, with `calibrate` in mid run, and with `Autopsy.explain` in
mid run. Compared bit for bit are losses, parameters, buffers, the optimizer's state, random generators, and
what the module keeps elsewhere. An answer is "same", "refused" (in one line of ours, and the run goes on as
if nobody had asked) or "DIFFERENT". The exit code is the number of those, at most 100.
"""

import argparse
import collections
import contextlib
import copy
import functools
import io
import itertools
import os
import random
import sys
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils._pytree import tree_map
from torch.utils.checkpoint import checkpoint

import curvestep as cs

OURS = str(Path(cs.__file__).parent)
WIDTH = 6  # of inputs, unless a module says otherwise
STEPS = 20
ASKED_AFTER = 13  # steps: calibrate and explain are called there
LARGE = 600_000  # numbers: more than are copied where nothing says that they change
MODES = ("watch", "with", "layers", "calibrate", "autopsy")
OPTIMIZERS = {
    "SGD": lambda ps: torch.optim.SGD(ps, lr=0.05, momentum=0.9),
    "AdamW": lambda ps: torch.optim.AdamW(ps, lr=0.01),
    "ClippedSGD": lambda ps: cs.ClippedSGD(ps, lr=0.05, max_norm=0.5),
}
MODULES = {}  # name: function without arguments that makes a `Setting`


@dataclass
class Setting:
    """A model, the loss of a batch, the batches of the run, and what else may not move."""

    model: nn.Module
    loss: object
    batches: list = field(default_factory=lambda: vectors())
    elsewhere: object = tuple  # function that returns the state outside of the model


def vectors(dtype=torch.float32, count=90):
    return [torch.randn(8, WIDTH, dtype=dtype) for _ in range(count)]


def tokens(count=90):
    return [torch.randint(11, (4, 5)) for _ in range(count)]


def square(model):
    """The mean square of the output, as the loss of a batch."""
    return lambda x: model(x).abs().square().mean()


def odd(make):
    """Register a function that returns a setting, or a model whose mean square is the loss."""

    def setting():
        made = make()
        return made if isinstance(made, Setting) else Setting(made, square(made))

    MODULES[make.__name__] = setting
    return make


def linear(out=3):
    return nn.Linear(WIDTH, out)


class Wrapped(nn.Module):
    """Calls ``function(self, x)`` on a linear layer's output; ``state`` are attributes of its own."""

    def __init__(self, function, **state):
        super().__init__()
        self.layer = linear()
        self._function = function
        for name, value in state.items():
            setattr(self, name, value)

    def forward(self, x):
        """The function of the layer's output."""
        return self._function(self, self.layer(x))


# --- Parameters that need no gradient -----------------------------------------------------------------------


class MomentumEncoder(nn.Module):
    """A key encoder that follows the query encoder inside of the forward pass."""

    def __init__(self, write, rate=0.1):
        super().__init__()
        self.query = linear()
        self.key = copy.deepcopy(self.query).requires_grad_(False)
        self.write = write
        self.rate = rate

    def forward(self, x):
        """The query's output less that of the key, once the key has followed."""
        with torch.no_grad():
            for k, q in zip(self.key.parameters(), self.query.parameters(), strict=True):
                self.write(k, q, self.rate)
        return self.query(x) - self.key(x + 1)


@odd
def momentum_encoder():
    return MomentumEncoder(lambda k, q, rate: k.lerp_(q, rate))


@odd
def momentum_encoder_by_data():
    def write(k, q, rate):
        k.data = k.data * (1 - rate) + q.data * rate

    return MomentumEncoder(write)


@odd
def momentum_encoder_in_data_in_place():
    return MomentumEncoder(lambda k, q, rate: k.data.mul_(1 - rate).add_(q.data, alpha=rate))


@odd
def momentum_encoder_that_hardly_moves():
    return MomentumEncoder(lambda k, q, rate: k.lerp_(q, rate), rate=1e-4)


@odd
def ema_teacher():
    class Distilled(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = linear()
            average = torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            self.teacher = torch.optim.swa_utils.AveragedModel(self.student, multi_avg_fn=average)
            self.teacher.requires_grad_(False)

        def forward(self, x):
            self.teacher.update_parameters(self.student)
            return self.student(x) - self.teacher(x).detach() + 1

    return Distilled()


@odd
def target_network():
    class Critic(nn.Module):
        def __init__(self):
            super().__init__()
            self.online = linear()
            self.target = copy.deepcopy(self.online).requires_grad_(False)
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            if self.calls % 3 == 0:
                self.target.load_state_dict(self.online.state_dict())
            return self.online(x) - 0.9 * self.target(x.roll(1, 0)) - 1

    return Critic()


@odd
def frozen_parameter_that_jumps():
    class Jumping(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()
            self.scale = nn.Parameter(torch.ones(5), requires_grad=False)

        def forward(self, x):
            with torch.no_grad():
                self.scale.mul_(1.01)
            return self.layer(x) * self.scale.sum()

    return Jumping()


def large_parameter(write):
    class Large(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()
            self.table = nn.Parameter(torch.ones(LARGE), requires_grad=False)

        def forward(self, x):
            write(self.table)
            return self.layer(x) * self.table[:4].mean()

    return Large()


@odd
def large_frozen_parameter_changed_in_place():
    def write(table):
        with torch.no_grad():
            table.mul_(1.01)

    return large_parameter(write)


@odd
def large_frozen_parameter_changed_by_data():
    return large_parameter(lambda table: table.data.mul_(1.01))


# --- Parameters that the forward pass writes to -------------------------------------------------------------


@odd
def weights_clamped_in_the_forward_pass():
    def clamp(self, y):
        self.layer.weight.data.clamp_(-0.3, 0.3)
        return y

    return Wrapped(clamp)


@odd
def embedding_with_max_norm():
    model = nn.Sequential(nn.Embedding(11, 4, max_norm=0.7), nn.Linear(4, 3))
    return Setting(model, square(model), tokens())


@odd
def weights_standardized_by_a_hook():
    model = linear()

    def standardize(module, _):
        module.weight.data.sub_(module.weight.data.mean(1, keepdim=True))

    model.register_forward_pre_hook(standardize)
    return model


@odd
def weights_set_up_by_the_first_batch():
    class ActNorm(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(3))
            self.register_buffer("is_set_up", torch.tensor(False))

        def forward(self, x):
            if not self.is_set_up:
                self.scale.data.copy_(1 / x.detach().std(0))
                self.is_set_up.fill_(True)
            return x * self.scale

    return nn.Sequential(linear(), ActNorm())


@odd
def parameter_that_is_replaced():
    class Replaced(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = linear()
            self.shift = nn.Parameter(torch.zeros(3), requires_grad=False)

        def forward(self, x):
            self.shift = nn.Parameter(self.shift + 0.01, requires_grad=False)
            return self.layer(x) + self.shift

    return Replaced()


@odd
def parameter_data_that_is_replaced():
    def replace(self, y):
        self.layer.bias.data = self.layer.bias.data * 0.999
        return y

    return Wrapped(replace)


# --- Normalization and parametrizations ---------------------------------------------------------------------


def normalized(norm):
    return nn.Sequential(linear(8), norm, nn.Tanh(), nn.Linear(8, 3))


@odd
def batchnorm():
    return normalized(nn.BatchNorm1d(8))


@odd
def batchnorm_of_all_batches():
    return normalized(nn.BatchNorm1d(8, momentum=None))


@odd
def instance_norm():
    model = nn.Sequential(
        nn.Unflatten(1, (2, 3)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()
    )
    model = nn.Sequential(model, linear())
    return Setting(model, square(model))


@odd
def spectral_norm():
    return normalized(parametrizations.spectral_norm(nn.Linear(8, 8)))


@odd
def spectral_norm_by_hook():
    return normalized(nn.utils.spectral_norm(nn.Linear(8, 8)))


@odd
def weight_norm():
    return normalized(parametrizations.weight_norm(nn.Linear(8, 8)))


@odd
def weight_norm_by_hook():
    return normalized(nn.utils.weight_norm(nn.Linear(8, 8)))


@odd
def orthogonal():
    return normalized(parametrizations.orthogonal(nn.Linear(8, 8)))


@odd
def pruned():
    model = normalized(nn.Linear(8, 8))
    prune.random_unstructured(model[1], "weight", amount=0.4)
    return model


@odd
def parametrization_that_counts():
    class Fading(nn.Module):
        def __init__(self):
            super().__init__()
            self.calls = 0

        def forward(self, weight):
            self.calls += 1
            return weight * (1 + 0.01 * self.calls)

    model = linear()
    parametrize.register_parametrization(model, "weight", Fading())
    return model


# --- Adapters, quantization, compilers, wrappers ------------------------------------------------------------


@odd
def lora_with_dropout():
    class LoRA(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = linear().requires_grad_(False)
            self.down = nn.Parameter(torch.randn(2, WIDTH) * 0.1)
            self.up = nn.Parameter(torch.randn(3, 2) * 0.1)

        def forward(self, x):
            return self.base(x) + F.dropout(x, 0.2, self.training) @ self.down.T @ self.up.T

    return LoRA()


@odd
def peft_lora():
    from peft import LoraConfig, get_peft_model

    base = nn.Sequential(collections.OrderedDict(first=linear(8), act=nn.Tanh(), last=nn.Linear(8, 3)))
    return get_peft_model(base, LoraConfig(r=2, target_modules=["first", "last"], lora_dropout=0.2))


@odd
def fake_quantized():
    from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver

    observer = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255, dtype=torch.quint8)
    return normalized(observer)


@odd
def quantization_aware():
    from torch.ao.quantization import get_default_qat_qconfig, prepare_qat

    model = nn.Sequential(linear(8), nn.ReLU(), nn.Linear(8, 3)).train()
    model.qconfig = get_default_qat_qconfig("fbgemm")
    return prepare_qat(model)


@odd
def compiled():
    torch._dynamo.reset()
    return torch.compile(normalized(nn.BatchNorm1d(8)), backend="aot_eager")


@odd
def compiled_in_place():
    torch._dynamo.reset()
    model = normalized(nn.Dropout(0.2))
    model.compile(backend="aot_eager")
    return model


@odd
def data_parallel():
    return nn.DataParallel(normalized(nn.BatchNorm1d(8)))


@odd
def torchscript():
    return torch.jit.script(nn.Sequential(linear(8), nn.Tanh(), nn.Linear(8, 3)))


@odd
def traced():
    return torch.jit.trace(normalized(nn.Identity()), torch.randn(8, WIDTH))


@odd
def script_module_inside():
    return nn.Sequential(torch.jit.script(linear(8)), nn.Tanh(), nn.Linear(8, 3))


@odd
def fx_graph():
    return torch.fx.symbolic_trace(normalized(nn.BatchNorm1d(8)))


@odd
def called_functionally():
    class Functional(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = normalized(nn.BatchNorm1d(8))

        def forward(self, x):
            shifted = {n: p * 1.1 for n, p in self.inner.named_parameters()}
            return torch.func.functional_call(self.inner, shifted, (x,))

    return Functional()


@odd
def ensemble_by_vmap():
    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = nn.Parameter(torch.randn(4, WIDTH, 3))

        def forward(self, x):
            return torch.vmap(lambda w: x @ w)(self.weights)

    return Ensemble()


# --- Memory of parameters -----------------------------------------------------------------------------------


@odd
def tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(11, 4)
            self.decoder = nn.Linear(4, 11, bias=False)
            self.decoder.weight = self.embedding.weight

        def forward(self, x):
            return self.decoder(torch.tanh(self.embedding(x)))

    model = Tied()
    return Setting(model, square(model), tokens())


@odd
def views_of_one_storage():
    model = nn.Sequential(linear(8), nn.Tanh(), nn.Linear(8, 3))
    flat = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    for p, piece in zip(model.parameters(), flat.split([p.numel() for p in model.parameters()]), strict=True):
        p.data = piece.view_as(p)
    return model


@odd
def channels_last():
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))
    model = model.to(memory_format=torch.channels_last)
    batches = [torch.randn(4, 2, 6, 6).to(memory_format=torch.channels_last) for _ in range(90)]
    return Setting(model, square(model), batches)


@odd
def unused_and_empty_parameters():
    model = nn.Sequential(linear(), nn.Identity())
    model.unused = nn.Parameter(torch.randn(3))
    model.empty = nn.Parameter(torch.randn(0, 3))
    return model


@odd
def complex_numbers():
    model = nn.Linear(WIDTH, 3, dtype=torch.complex64)
    return Setting(model, square(model), vectors(torch.complex64))


@odd
def bfloat16():
    model = normalized(nn.LayerNorm(8)).bfloat16()
    return Setting(model, square(model), vectors(torch.bfloat16))


@odd
def float16():
    model = normalized(nn.LayerNorm(8)).half()
    return Setting(model, square(model), vectors(torch.float16))


@odd
def autocast():
    model = normalized(nn.BatchNorm1d(8))

    def loss(x):
        with torch.autocast("cpu", torch.bfloat16):
            return model(x).float().square().mean()

    return Setting(model, loss)


@odd
def sparse_embedding():
    model = nn.Sequential(nn.Embedding(11, 4, sparse=True), nn.Linear(4, 3))
    return Setting(model, square(model), tokens())


# --- Checkpointing, hooks, gradients ------------------------------------------------------------------------


def checkpointed(*, use_reentrant):
    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = linear(8)
            self.block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.2), nn.Tanh())
            self.last = nn.Linear(8, 3)

        def forward(self, x):
            return self.last(checkpoint(self.block, self.first(x), use_reentrant=use_reentrant))

    return Checkpointed()


@odd
def checkpointing():
    return checkpointed(use_reentrant=False)


@odd
def checkpointing_reentrant():
    return checkpointed(use_reentrant=True)


@odd
def backward_hook():
    model = normalized(nn.Identity())
    model[0].register_full_backward_hook(
        lambda module, given, out: tuple(g * 0.5 for g in given if g is not None) or None
    )
    model[3].register_full_backward_hook(lambda module, given, out: (given[0] * 0.5,))
    return model


@odd
def parameter_hook():
    model = normalized(nn.Identity())
    model[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))
    return model


@odd
def hook_that_counts():
    model = normalized(nn.Identity())
    model.calls = 0

    def count(module, given, out):
        model.calls += 1
        return out * (1 + 0.001 * model.calls)

    model[3].register_forward_hook(count)
    return model


@odd
def straight_through():
    class Round(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.round()

        @staticmethod
        def backward(ctx, g):
            return g

    return Wrapped(lambda self, y: Round.apply(y * 4) + y)


@odd
def gradient_penalty():
    model = normalized(nn.Identity())

    def loss(x):
        x = x.detach().requires_grad_()
        y = model(x)
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y.square().mean() + g.square().sum(1).mean()

    return Setting(model, loss)


@odd
def switches_requires_grad():
    def switch(self, y):
        self.layer.bias.requires_grad_(False)
        y = y * 2
        self.layer.bias.requires_grad_(True)
        return y

    return Wrapped(switch)


@odd
def switches_modes():
    class Switching(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = normalized(nn.BatchNorm1d(8))

        def forward(self, x):
            self.inner.eval()
            still = self.inner(x)
            self.inner.train()
            return self.inner(x) - still.detach()

    return Switching()


# --- State in buffers ---------------------------------------------------------------------------------------


class Buffered(Wrapped):
    """The same with buffers."""

    def __init__(self, function, *, persistent=True, **buffers):
        super().__init__(function)
        for name, value in buffers.items():
            self.register_buffer(name, value, persistent=persistent)


@odd
def queue_in_a_buffer():
    def enqueue(self, y):
        place = int(self.place)
        self.queue[place] = y.detach().mean(0)
        self.place.fill_((place + 1) % 7)
        return y - self.queue.mean(0)

    return Buffered(enqueue, queue=torch.randn(7, 3), place=torch.zeros((), dtype=torch.long))


@odd
def buffer_that_is_replaced():
    def follow(self, y):
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return y - self.mean

    return Buffered(follow, persistent=False, mean=torch.zeros(3))


@odd
def buffer_that_needs_a_gradient():
    def scale(self, y):
        return y * self.scale

    return Buffered(scale, scale=torch.ones(3, requires_grad=True))


@odd
def large_buffer():
    def write(self, y):
        self.bank[0] += y.detach().mean()
        return y * (1 + self.bank[0])

    return Buffered(write, bank=torch.zeros(LARGE))


@odd
def carried_lstm_state():
    class Carried(nn.Module):
        def __init__(self):
            super().__init__()
            self.lstm = nn.LSTM(WIDTH, 5)
            self.hidden = None

        def forward(self, x):
            y, hidden = self.lstm(x.unsqueeze(0), self.hidden)
            self.hidden = tuple(h.detach() for h in hidden)
            return y

    return Carried()


@odd
def codebook():
    class VectorQuantizer(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder = linear(4)
            self.decoder = nn.Linear(4, WIDTH)
            self.register_buffer("codes", torch.randn(5, 4))
            self.register_buffer("sums", torch.randn(5, 4))
            self.register_buffer("counts", torch.ones(5))

        def forward(self, x):
            z = self.encoder(x)
            nearest = torch.cdist(z, self.codes).argmin(1)
            code = self.codes[nearest]
            with torch.no_grad():
                chosen = F.one_hot(nearest, 5).float()
                self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(chosen.T @ z, alpha=0.1)
                self.codes.copy_(self.sums / self.counts.unsqueeze(1).clamp(min=1e-3))
            code = z + (code - z).detach()
            return torch.cat([self.decoder(code) - x, z - code.detach()], 1)

    return VectorQuantizer()


@odd
def mixture_of_experts():
    class Mixture(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = linear(4)
            self.experts = nn.ModuleList(linear() for _ in range(4))
            self.register_buffer("load", torch.zeros(4))

        def forward(self, x):
            scores = self.router(x) + 0.1 * torch.randn(len(x), 4) - 0.01 * self.load
            weight, chosen = scores.softmax(1).max(1)
            self.load += F.one_hot(chosen, 4).float().sum(0)
            outputs = torch.stack([expert(x) for expert in self.experts], 1)
            return weight.unsqueeze(1) * outputs[torch.arange(len(x)), chosen]

    return Mixture()


# --- Random numbers -----------------------------------------------------------------------------------------


@odd
def dropouts():
    return nn.Sequential(
        linear(8),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(8, 8),
        nn.AlphaDropout(0.2),
        nn.RReLU(),
        nn.Linear(8, 3),
    )


@odd
def generator_of_torch():
    def noise(self, y):
        return y + 0.1 * torch.randn(y.shape, generator=self.generator)

    return Wrapped(noise, generator=torch.Generator().manual_seed(3))


@odd
def generators_of_numpy():
    def noise(self, y):
        return y * (1 + 0.1 * self.new.standard_normal() + 0.1 * self.old.randn() + 0.1 * np.random.randn())

    return Wrapped(noise, new=np.random.default_rng(3), old=np.random.RandomState(4))


@odd
def generators_of_python():
    def noise(self, y):
        return y * (1 + 0.1 * self.source.random() + 0.1 * random.random())

    return Wrapped(noise, source=random.Random(3))


@odd
def system_random():
    def noise(self, y):
        return y * (1 + 0.3 * int.from_bytes(os.urandom(1), "big") / 255)

    model = Wrapped(noise)
    return Setting(model, lambda x: model(x).square().mean() * 0 + model.layer(x).square().mean())


# --- State in attributes ------------------------------------------------------------------------------------


@odd
def counter():
    def count(self, y):
        self.calls += 1
        return y * (1 + 0.01 * self.calls)

    return Wrapped(count, calls=0)


@odd
def counter_that_shows_late():
    def count(self, y):
        self.calls += 1
        return y * (1 + (self.calls // 7) % 2)

    return Wrapped(count, calls=0)


@odd
def ring_in_a_deque():
    def push(self, y):
        self.ring.append(y.detach().mean().item())
        return y - sum(self.ring) / len(self.ring)

    return Wrapped(push, ring=collections.deque(maxlen=4))


@odd
def nested_containers():
    def change(self, y):
        self.nest["a"][0]["b"] += 0.01
        self.nest["c"][1].mul_(1.01)
        return y * self.nest["a"][0]["b"] * self.nest["c"][1]

    return Wrapped(change, nest={"a": [{"b": 1.0}], "c": (0, torch.ones(()))})


@odd
def kinds_of_dict():
    def change(self, y):
        self.counter["calls"] += 1
        self.default["calls"] += 1.0
        self.ordered["calls"] = self.ordered.get("calls", 0) + 1
        calls = self.counter["calls"] + self.default["calls"] + self.ordered["calls"]
        return y * (1 + 0.001 * calls)

    return Wrapped(
        change,
        counter=Counter(),
        default=collections.defaultdict(float),
        ordered=collections.OrderedDict(),
    )


@odd
def numpy_array():
    def change(self, y):
        self.scales *= 1.01
        return y * float(self.scales.mean())

    return Wrapped(change, scales=np.ones(3))


@odd
def bytes_that_change():
    def change(self, y):
        self.table[0] = (self.table[0] + 1) % 200
        return y * (1 + 0.002 * self.table[0])

    return Wrapped(change, table=bytearray(4))


@odd
def large_tensor_in_an_attribute():
    def change(self, y):
        self.bank[0] += 0.01
        return y * (1 + self.bank[0])

    return Wrapped(change, bank=torch.zeros(LARGE))


@odd
def tensor_in_a_long_list():
    def change(self, y):
        self.bank[3].add_(0.01)
        return y * (1 + self.bank[3])

    return Wrapped(change, bank=[torch.zeros(()) for _ in range(2000)])


@odd
def made_on_first_use():
    def change(self, y):
        if not hasattr(self, "late"):
            self.late = y.detach().std() + 1
        return y / self.late

    return Wrapped(change)


@odd
def weights_remembered_by_a_tensor():
    def change(self, y):
        self.last = getattr(self, "last", self.layer.weight.detach().clone()).lerp(
            self.layer.weight.detach(), 0.5
        )
        return y + self.last.sum()

    return Wrapped(change)


class Slots:
    """Counts in a slot."""

    __slots__ = ("calls",)

    def __init__(self):
        self.calls = 0


class Plain:
    """Counts its calls in an attribute."""

    def __init__(self):
        self.calls = 0

    def __call__(self):
        """The number of calls so far."""
        self.calls += 1
        return self.calls


@odd
def object_with_slots():
    def count(self, y):
        self.holder.calls += 1
        return y * (1 + 0.01 * self.holder.calls)

    holder = Slots()
    model = Wrapped(count, holder=holder)
    return Setting(model, square(model), elsewhere=lambda: holder.calls)


@odd
def object_with_slots_that_shows_late():
    def count(self, y):
        self.holder.calls += 1
        return y * (1 + (self.holder.calls // 9) % 2)

    holder = Slots()
    model = Wrapped(count, holder=holder)
    return Setting(model, square(model), elsewhere=lambda: holder.calls)


@odd
def object_of_a_plain_class():
    holder = Plain()
    model = Wrapped(lambda self, y: y * (1 + 0.01 * self.holder()), holder=holder)
    return Setting(model, square(model), elsewhere=lambda: holder.calls)


@odd
def object_of_a_plain_class_that_shows_late():
    holder = Plain()
    model = Wrapped(lambda self, y: y * (1 + (self.holder() // 9) % 2), holder=holder)
    return Setting(model, square(model), elsewhere=lambda: holder.calls)


# --- State outside of the model -----------------------------------------------------------------------------

CALLS = 0
SCALE = torch.ones(())
SEEN = []


def of_a_global(shown):
    global CALLS
    CALLS = 0

    def count(self, y):
        global CALLS
        CALLS += 1
        return y * shown(CALLS)

    model = Wrapped(count)
    return Setting(model, square(model), elsewhere=lambda: CALLS)


@odd
def global_number():
    return of_a_global(lambda calls: 1 + 0.01 * calls)


@odd
def global_number_that_shows_late():
    return of_a_global(lambda calls: 1 + (calls // 9) % 2)


@odd
def global_number_that_never_shows():
    return of_a_global(lambda calls: 1)


@odd
def global_tensor():
    SCALE.fill_(1.0)

    def change(self, y):
        SCALE.mul_(1.01)
        return y * SCALE

    model = Wrapped(change)
    return Setting(model, square(model), elsewhere=lambda: SCALE.clone())


@odd
def global_list():
    SEEN.clear()

    def change(self, y):
        SEEN.append(1.0)
        return y * (1 + 0.01 * len(SEEN))

    model = Wrapped(change)
    return Setting(model, square(model), elsewhere=lambda: len(SEEN))


@odd
def variable_of_a_closure():
    calls = 0

    def change(self, y):
        nonlocal calls
        calls += 1
        return y * (1 + 0.01 * calls)

    model = Wrapped(change)
    return Setting(model, square(model), elsewhere=lambda: calls)


@odd
def attribute_of_a_function():
    def change(self, y):
        change.calls += 1
        return y * (1 + 0.01 * change.calls)

    change.calls = 0
    model = Wrapped(change)
    return Setting(model, square(model), elsewhere=lambda: change.calls)


@odd
def attribute_of_a_class():
    class Counting(nn.Module):
        calls = 0

        def __init__(self):
            super().__init__()
            self.layer = linear()

        def forward(self, x):
            Counting.calls += 1
            return self.layer(x) * (1 + 0.01 * Counting.calls)

    model = Counting()
    return Setting(model, square(model), elsewhere=lambda: Counting.calls)


@odd
def iterator():
    numbers = itertools.count()
    model = Wrapped(lambda self, y: y * (1 + 0.01 * next(numbers)))
    return Setting(model, square(model), elsewhere=lambda: copy.copy(numbers).__reduce__()[1])


@odd
def iterator_that_shows_late():
    numbers = itertools.count()
    model = Wrapped(lambda self, y: y * (1 + (next(numbers) // 9) % 2))
    return Setting(model, square(model), elsewhere=lambda: copy.copy(numbers).__reduce__()[1])


@odd
def generator_function():
    def growing():
        scale = 1.0
        while True:
            scale += 0.01
            yield scale

    scales = growing()
    model = Wrapped(lambda self, y: y * next(scales))
    return Setting(model, square(model))


@odd
def moving_average_in_the_loss():
    model = linear()
    average = torch.zeros(())

    def loss(x):
        value = model(x).square().mean()
        average.lerp_(value.detach(), 0.1)
        return value / (1 + average)

    return Setting(model, loss, elsewhere=lambda: average.clone())


@odd
def another_module_in_the_loss():
    model = linear()
    critic = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Dropout(0.1)).requires_grad_(False)
    return Setting(
        model, lambda x: critic(model(x)).square().mean(), elsewhere=lambda: critic[1].running_var.clone()
    )


@odd
def another_network_follows_in_the_loss():
    model = linear()
    teacher = copy.deepcopy(model).requires_grad_(False)

    def loss(x):
        with torch.no_grad():
            for t, p in zip(teacher.parameters(), model.parameters(), strict=True):
                t.lerp_(p, 0.1)
        return (model(x) - teacher(x + 1)).square().mean()

    return Setting(model, loss, elsewhere=lambda: teacher.weight.clone())


@odd
def cache_of_a_function():
    @functools.lru_cache(maxsize=3)
    def positions(length):
        return torch.arange(length, dtype=torch.float32) / length

    return Wrapped(lambda self, y: y + positions(y.shape[1]))


# --- Runs ---------------------------------------------------------------------------------------------------


class Answer(Exception):
    """A tool refused, or broke, with these words."""


@dataclass
class Run:
    """What a run left behind, and what a tool had to say."""

    losses: list
    state: dict
    rows: int = 0
    refusal: str = ""


def make(name):
    """The setting of a name, from the same seeds each time."""
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    return MODULES[name]()


def state_of(setting, optimizer):
    """All that a run may change, copied."""
    model = setting.model
    state = {
        "parameters": dict(model.named_parameters(remove_duplicate=False)),
        "buffers": dict(model.named_buffers(remove_duplicate=False)),
        "gradients": {n: p.grad for n, p in model.named_parameters()},
        "optimizer": optimizer.state_dict(),
        "random numbers": (torch.get_rng_state(), random.getstate(), np.random.get_state()),
        "modes": [m.training for m in model.modules()],
        "elsewhere": setting.elsewhere(),
    }
    state = tree_map(lambda value: value.to_local() if isinstance(value, DTensor) else value, state)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def same(one, two):
    """Whether two values are the same bits."""
    if isinstance(one, torch.Tensor):
        if not isinstance(two, torch.Tensor) or one.dtype != two.dtype or one.shape != two.shape:
            return False
        if one.is_sparse or two.is_sparse:
            one, two = one.to_dense(), two.to_dense()
        return bits(one) == bits(two)
    if isinstance(one, np.ndarray):
        return isinstance(two, np.ndarray) and one.tobytes() == two.tobytes()
    if isinstance(one, dict):
        return isinstance(two, dict) and one.keys() == two.keys() and all(same(one[k], two[k]) for k in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(same(a, b) for a, b in zip(one, two, strict=True))
    return one == two or (one != one and two != two)


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def words_of(error):
    """One line of an error that curvestep raised; a longer or foreign one is marked."""
    text = f"{type(error).__name__}: {error}"
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    if not last.startswith(OURS):
        return f"FOREIGN {text.splitlines()[0]}"
    if "\n" in str(error):
        return f"LONG {text.splitlines()[0]}"
    return text


def run(name, make_optimizer, mode="alone", wrap=lambda setting: setting):
    """Train with the tool of ``mode``; `Answer` if a tool that was called in mid step refused."""
    setting = wrap(make(name))
    optimizer = make_optimizer([p for p in setting.model.parameters() if p.requires_grad])
    result = Run([], {})
    probe = recorder = None
    try:
        if mode in ("watch", "layers", "with"):
            estimators = ["local_smoothness"] if mode == "layers" else []
            probe = cs.SmoothnessProbe(setting.model, every=3, layers=mode == "layers", estimators=estimators)
            if mode != "with":
                probe.watch(optimizer)
        if mode == "autopsy":
            recorder = cs.Autopsy(setting.model, setting.loss, keep=8).watch(optimizer)
    except Exception as error:
        result.refusal = words_of(error)
        probe = recorder = None
    for step, batch in enumerate(setting.batches[:STEPS]):
        if step == ASKED_AFTER:
            ask(result, mode, setting, optimizer, recorder)
        optimizer.zero_grad()
        try:
            loss = train(setting, optimizer, batch, probe, recorder, mode)
        except Exception as error:
            if probe is None and recorder is None:
                raise
            result.refusal = words_of(error)
            raise Answer(result, setting, optimizer, step) from error
        result.losses.append(loss)
    result.state = state_of(setting, optimizer)
    if probe is not None:
        result.rows = sum(row.get("status") == "ok" for row in probe.trace)
        if not result.rows:
            result.refusal = result.refusal or next(iter(probe.trace), {}).get("status", "no row")
        probe.close()
    return result


def train(setting, optimizer, batch, probe, recorder, mode):
    """One step; its loss."""
    if recorder is not None:
        loss = recorder.record(batch)
    elif mode in ("watch", "layers") and probe is not None:
        loss = probe.record(lambda: setting.loss(batch))
    else:
        loss = setting.loss(batch)
    loss.backward()
    with (
        probe(lambda: setting.loss(batch))
        if mode == "with" and probe is not None
        else contextlib.nullcontext()
    ):
        optimizer.step()
    return loss.detach().clone()


def ask(result, mode, setting, optimizer, recorder):
    """Call calibrate or explain in mid run."""
    try:
        if mode == "calibrate":
            rest = setting.batches[STEPS:]
            is_adam = isinstance(optimizer, torch.optim.AdamW)
            schedule = "warmup-decay" if is_adam else "constant"
            cs.calibrate(setting.model, setting.loss, rest, optimizer=optimizer, schedule=schedule)
            result.rows = 1
        elif mode == "autopsy" and recorder is not None:
            recorder.explain()
            result.rows = 1
    except Exception as error:
        result.refusal = words_of(error)


def verdict(name, make_optimizer, mode, alone, wrap=lambda setting: setting):
    """One of "same", "refused: why", "DIFFERENT: where"."""
    try:
        other = run(name, make_optimizer, mode, wrap)
    except Answer as answer:
        other, setting, optimizer, step = answer.args
        # The step that was to be measured is as it was: before it, or taken.
        now = state_of(setting, optimizer)
        moved = [differences(then, now) for then in moments(name, make_optimizer, step, wrap)]
        if all(moved):
            return f"DIFFERENT after a refusal: {', '.join(min(moved, key=len))} ({other.refusal})"
        return refused(other.refusal)
    where = differences(alone.state, other.state)
    if not same(alone.losses, other.losses):
        where.insert(0, "losses")
    if where:
        return f"DIFFERENT: {', '.join(where)}" + (f" ({other.refusal})" if other.refusal else "")
    return refused(other.refusal) if other.refusal else "same"


def refused(words):
    return f"DIFFERENT words: {words}" if words.startswith(("FOREIGN", "LONG")) else f"refused: {words}"


def differences(one, two):
    return [key for key in one if not same(one[key], two[key])]


def moments(name, make_optimizer, step, wrap=lambda setting: setting):
    """States of a run alone about this step: before it, after its backward pass, after it."""
    setting = wrap(make(name))
    optimizer = make_optimizer([p for p in setting.model.parameters() if p.requires_grad])
    for batch in setting.batches[:step]:
        optimizer.zero_grad()
        train(setting, optimizer, batch, None, None, "alone")
    optimizer.zero_grad()
    yield state_of(setting, optimizer)
    setting.loss(setting.batches[step]).backward()
    yield state_of(setting, optimizer)
    optimizer.step()
    yield state_of(setting, optimizer)


def table(names, optimizers, modes, show=print):
    """One line for each module and optimizer; the verdicts by (module, optimizer, mode)."""
    verdicts = {}
    for name in names:
        for label in optimizers:
            try:
                alone = run(name, OPTIMIZERS[label])
            except Exception as error:
                show(f"{name:42} {label:10} cannot be trained alone: {type(error).__name__}")
                continue
            if differences(alone.state, run(name, OPTIMIZERS[label]).state):
                show(f"{name:42} {label:10} does not repeat itself alone")
                continue
            cells = {mode: verdict(name, OPTIMIZERS[label], mode, alone) for mode in modes}
            verdicts |= {(name, label, mode): cell for mode, cell in cells.items()}
            show(
                f"{name:42} {label:10} " + " ".join(f"{cell.partition(':')[0]:9}" for cell in cells.values())
            )
    return verdicts


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", nargs="+", default=list(MODULES), metavar="NAME")
    parser.add_argument("--modes", nargs="+", default=MODES, choices=MODES)
    parser.add_argument("--optimizers", nargs="+", default=list(OPTIMIZERS), choices=OPTIMIZERS)
    parser.add_argument("--words", action="store_true", help="also print the words of each refusal")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    print(f"{'module':42} {'optimizer':10} " + " ".join(f"{mode:9}" for mode in args.modes))
    verdicts = table(args.only, args.optimizers, args.modes, functools.partial(print, flush=True))
    for key, words in verdicts.items():
        if "DIFFERENT" in words or (args.words and words != "same"):
            print(*key, words, sep=" · ")
    counts = Counter(words.partition(":")[0].split()[0] for words in verdicts.values())
    modules = {name for name, *_ in verdicts}
    print(
        f"{len(modules)} modules, {len(verdicts)} runs: {counts['same']} the same bits, "
        f"{counts['refused']} refused, {counts['DIFFERENT']} different"
    )
    return min(counts["DIFFERENT"], 100)


if __name__ == "__main__":
    sys.exit(main())
