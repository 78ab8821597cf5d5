"""The LSTM language model: a small one, or AWD-LSTM (Merity, Keskar, Socher, 2018), the paper's own."""

from __future__ import annotations

from itertools import pairwise, starmap
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

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
    of the vocabulary (``dropout_embedding``), the embedded inputs (``dropout_input``), the hidden-to-hidden
    weights of each layer (``weight_drop``), the outputs between layers (``dropout_hidden``) and the output
    (``dropout``); all are shared over time. The options are the probabilities of dropping; ``embedding`` is
    the width of the word vectors and of the last layer, ``hidden`` that of the other layers.

    Example:
        >>> model = LSTMModel(10, embedding=4, hidden=6)
        >>> logits, state, activations = model(torch.zeros(3, 2, dtype=torch.long), with_activations=True)
        >>> logits.shape, len(state), activation_penalty(activations) >= 0
        (torch.Size([3, 2, 10]), 2, tensor(True))
    """

    def __init__(
        self,
        vocab_size: int,
        *,
        embedding: int = 128,
        hidden: int = 200,
        layers: int = 2,
        dropout: float = 0.0,
        dropout_hidden: float = 0.0,
        dropout_input: float = 0.0,
        dropout_embedding: float = 0.0,
        weight_drop: float = 0.0,
    ) -> None:
        super().__init__()
        widths = [embedding, *[hidden] * (layers - 1), embedding]
        self.embedding = nn.Embedding(vocab_size, embedding)
        self.lstms = nn.ModuleList(starmap(nn.LSTM, pairwise(widths)))
        self.decoder = nn.Linear(widths[-1], vocab_size)
        self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)
        self.dropouts = [*[dropout_hidden] * (layers - 1), dropout]  # after each layer
        self.dropout_input, self.dropout_embedding = dropout_input, dropout_embedding
        self.weight_drop = weight_drop

    def forward(
        self, tokens: Tensor, state: State | None = None, *, with_activations: bool = False
    ) -> tuple[Tensor, State] | tuple[Tensor, State, Activations]:
        """Scores of the next word, shaped (time, batch, words), and the state after the last one.

        ``tokens`` are word ids, shaped (time, batch); ``state`` is that of the window before, or zeros;
        ``with_activations`` also returns what `activation_penalty` needs.
        """
        x = locked_dropout(self._embed(tokens), self.dropout_input, self.training)
        after, raw = [], x
        before = state or [None] * len(self.lstms)
        for layer, start, p in zip(self.lstms, before, self.dropouts, strict=True):
            raw, left = self._run(layer, x, start)
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
