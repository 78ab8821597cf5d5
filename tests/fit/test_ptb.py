"""The paper's observation on Penn Treebank, at the scale of a laptop."""

import gzip
import os
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import curvestep as cs

DATA = Path(os.environ.get("CURVESTEP_DATA", "")) / "ptb.train.txt.gz"
NUM_WORDS = 2000  # most of the time goes to the outputs


class SmallLSTM(nn.Module):
    """Two layers, embedding 128, hidden 200, output tied to the embedding: 128 -> 200 -> 128."""

    def __init__(self, words):
        super().__init__()
        self.embedding = nn.Embedding(words, 128)
        self.first, self.second = nn.LSTM(128, 200), nn.LSTM(200, 128)
        self.bias = nn.Parameter(torch.zeros(words))
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)

    def forward(self, tokens, state):
        out, first = self.first(self.embedding(tokens), state and state[0])
        out, second = self.second(out, state and state[1])
        return F.linear(out, self.embedding.weight, self.bias), (first, second)


def ptb_stream(batch=20):
    with gzip.open(DATA, "rt", encoding="ascii") as file:
        words = [word for line in file for word in [*line.split(), "<eos>"]]
    index = {word: i for i, (word, _) in enumerate(Counter(words).most_common(NUM_WORDS), 1)}  # 0: the others
    stream = torch.tensor([index.get(word, 0) for word in words])
    rows = len(stream) // batch
    return stream[: rows * batch].view(batch, rows).t().contiguous(), len(index) + 1


def probed_run(max_norm, *, steps, lr=3.0, length=35, seed=0):
    stream, words = ptb_stream()
    torch.manual_seed(seed)
    model = SmallLSTM(words).float()
    optimizer = cs.ClippedSGD(model.parameters(), lr=lr, max_norm=max_norm)
    probe = cs.SmoothnessProbe(model, every=5, fractions=(1.0,))
    state = None
    for step in range(steps):
        x = stream[step * length : (step + 1) * length]
        y = stream[step * length + 1 : (step + 1) * length + 1]
        before = state

        def loss_fn(x=x, y=y, before=before):
            logits, after = model(x, before)
            loss_fn.after = after
            return F.cross_entropy(logits.flatten(0, 1), y.flatten())

        loss = loss_fn()
        state = tuple(tuple(part.detach() for part in layer) for layer in loss_fn.after)
        loss.backward()
        with probe(loss_fn):
            optimizer.step()
        optimizer.zero_grad()
    return probe.trace


@pytest.mark.slow
@pytest.mark.skipif(not DATA.is_file(), reason="Penn Treebank is not in the folder CURVESTEP_DATA")
def test_clipping_raises_the_rank_correlation_on_penn_treebank():
    torch.set_default_dtype(torch.float32)
    plain = cs.fit_smoothness(probed_run(float("inf"), steps=300))
    clipped = cs.fit_smoothness(probed_run(0.25, steps=300))
    print(f"without clipping\n{plain}\nwith max_norm 0.25\n{clipped}")
    assert plain.num_points == clipped.num_points == 60
    assert clipped.spearman > plain.spearman
    for fit in (plain, clipped):
        assert fit.spearman_interval[0] < fit.spearman < fit.spearman_interval[1]
        assert fit.control is not None
        assert -1 <= fit.control.spearman_interval[0] <= fit.control.spearman_interval[1] <= 1
