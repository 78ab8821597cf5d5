import dataclasses
import math

import pytest
import torch
from hypothesis import given, strategies as st

from curvestep_reproduction.cost import cost_of, steps_of
from curvestep_reproduction.data.corpus import load_corpus, load_topics
from curvestep_reproduction.models import MODELS, LSTMModel, options_of
from curvestep_reproduction.recipes import RECIPES, from_dict, get_recipe, to_dict, with_fields
from curvestep_reproduction.tasks import make_task, seed_of
from curvestep_reproduction.training.session import make_optimizer
from reproduction.tests.small import small_language


def test_a_kept_recipe_with_a_dropped_field_is_read_if_it_has_its_default():
    kept = to_dict(get_recipe("ptb-lstm")) | {"start_from": "", "averaging": "never", "patience": 5}
    assert from_dict(kept | {"figures": ["fig1"]}) == get_recipe("ptb-lstm")
    with pytest.raises(ValueError, match="no field `start_from`"):
        from_dict(kept | {"start_from": "runs/first"})


@pytest.mark.parametrize(
    ("names", "fields", "words"),
    [
        (["ptb-lsmt"], {}, r"no recipe 'ptb-lsmt'. Did you mean ptb-lstm\? Recipes: .*resnet20"),
        (
            ["ptb-lstm"],
            {"max_nrom": 1.0},
            r"no field `max_nrom`. Did you mean max_norm\? Fields: name, .*bptt",
        ),
        (["ptb-lstm", "huge"], {}, "must be one of 'laptop', 'longer', 'epoch', 'paper', got 'huge'"),
        (["ptb-awd-lstm", "longer"], {}, "at `scale` 'longer'. It has: laptop, epoch, paper"),
    ],
)
def test_unknown_names_are_errors_with_the_nearest_and_all_valid_ones(names, fields, words):
    with pytest.raises(ValueError, match=words):
        get_recipe(*names, **fields)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"lr": "fast"}, "`lr` must be of type float, got 'fast'"),
        ({"lr": -1.0}, "`lr` must be positive"),
        ({"max_norm": 0.0}, "`max_norm` must be positive"),
        ({"steps": 2.5}, "`steps` must be of type int, got 2.5"),
        ({"steps": True}, "`steps` must be of type int"),
        ({"steps": 0}, "Set one of them"),
        ({"steps": 5, "epochs": 5}, "Set one of them"),
        ({"fractions": 0.5}, "`fractions` must be of type tuple, got 0.5"),
        ({"optimizer": "adam"}, "`optimizer` must be one of"),
        ({"precision": "8-bit"}, "`precision` must be one of"),
        ({"fractions": ()}, "`fractions` must be numbers in"),
        ({"fractions": (0.0, 1.0)}, "`fractions` must be numbers in"),
        ({"lr_drops": (1.5,)}, "`lr_drops` must be shares"),
        ({"probe_data": 1.5}, "`probe_data` must be a share"),
        ({"dropout": 1.0}, "`dropout` must be a probability below 1"),
        ({"variable_bptt": "perhaps"}, "`variable_bptt` must be of type bool"),
        ({"model": "transformer"}, "`model` must be one of"),
    ],
)
def test_values_that_make_no_sense_are_named(fields, words):
    with pytest.raises(ValueError, match=words):
        get_recipe("ptb-lstm", **fields)


def test_text_from_a_command_line_is_read():
    recipe = get_recipe(
        "ptb-lstm", lr="30", max_norm="inf", steps="1e3", fractions=["0.5", "1"], variable_bptt="true"
    )
    assert (recipe.lr, recipe.max_norm, recipe.steps) == (30.0, math.inf, 1000)
    assert recipe.fractions == (0.5, 1.0)
    assert recipe.variable_bptt is True


def test_steps_and_epochs_replace_each_other():
    paper = get_recipe("ptb-awd-lstm", "paper")
    assert (paper.steps, paper.epochs) == (0, 500)
    assert dataclasses.replace(paper, steps=7, epochs=0) == with_fields(paper, steps=7)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=lambda r: f"{r.name}-{r.scale}")
def test_recipe_survives_json(recipe):
    assert from_dict(to_dict(recipe)) == recipe


@given(lr=st.floats(1e-6, 1e6), max_norm=st.floats(1e-6, 1e6) | st.just(math.inf))
def test_seeds_leave_the_optimizer_out(lr, max_norm):
    plain, other = get_recipe("ptb-lstm"), get_recipe("ptb-lstm", lr=lr, max_norm=max_norm, momentum=0.5)
    assert seed_of(plain, "start") == seed_of(other, "start")


def test_seeds_differ_by_purpose_seed_and_problem():
    recipe = get_recipe("ptb-lstm")
    seeds = {
        seed_of(recipe, "start"),
        seed_of(recipe, "dropout"),
        seed_of(with_fields(recipe, seed=1), "start"),
        seed_of(with_fields(recipe, hidden=64), "start"),
        seed_of(get_recipe("cifar-resnet20"), "start"),
    }
    assert len(seeds) == 5


def test_foreign_configuration_is_refused():
    with pytest.raises(ValueError, match="`task` must be one of language, images"):
        from_dict({"name": "x"})


def test_label_says_the_setting():
    labels = [
        get_recipe("ptb-lstm", lr=30, max_norm=0.25).label,
        get_recipe("ptb-lstm", lr=3, max_norm=math.inf).label,
        get_recipe("ptb-lstm", optimizer="normalized", lr=7.5, offset=0.25).label,
        get_recipe("cifar-resnet20").label,
    ]
    assert labels[:2] == ["lr 30, clip 0.25", "lr 3, no clip"]
    assert labels[2:] == ["lr 7.5, normalized, offset 0.25", "lr 0.1, no clip, momentum 0.9"]


def test_a_recipe_says_its_model_and_what_its_data_were_cut_to():
    cut = get_recipe("ptb-lstm", "longer", vocabulary=2000, num_words=5000)
    assert cut.model_words == "LSTM 200/512, 2,000 different words, 5,000 words of text"
    assert get_recipe("ptb-awd-lstm", "epoch").model_words == "AWD-LSTM 400/1150"
    images = get_recipe("cifar-resnet20", pooling=2, num_images=80)
    assert images.model_words == "ResNet20, 80 images, 16 pixels a side"
    assert (cut.data, images.data) == ("ptb", "cifar10-subset")


def test_a_corpus_has_its_own_number_of_words(tmp_path):
    def of(name):
        return steps_of(get_recipe("ptb-lstm", corpus=name, epochs=1, batch_size=10, bptt=10))

    words = len(load_topics().train)
    assert of("topics") == round(words / 100) < of("ptb") == 9296
    text = tmp_path / "text.txt"
    text.write_text("one two three\n" * 500)
    assert of(str(text)) == len(load_corpus(text).train) // 100


def test_a_recipe_keeps_the_options_of_its_model_beside_its_fields():
    recipe = get_recipe("ptb-lstm", hidden="50", dropout=0.1)
    assert recipe.options["hidden"] == 50
    assert set(recipe.options) == set(options_of(LSTMModel))
    assert to_dict(recipe)["hidden"] == 50  # as in the folders of earlier runs
    with pytest.raises(ValueError, match="`options` must be one of"):
        dataclasses.replace(recipe, options={"heads": 2})
    with pytest.raises(ValueError, match=r"`heads`.*hidden"):
        with_fields(recipe, heads=2)


class Bigram(torch.nn.Module):
    """A model of somebody else: what stands in ``MODELS`` can be trained."""

    task = "language"
    sizes = ("rank",)

    def __init__(self, vocab_size, *, rank=3):
        super().__init__()
        self.into = torch.nn.Embedding(vocab_size, rank)
        self.out = torch.nn.Linear(rank, vocab_size)

    def forward(self, tokens, state=None):
        return self.out(self.into(tokens)), None, None


def test_a_model_and_a_rule_are_one_entry_each(tmp_path, monkeypatch):
    monkeypatch.setitem(MODELS, "bigram", Bigram)
    recipe = small_language(tmp_path, model="bigram", rank=4, optimizer="adamw", lr=0.01, probe_every=0)
    assert recipe.options == {"rank": 4}
    assert recipe.problem == "text.txt/bigram/4"
    assert recipe.label == "lr 0.01, AdamW, clip 0.25"
    task = make_task(recipe)
    model = task.build()
    assert model.out.weight.shape[1] == 4
    optimizer = make_optimizer(recipe, model)
    assert type(optimizer).__name__ == "ClippedAdamW"
    task.loss(model, task.batch(0))[0].backward()
    optimizer.step()
    assert optimizer.clip_stats()["steps"] == 1


def test_runs_of_earlier_commits_keep_their_seeds():
    kept = {
        "task": "language",
        "name": "ptb-lstm",
        "model": "lstm",
        "embedding": 64,
        "hidden": 100,
        "steps": 9,
    }
    assert from_dict(kept).problem == "ptb/lstm/64/100/2"
    assert from_dict({"task": "images", "name": "cifar-resnet20", "steps": 9}).problem.endswith("/resnet20")


def test_the_cost_counts_rows_from_the_first_measured_step():
    fields = {"steps": 100, "probe_every": 10, "lr": 1.0}
    never, late, always = (
        cost_of(get_recipe("cifar-resnet20", **{**fields, **changed}))
        for changed in ({"probe_every": 0}, {"probe_from": 50}, {})
    )
    assert never < late < always
    assert late - never == pytest.approx((always - never) / 2)
