"""The LSTM language models: a small one, and AWD-LSTM (Merity, Keskar, Socher, 2018), the paper's own."""

from __future__ import annotations

from itertools import pairwise, starmap
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from curvestep._checks import check_count

# Hidden and cell state of each layer, shaped (1, batch, width).
State = tuple[tuple[Tensor, Tensor], ...]


class RecurrentModel(nn.Module):
    """Word embedding, LSTM layers of their own widths, and a softmax layer that shares the embedding.

    The last layer has the width of the embedding, as in AWD-LSTM: the softmax then needs no projection and
    no weights of its own, only a bias.
    """

    def __init__(self, vocab_size: int, *, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        widths = [embedding, *[hidden] * (layers - 1), embedding]
        self.embedding = nn.Embedding(vocab_size, embedding)
        self.lstms = nn.ModuleList(starmap(nn.LSTM, pairwise(widths)))
        self.decoder = nn.Linear(widths[-1], vocab_size)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)


class LSTMModel(RecurrentModel):
    """LSTM language model of the paper's quantitative comparison (200/512), and its laptop size (128/200).

    ``embedding`` is the width of the word vectors and of the last layer, ``hidden`` that of the other layers;
    ``dropout`` the probability of dropping an activation, after the embedding and after each layer.

    Example:
        >>> model = LSTMModel(10, embedding=4, hidden=6)
        >>> logits, state = model(torch.zeros(3, 2, dtype=torch.long))
        >>> logits.shape, len(state)
        (torch.Size([3, 2, 10]), 2)
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        embedding: int = 128,
        hidden: int = 200,
        layers: int = 2,
        dropout: float = 0.0,
    ) -> None:
        super().__init__(vocab_size, embedding=embedding, hidden=hidden, layers=layers)
        self.dropout = dropout

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Scores of the next word, shaped (time, batch, words), and the state after the last one.

        ``tokens`` are word ids, shaped (time, batch); ``state`` is that of the window before, or zeros.
        """
        x = F.dropout(self.embedding(tokens), self.dropout, self.training)
        after = []
        for layer, before in zip(self.lstms, state or [None] * len(self.lstms), strict=True):
            x, left = layer(x, before)
            x = F.dropout(x, self.dropout, self.training)
            after.append(left)
        return self.decoder(x), tuple(after)


class Activations(NamedTuple):
    """Outputs of the last LSTM layer, before and after dropout, shaped (time, batch, width)."""

    raw: Tensor
    dropped: Tensor


def locked_dropout(x: Tensor, p: float, training: bool) -> Tensor:
    """Dropout with one mask for all times, for ``x`` shaped (time, batch, width)."""
    if p == 0 or not training:
        return x
    return x * F.dropout(torch.ones_like(x[:1]), p, training)


class AWDLSTM(RecurrentModel):
    """LSTM language model with weight-drop, locked dropout, embedding dropout and tied softmax.

    The defaults are the published Penn Treebank setting, 24,221,600 parameters with 10,000 words. In each
    training forward pass one mask is drawn for each of: the words of the vocabulary (``dropout_embedding``),
    the embedded inputs (``dropout_input``), the hidden-to-hidden weights of each layer (``weight_drop``), the
    outputs between layers (``dropout_hidden``) and the output (``dropout``); all are shared over time. The
    options are the probabilities of dropping, and widths as of `LSTMModel`.

    Example:
        >>> model = AWDLSTM(10, embedding=4, hidden=6)
        >>> logits, state, activations = model(torch.zeros(3, 2, dtype=torch.long), with_activations=True)
        >>> logits.shape, activation_penalty(activations) >= 0
        (torch.Size([3, 2, 10]), tensor(True))
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        embedding: int = 400,
        hidden: int = 1150,
        layers: int = 3,
        dropout: float = 0.4,
        dropout_hidden: float = 0.25,
        dropout_input: float = 0.4,
        dropout_embedding: float = 0.1,
        weight_drop: float = 0.5,
    ) -> None:
        super().__init__(vocab_size, embedding=embedding, hidden=hidden, layers=layers)
        self.dropout, self.dropout_hidden, self.dropout_input = dropout, dropout_hidden, dropout_input
        self.dropout_embedding, self.weight_drop = dropout_embedding, weight_drop

    def forward(
        self, tokens: Tensor, state: State | None = None, *, with_activations: bool = False
    ) -> tuple[Tensor, State] | tuple[Tensor, State, Activations]:
        """As of `LSTMModel`; ``with_activations`` also returns what `activation_penalty` needs."""
        x = locked_dropout(self._embed(tokens), self.dropout_input, self.training)
        dropouts = [*[self.dropout_hidden] * (len(self.lstms) - 1), self.dropout]
        after, raw = [], x
        for layer, before, p in zip(self.lstms, state or [None] * len(self.lstms), dropouts, strict=True):
            raw, left = self._run(layer, x, before)
            x = locked_dropout(raw, p, self.training)
            after.append(left)
        logits = self.decoder(x)
        if with_activations:
            return logits, tuple(after), Activations(raw, x)
        return logits, tuple(after)

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
    check_count("base", base)
    usual = torch.rand((), generator=generator).item() < 0.95
    centre = base if usual else base / 2
    return max(5, int(centre + 5 * torch.randn((), generator=generator).item()))


def mean_bptt_length(base: int) -> float:
    """Mean of :func:`random_bptt_length`, whose lengths are rounded down."""
    return 0.975 * base - 0.5
