"""The models of the experiments.

The LSTM language model, small or AWD-LSTM (Merity, Keskar, Socher, 2018), and ResNet20 (He et al., 2016).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from itertools import pairwise
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

Task = Literal["language", "images"]
# Hidden and cell state of each layer, shaped (1, batch, width).
State = tuple[tuple[Tensor, Tensor], ...]


class Activations(NamedTuple):
    """Outputs of the last LSTM layer, before and after dropout, shaped (time, batch, width)."""

    raw: Tensor
    dropped: Tensor


class LSTMModel(nn.Module):
    """LSTM language model whose softmax shares the embedding; with its five dropouts it is AWD-LSTM.

    The last layer has the width of the embedding, as in AWD-LSTM: the softmax then needs no projection and
    no weights of its own, only a bias. In each training forward pass one mask is drawn for each of: the words
    of the vocabulary, the embedded inputs, the hidden-to-hidden weights of each layer, the outputs between
    layers and the output; all are shared over time.

    Args:
        vocab_size: Number of different words.
        embedding: Size of the word vectors, and of the last layer.
        hidden: Size of the hidden layers.
        layers: Number of LSTM layers.
        dropout: Dropout of the output.
        weight_drop: Share of the hidden-to-hidden weights dropped.
        dropout_input: Dropout of the word vectors.
        dropout_hidden: Dropout between the layers.
        dropout_embedding: Share of the words dropped.

    Example:
        >>> model = LSTMModel(10, embedding=4, hidden=6)
        >>> logits, state, activations = model(torch.zeros(3, 2, dtype=torch.long))
        >>> logits.shape, len(state), activation_penalty(activations) >= 0
        (torch.Size([3, 2, 10]), 2, tensor(True))
    """

    task: ClassVar[Task] = "language"
    sizes: ClassVar[tuple[str, ...]] = ("embedding", "hidden", "layers")  # options that make another model

    def __init__(
        self,
        vocab_size: int,
        *,
        embedding: int = 128,
        hidden: int = 200,
        layers: int = 2,
        dropout: float = 0.0,
        weight_drop: float = 0.0,
        dropout_input: float = 0.0,
        dropout_hidden: float = 0.0,
        dropout_embedding: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [embedding, *[hidden] * (layers - 1), embedding]
        self.embedding = nn.Embedding(vocab_size, embedding)
        self.lstms = nn.ModuleList(nn.LSTM(before, after) for before, after in pairwise(widths))
        self.decoder = nn.Linear(widths[-1], vocab_size)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.dropouts = [*[dropout_hidden] * (layers - 1), dropout]  # after each layer
        self.dropout_input = dropout_input
        self.dropout_embedding = dropout_embedding
        self.weight_drop = weight_drop

    @staticmethod
    def work(num_words: int, options: Mapping[str, float]) -> float:
        """Multiplications a word, roughly, over that many different words: for estimates of cost."""
        embedding = options["embedding"]
        hidden = options["hidden"]
        return embedding * num_words + 8 * hidden * (embedding + hidden) * (options["layers"] - 1)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State, Activations]:
        """Scores of the next word, shaped (time, batch, words), the state after it, and activations.

        ``tokens`` are word ids, shaped (time, batch); ``state`` is that of the window before, or zeros.
        """
        x = locked_dropout(self._embed(tokens), self.dropout_input, self.training)
        after = []
        raw = x
        before = state or [None] * len(self.lstms)
        for layer, start, p in zip(self.lstms, before, self.dropouts, strict=True):
            raw, left = self._run(layer, x, start)
            x = locked_dropout(raw, p, self.training)
            after.append(left)
        return self.decoder(x), tuple(after), Activations(raw, x)

    def _embed(self, tokens: Tensor) -> Tensor:
        embedded = self.embedding(tokens)
        if self.dropout_embedding == 0 or not self.training:
            return embedded
        # One decision a word, whichever places it stands at; the same as masking rows of the matrix.
        mask = F.dropout(embedded.new_ones(self.embedding.num_embeddings), self.dropout_embedding, True)
        return embedded * mask[tokens][..., None]

    def _run(
        self, layer: nn.Module, x: Tensor, before: tuple[Tensor, Tensor] | None
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        if self.weight_drop == 0 or not self.training:
            return layer(x, before)
        dropped = F.dropout(layer.get_parameter("weight_hh_l0"), self.weight_drop, True)
        return functional_call(layer, {"weight_hh_l0": dropped}, (x, before))


def locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout with one mask for all times, for ``x`` shaped (time, batch, width)."""
    if p == 0 or not training:
        return x
    return x * F.dropout(torch.ones_like(x[:1]), p, training)


def activation_penalty(activations: Activations, *, alpha: float = 2.0, beta: float = 1.0) -> Tensor:
    r"""Activation and temporal activation regularisation, to be added to the training loss.

    .. math::
        \alpha\,\mathrm{mean}\,(m \odot h_t)^2 + \beta\,\mathrm{mean}\,(h_{t+1} - h_t)^2

    with :math:`m` the dropout mask of the output and :math:`h_t` the raw output of the last layer.
    """
    size = activations.dropped.square().mean()
    if len(activations.raw) < 2:
        return alpha * size
    change = activations.raw.diff(dim=0).square().mean()
    return alpha * size + beta * change


def random_bptt_length(generator: torch.Generator, base: int) -> int:
    r"""Random length of the next window, so that no word is always at the same place of one.

    .. math::
        \max\{5, \lfloor n \rfloor\},\quad n \sim N(b, 5^2),\quad b = \text{base}
        \text{ with probability } 0.95,\ \text{base}/2 \text{ otherwise}

    Short windows would weigh more per word; the task scales the learning rate by the length to even it out.
    """
    usual = torch.rand((), generator=generator).item() < 0.95
    centre = base if usual else base / 2
    return max(5, int(centre + 5 * torch.randn((), generator=generator).item()))


def mean_bptt_length(base: int) -> float:
    """Mean of :func:`random_bptt_length`, whose lengths are rounded down."""
    return 0.975 * base - 0.5


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
        >>> ResNet20()(torch.zeros(2, 3, 32, 32)).shape
        torch.Size([2, 10])
    """

    task: ClassVar[Task] = "images"
    sizes: ClassVar[tuple[str, ...]] = ()

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
        buffers: Any = self  # which are there by torch's defaults
        buffers.num_batches_tracked.add_(1)
        buffers.running_mean.lerp_(mean.detach(), self.momentum)
        buffers.running_var.lerp_(variance.detach() * (count / (count - 1)), self.momentum)
        scale = torch.rsqrt(variance + self.eps) * self.weight
        return centred * scale.view(1, -1, 1, 1) + self.bias.view(1, -1, 1, 1)


class _AllReduce(torch.autograd.Function):
    """The sum over processes; every process's loss depends on it, so its gradient is summed too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _AllReduce.apply(*grads)


Model = type[LSTMModel] | type[ResNet20]
LANGUAGE_MODELS = {"lstm": LSTMModel, "awd-lstm": LSTMModel}
"""Models for text: each takes the number of words and its options, and answers as :class:`LSTMModel`."""
IMAGE_MODELS = {"resnet20": ResNet20}
"""Models for images: each takes ``norm`` and its options, and answers as :class:`ResNet20`."""
MODELS: dict[str, Model] = {**LANGUAGE_MODELS, **IMAGE_MODELS}
"""Every model by its name in recipes."""


def options_of(model: Model) -> dict[str, float]:
    """The numbers that a model is made from, with their defaults: what a recipe may set.

    Example:
        >>> options_of(ResNet20), options_of(LSTMModel)["hidden"]
        ({}, 200)
    """
    given = inspect.signature(model).parameters.values()
    return {p.name: p.default for p in given if isinstance(p.default, (int, float))}


def models_of(task: str) -> tuple[str, ...]:
    """Names of the models of a task, ``language`` or ``images``."""
    return tuple(name for name, model in MODELS.items() if model.task == task)
