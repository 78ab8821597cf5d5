"""The small LSTM language model, and what every recurrent model here shares."""

from __future__ import annotations

from itertools import pairwise

from torch import Tensor, nn
from torch.nn import functional as F

from curvestep._checks import check_count

# Hidden and cell state of each layer, shaped (1, batch, width).
State = tuple[tuple[Tensor, Tensor], ...]


def num_parameters(model: nn.Module) -> int:
    """Number of trained numbers; a tied weight counts once.

    Example:
        >>> num_parameters(nn.Linear(3, 2))
        8
    """
    return sum(p.numel() for p in model.parameters() if p.requires_grad)


def check_dropout(name: str, value: float) -> float:
    """``value`` if it is a probability below one."""
    if not 0 <= value < 1:
        raise ValueError(f"`{name}` must be a probability in [0, 1), got {value!r}.")
    return value


class RecurrentModel(nn.Module):
    """Word embedding, LSTM layers of their own widths, and a softmax layer that may share the embedding.

    With ``tied`` weights the last layer has the width of the embedding, as in AWD-LSTM: the softmax then
    needs no projection and no weights of its own, only a bias.
    """

    def __init__(self, vocab_size: int, *, embedding: int, hidden: int, layers: int, tied: bool) -> None:
        super().__init__()
        sizes = {"vocab_size": vocab_size, "embedding": embedding, "hidden": hidden, "layers": layers}
        for name, value in sizes.items():
            check_count(name, value)
        widths = [embedding, *[hidden] * (layers - 1), embedding if tied else hidden]
        self.embedding = nn.Embedding(vocab_size, embedding)
        self.lstms = nn.ModuleList(nn.LSTM(a, b) for a, b in pairwise(widths))
        self.decoder = nn.Linear(widths[-1], vocab_size)
        if tied:
            self.decoder.weight = self.embedding.weight
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        nn.init.uniform_(self.decoder.weight, -0.1, 0.1)
        nn.init.zeros_(self.decoder.bias)

    def init_state(self, batch_size: int) -> State:
        """Zeros for ``batch_size`` streams, on the device and in the type of the parameters."""
        like = self.decoder.weight
        widths = [layer.hidden_size for layer in self.lstms if isinstance(layer, nn.LSTM)]
        return tuple(
            (like.new_zeros(1, batch_size, width), like.new_zeros(1, batch_size, width)) for width in widths
        )


class LSTMModel(RecurrentModel):
    """LSTM language model of the paper's quantitative comparison (200/512), and its laptop size (128/200).

    Args:
        vocab_size: Number of words.
        embedding: Width of the word vectors.
        hidden: Width of the LSTM layers; with ``tied`` the last one has the width of the embedding instead.
        layers: Number of LSTM layers.
        dropout: Probability of dropping an activation, after the embedding and after each layer.
        tied: Share the weights of embedding and softmax.

    Example:
        >>> import torch
        >>> model = LSTMModel(10, embedding=4, hidden=6)
        >>> logits, state = model(torch.zeros(3, 2, dtype=torch.long), model.init_state(2))
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
        tied: bool = True,
    ) -> None:
        super().__init__(vocab_size, embedding=embedding, hidden=hidden, layers=layers, tied=tied)
        self.dropout = check_dropout("dropout", dropout)

    def forward(self, tokens: Tensor, state: State | None = None) -> tuple[Tensor, State]:
        """Scores of the next word at each place, and the state after the last one.

        Args:
            tokens: Word ids, shaped (time, batch).
            state: From `init_state` or the window before; zeros by default.

        Returns:
            Logits shaped (time, batch, words), and the new state.
        """
        state = self.init_state(tokens.shape[1]) if state is None else state
        x = F.dropout(self.embedding(tokens), self.dropout, self.training)
        after = []
        for layer, before in zip(self.lstms, state, strict=True):
            x, left = layer(x, before)
            x = F.dropout(x, self.dropout, self.training)
            after.append(left)
        return self.decoder(x), tuple(after)
