"""Held-out data that are shorter than a recipe would like."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from curvestep_reproduction.models import activation_penalty
from curvestep_reproduction.tasks import make_task
from reproduction.tests.small import small_images, small_language

CPU = torch.device("cpu")


def test_accuracy_is_a_share_of_the_images_there_are():
    task = make_task(small_images(eval_size=100_000), offline=True)
    task.images = replace(task.images, test_x=task.images.test_x[:7], test_y=task.images.test_y[:7])
    model = task.build().eval()
    found = task.evaluate(model, "test", CPU)
    x, y = task.images.test_x, task.images.test_y
    logits = model(task._ready(x))
    assert found["accuracy"] == pytest.approx(100 * (logits.argmax(1) == y).double().mean().item())
    assert found["loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-5)


@pytest.mark.parametrize("size", [2, 3, 15, 19, 225])
def test_a_text_is_evaluated_in_at_most_ten_streams(tmp_path, size):
    task = make_task(small_language(tmp_path, eval_size=size))
    model = task.build().eval()
    found = task.evaluate(model, "valid", CPU)
    assert found["perplexity"] == pytest.approx(math.exp(found["loss"]))
    count = min(10, size // 2)
    rows = task.corpus.valid[: size // count * count].view(count, -1).T
    logits = model(rows[:-1], None)[0]
    assert found["loss"] == pytest.approx(
        F.cross_entropy(logits.flatten(0, 1), rows[1:].flatten()).item(), rel=1e-5
    )


def test_a_text_without_words_to_evaluate_on_is_refused_before_training(tmp_path):
    with pytest.raises(ValueError, match=r"valid.* 1 words"):
        make_task(replace(small_language(tmp_path), eval_size=1))


@pytest.mark.parametrize("count", [3, 7])
def test_too_few_words_are_counted_as_they_were_cut(tmp_path, count):
    with pytest.raises(ValueError, match=f"{count} words.*`batch_size`"):
        make_task(small_language(tmp_path, num_words=count, batch_size=4))


@pytest.mark.parametrize("weights", [{"alpha": 2.0, "beta": 0.0}, {"alpha": 0.0, "beta": 1.0}])
def test_penalties_are_added_to_the_loss(tmp_path, weights):
    names = {"activation_penalty": weights["alpha"], "temporal_penalty": weights["beta"]}
    plain, penalised = (make_task(small_language(tmp_path, **fields)) for fields in ({}, names))
    model, batch = plain.build(), plain.batch(0)
    penalty = activation_penalty(model(batch[0])[2], **weights)
    assert penalty > 0
    torch.testing.assert_close(penalised.loss(model, batch)[0], plain.loss(model, batch)[0] + penalty)


def test_a_vocabulary_keeps_the_most_frequent_words(tmp_path):
    whole, cut = (make_task(small_language(tmp_path, vocabulary=size)) for size in (0, 12))
    words = [whole.corpus.vocabulary[i] for i in whole.corpus.train.tolist()]
    often = [word for word, _ in Counter(words).most_common() if word != "<eos>"][:10]
    assert cut.corpus.vocabulary == ("<unk>", "<eos>", *often)
    spelled = [cut.corpus.vocabulary[i] for i in cut.corpus.train.tolist()]
    assert spelled == [word if word in cut.corpus.vocabulary else "<unk>" for word in words]
    assert "<unk>" in [cut.corpus.vocabulary[i] for i in cut.corpus.valid.tolist()]
    assert cut.build()(cut.batch(0)[0])[0].shape[-1] == 12


def test_a_vocabulary_changes_the_start_only_where_it_is_set(tmp_path):
    recipe = small_language(tmp_path)
    assert recipe.problem == "text.txt/lstm/8/10/2"  # as before there was one: old runs keep their start
    assert replace(recipe, vocabulary=12).problem == "text.txt-12/lstm/8/10/2"
    with pytest.raises(ValueError, match=r"`vocabulary`.* 3, got 2"):
        replace(recipe, vocabulary=2)


def test_pooled_images_are_means_over_squares_of_pixels():
    whole, pooled = (make_task(small_images(pooling=size), offline=True) for size in (1, 2))
    (x, y), (small, same) = (task.oracle_batches(1.0)[0] for task in (whole, pooled))
    torch.testing.assert_close(small, F.avg_pool2d(x, 2))
    assert torch.equal(y, same)
    assert pooled.batch(0)[0].shape == (8, 3, 16, 16)
    with pytest.raises(ValueError, match="`pooling` must be 1, 2 or 4"):
        small_images(pooling=3)
