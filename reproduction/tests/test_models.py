"""The language models and residual networks: sizes, formulas, and what is random in them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from curvestep_reproduction.models import (
    Activations,
    Block,
    LSTMModel,
    ResNet20,
    activation_penalty,
    locked_dropout,
    random_bptt_length,
)


def small(**dropouts):
    return LSTMModel(11, embedding=5, hidden=7, layers=3, **dropouts)


def words(time=6, batch=3):
    return torch.randint(0, 11, (time, batch))


# Sizes


@pytest.mark.parametrize(
    ("make", "count"),
    [
        # embedding + per layer 4 (in + out + 2) out + bias of the softmax
        (lambda: LSTMModel(10_000), 1_280_000 + 800 * (128 + 200 + 2) + 512 * (200 + 128 + 2) + 10_000),
        (
            lambda: LSTMModel(10_000, embedding=200, hidden=512),
            2_000_000 + 2048 * (200 + 512 + 2) + 800 * (512 + 200 + 2) + 10_000,
        ),
        (
            lambda: LSTMModel(10_000, embedding=400, hidden=1150, layers=3),
            24_221_600,
        ),  # published: 24 million
        (ResNet20, 269_722),  # published: 0.27 million
    ],
)
def test_number_of_parameters(make, count):
    assert sum(p.numel() for p in make().parameters()) == count


def test_tied_softmax_stays_the_embedding_in_a_copy_and_a_saved_state():
    model = small()
    assert model.decoder.weight is model.embedding.weight
    copied = copy.deepcopy(model)
    assert copied.decoder.weight is copied.embedding.weight
    other = small()
    other.load_state_dict(model.state_dict())
    tokens = words()
    torch.testing.assert_close(other(tokens)[0], model(tokens)[0])


# The recurrence


def lstm_by_formula(model, tokens, *, masks=None):
    """All layers, one time step and one formula after another; ``masks`` for the recurrent weights."""
    x = [model.embedding.weight[row] for row in tokens]
    for number, layer in enumerate(model.lstms):
        recurrent = layer.weight_hh_l0 * (masks[number] if masks else 1)
        h = c = torch.zeros(tokens.shape[1], layer.hidden_size)
        out = []
        for at in x:
            gates = at @ layer.weight_ih_l0.T + layer.bias_ih_l0 + h @ recurrent.T + layer.bias_hh_l0
            i, f, g, o = gates.chunk(4, dim=1)
            c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
            h = torch.sigmoid(o) * torch.tanh(c)
            out.append(h)
        x = out
    return torch.stack([at @ model.embedding.weight.T + model.decoder.bias for at in x])


def test_logits_follow_the_lstm_formula():
    model, tokens = small(), words()
    torch.testing.assert_close(model(tokens)[0], lstm_by_formula(model, tokens))


def test_state_carries_over_from_window_to_window():
    model, tokens = small(weight_drop=0.5, dropout_embedding=0.1, dropout_input=0.4).eval(), words(9)
    whole, end, _ = model(tokens)
    first, state, _ = model(tokens[:4])
    second, state, _ = model(tokens[4:], state)
    torch.testing.assert_close(torch.cat([first, second]), whole)
    torch.testing.assert_close(state, end)


def test_the_first_state_is_zero_in_the_type_of_the_parameters():
    model, tokens = small().to(torch.float32), words()
    zeros = tuple(tuple(torch.zeros(2, 1, 3, width, dtype=torch.float32)) for width in (7, 7, 5))
    (given, after, _), (default, end, _) = model(tokens, zeros), model(tokens)
    assert torch.equal(given, default)
    assert [tuple(h.shape) for h, _ in end] == [(1, 3, 7), (1, 3, 7), (1, 3, 5)]
    assert all(t.dtype == torch.float32 for pair in end for t in pair)
    torch.testing.assert_close(after, end, rtol=0, atol=0)


# What AWD-LSTM draws at random


def test_weight_drop_masks_the_recurrent_weights_once_a_pass():
    model, tokens = small(weight_drop=0.5), words()
    torch.manual_seed(3)
    dropped = model(tokens)[0]
    torch.manual_seed(3)  # the same numbers draw the same masks
    masks = [F.dropout(torch.ones_like(layer.weight_hh_l0), 0.5) for layer in model.lstms]
    assert {float(v) for mask in masks for v in mask.unique()} == {0.0, 2.0}
    torch.testing.assert_close(dropped, lstm_by_formula(model, tokens, masks=masks))


def test_weight_drop_reaches_the_parameters_and_leaves_them_alone():
    model, tokens = small(weight_drop=0.5), words()
    before = copy.deepcopy(model.state_dict())
    torch.manual_seed(3)
    model(tokens)[0].square().mean().backward()
    torch.manual_seed(3)
    kept = F.dropout(torch.ones_like(model.lstms[0].weight_hh_l0), 0.5) > 0
    grad = model.lstms[0].weight_hh_l0.grad
    assert torch.equal(grad != 0, kept)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert list(before) == list(dict(small().state_dict()))
    model.eval()
    torch.testing.assert_close(model(tokens)[0], lstm_by_formula(model, tokens))


def test_locked_dropout_has_one_mask_for_all_times():
    x = torch.rand(9, 40, 50) + 0.1
    y = locked_dropout(x, 0.4, True)
    mask = (y / x).round(decimals=9)
    assert torch.equal(mask, mask[:1].expand_as(mask))
    assert {round(v, 6) for v in mask.unique().tolist()} == {0.0, round(1 / 0.6, 6)}
    assert abs(float((mask[0] == 0).double().mean()) - 0.4) < 0.04
    assert not torch.equal(mask[0, 0], mask[0, 1])
    assert locked_dropout(x, 0.4, False) is x


def test_embedding_dropout_drops_whole_words_wherever_they_stand():
    model, tokens = small(dropout_embedding=0.4), words(12, 5)
    torch.manual_seed(4)
    got = model._embed(tokens)
    torch.manual_seed(4)
    mask = F.dropout(torch.ones(11), 0.4)
    assert 0 < int((mask == 0).sum()) < 11
    torch.testing.assert_close(got, F.embedding(tokens, model.embedding.weight * mask[:, None]))
    model.eval()
    torch.testing.assert_close(model._embed(tokens), model.embedding(tokens))


def test_activations_are_the_last_layer_before_and_after_dropout():
    model, tokens = small(dropout=0.5), words()
    logits, _, seen = model(tokens)
    torch.testing.assert_close(model.decoder(seen.dropped), logits)
    kept = seen.dropped != 0
    torch.testing.assert_close(seen.dropped[kept], 2 * seen.raw[kept])
    undropped, _, plain = small()(tokens)
    assert plain.raw is plain.dropped
    assert undropped.shape == logits.shape


def test_activation_penalty_by_hand():
    raw = torch.tensor([[[1.0, 2.0]], [[4.0, 2.0]], [[4.0, 0.0]]])  # changes 3, 0, 0, -2
    dropped = torch.tensor([[[2.0, 0.0]], [[8.0, 0.0]], [[8.0, 0.0]]])
    expected = 2 * (4 + 64 + 64) / 6 + 1 * (9 + 4) / 4
    torch.testing.assert_close(activation_penalty(Activations(raw, dropped)), torch.tensor(expected))
    alone = activation_penalty(Activations(raw[:1], dropped[:1]), alpha=3.0)
    torch.testing.assert_close(alone, torch.tensor(3 * 4 / 2))


def test_random_windows_are_drawn_as_published():
    source = torch.Generator().manual_seed(0)
    lengths = torch.tensor([float(random_bptt_length(source, 70)) for _ in range(4000)])
    half = lengths < 52.5  # 3.5 deviations from either centre
    assert abs(float(half.double().mean()) - 0.05) < 0.012
    # Cutting off the fraction takes away half a step on average.
    assert abs(float(lengths[~half].mean()) - 69.5) < 0.3
    assert abs(float(lengths[half].mean()) - 34.5) < 1.2
    assert abs(float(lengths[~half].std()) - 5) < 0.25


def test_random_windows_have_five_steps_and_repeat_with_the_generator():
    draws = [[random_bptt_length(torch.Generator().manual_seed(s), 6) for s in range(99)] for _ in range(2)]
    assert draws[0] == draws[1]
    assert min(draws[0]) == 5


# Residual networks


def test_shortcut_takes_every_second_pixel_and_adds_zero_channels():
    block = Block(4, 8, stride=2)
    nn.init.zeros_(block.norm2.weight)  # the two convolutions then add nothing
    x = torch.rand(2, 4, 6, 6)
    y = block(x)
    expected = torch.zeros(2, 8, 3, 3)
    for row in range(3):
        for column in range(3):
            expected[:, 2:6, row, column] = x[:, :, 2 * row, 2 * column]
    torch.testing.assert_close(y, expected)


def test_block_of_one_shape_adds_its_input():
    block = Block(4, 4, stride=1)
    x = torch.randn(2, 4, 5, 5)
    inner = F.batch_norm(F.conv2d(x, block.conv1.weight, padding=1), None, None, training=True).relu()
    inner = F.batch_norm(F.conv2d(inner, block.conv2.weight, padding=1), None, None, training=True)
    torch.testing.assert_close(block(x), (inner + x).relu())
